"""The operators' commands, which ask a running server: instances, requests, migrate, drain, start,
restart.

Offers: admin_commands, fleet_commands.
Imports: errors.
"""
