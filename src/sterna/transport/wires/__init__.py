"""Wires for KV bytes: shared memory, TCP and Gloo behind one interface (`channel`).

Offers: channel, frames, gloo, shm, tcp, waiting.
Imports: errors, transport.memory.
"""
