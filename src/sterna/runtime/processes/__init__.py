"""Operating-system facts: processes and their ends, limits, log lines, restarts.

Offers: limits, log_lines, process, reaper, restarts.
Imports: config, errors, folders, own_log, supervisor.
"""
