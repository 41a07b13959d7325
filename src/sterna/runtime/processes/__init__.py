"""Operating-system facts: processes and their ends, limits, log noise, restarts.

Offers: limits, log_filters, process, reaper, restarts.
Imports: config, errors, folders, log_throttle, supervisor.
"""
