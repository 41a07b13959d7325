"""`emulated.core`, compiled: advances engines by many steps in one call.

The same rules in the same arithmetic, over tables of numbers: a run comes out as with the plain
core, bit for bit, which the simulator's tests check. What makes it fast besides being compiled: a
step in which everybody decodes touches no request. Their lengths grow with a counter; how many of
them need a block is counted by the remainders of their offsets; who finishes next is known.

`tables` has the data, `queue`, `batch`, `steps`, `reports` and `moves` what happens to it.
`entries` has what Python calls, which the simulator alone does (`simulator.fast`).
"""
