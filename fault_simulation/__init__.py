"""Fault simulation: the whole cluster in virtual time, under faults, by one seed.

The cores that serve decide everything: `GlobalScheduler` and `SchedulerCore`, `Llumlet` and
`InstanceCore`, `FrontendCore`, `Fleet` and `SupervisorCore`, the emulated engine's core. `virtual`
has the clock, the network and the nodes, `processes` the actors, `engine` their engines,
`adversary` faults and clients, `oracle` what must hold, `planted` mistakes that must be found.
`run` runs a seed. docs/internals/fault_simulation.md says what is simulated and what is not.

Offers: nothing.
Imports: config, fault_simulation.adversary, fault_simulation.engine, fault_simulation.oracle,
    fault_simulation.processes, fault_simulation.virtual, scheduler, supervisor.
"""
