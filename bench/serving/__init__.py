"""Workloads sent to real servers, and what came of them, recorded as simulations are.

`client` sends a trace's requests when they are due, and notes what each of its streams saw.
`observer` samples the server's instances meanwhile. `records` makes one `metrics.Records` and one
`metrics.ClusterRecord` of both. `session` does all of that; `served` starts a server for it, and
ends it. `report` prints and writes a run.
"""
