"""Parts of `sterna serve` that only failures need, each compared with a server without it.

`removals` has the parts, and the change of the source that removes each. `trials` says which fault
shows the use of a part; `crashes` and `bad_clients` carry the faults out. `watching` sends requests
meanwhile and records what their clients see. `report` makes the rows and the table.
"""
