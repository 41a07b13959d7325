"""Options of commands as tables, and the values that they take.

Offers: option_tables, option_values.
Imports: errors, workload.
"""
