"""Emulated engines in virtual time whose KV cache can be wrong, and their copies.

Offers: copies, engine, immovable.
Imports: engine.emulated, fault_simulation.oracle, fault_simulation.virtual, messages,
    migration.messages, types.
"""
