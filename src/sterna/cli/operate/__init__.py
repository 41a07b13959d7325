"""Commands for operators, which ask a running server over HTTP.

Offers: admin_commands, fleet_commands.
Imports: errors.
"""
