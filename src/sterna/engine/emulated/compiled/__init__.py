"""The core of the emulated engine, compiled: advances engines by many steps in one call.

The same rules in the same arithmetic, over tables of numbers: a run gives the same results as the
plain core, bit for bit, which the simulator's tests check. Besides compilation, one thing makes it
fast: a step in which every request decodes touches no request. Their lengths grow with a counter;
the remainders of their offsets tell how many need a block; the next one to finish is known.

`tables` has the data, `queue`, `batch`, `prefixes`, `stepping`, `reports` and `moves` what happens
to it; `entries` has what Python calls, and finds the tables by their `pointers`.

Offers: entries, tables.
Imports: engine.emulated, folders, types.
"""
