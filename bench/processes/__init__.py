"""Costs of Sterna's processes: processor time of front ends and of explanations, and memory.

`front_end` and `memory` have plain vLLM beside them. `equal_streams` is the load of all three.
"""
