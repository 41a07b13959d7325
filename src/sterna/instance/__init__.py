"""One instance: an engine, and the llumlet that schedules it (Section 4.3).

`llumlet` decides what moves, `core` joins it with messages from other actors (both pure);
`admissions`, `cache_contents` and `termination` are parts of that core. `shell` drives the core
with a mailbox, a clock and an engine; `effect_runner` carries out migrations.

Offers: lease_guard, llumlet, shell.
Imports: config, engine, messages, messaging, migration, migration.messages, policy, supervisor,
    types.
"""
