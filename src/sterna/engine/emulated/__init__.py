"""An engine without a model: continuous batching over paged memory, and how long a step takes.

`core` decides what vLLM's scheduler decides (admission, batching, preemption, drains, reservations,
adoptions) and has no clock: a step returns its duration. `durations` has the duration's model,
`profiles` holds its constants for real hardware, `emulated_engine` runs it on the wall clock: a
step is a sleep. `compiled` is the same core, many steps in one call, for the simulator.

Offers: config, core, durations, emulated_engine, outcomes, profiles, refusals, requests, steps,
    tokens.
Imports: engine, errors, messages, migration.messages, priority_classes, types.
"""
