"""Live migration (Section 4.2): the state machines of source and destination, and who runs which.
Pure.

`coordinator` holds the machines of one instance. They return effects, which an interpreter carries
out in the order that `effect_queue` allows.

Offers: coordinator, effect_queue.
Imports: config, errors, migration.messages, types.
"""
