"""The operators' commands, which ask a running server: instances, requests, explain, top, migrate,
drain, start, restart.

Offers: admin_commands, fleet_commands, top_command.
Imports: cli.options, dashboard, errors.
"""
