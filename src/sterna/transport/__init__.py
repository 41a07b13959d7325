"""The KV data plane (Section 5): block fusion, chunks, pacing, and the wires.

`plane` joins connections (`sender`, `receiver`) and transfers (`ledger`); it waits for steps of the
engine (`fences`). `data_plane` is its interface. `shards` has the ranks that hold the same blocks.

Offers: data_plane, plane, shards.
Imports: config, errors, transport.memory, transport.wires, types.
"""
