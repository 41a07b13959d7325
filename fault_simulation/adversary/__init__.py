"""The adversary: faults, clients and operators, drawn from the seed.

Offers: clients, faults.
Imports: fault_simulation.oracle, fault_simulation.processes, fault_simulation.virtual,
    frontend.resumable, messages, migration.messages, supervisor, types.
"""
