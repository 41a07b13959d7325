"""Emulated engines in virtual time whose KV cache can be wrong, and their copies.

`engine_kinds` has the KV cache groups of a cluster, `kv_cache` the block tables of requests, over
the blocks of `block_pool`, and `grouped_core` production's core over these.

Offers: block_pool, copies, engine, engine_kinds, immovable, kv_cache.
Imports: config, engine, engine.emulated, fault_simulation.oracle, fault_simulation.virtual,
    messages, migration.messages, types.
"""
