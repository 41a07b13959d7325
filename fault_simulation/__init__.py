"""The whole cluster in virtual time, under faults, by one seed.

The cores that serve decide everything: `GlobalScheduler` and `SchedulerCore`, `Llumlet` and
`InstanceCore`, `FrontendCore`, `Fleet` and `SupervisorCore`, the emulated engine's core. Here are
a clock, a network that keeps few promises, processes that die and hang, clients who know what they
must be told, and checkers. `docs/fault_simulation.md` says what is simulated and what is not.
"""
