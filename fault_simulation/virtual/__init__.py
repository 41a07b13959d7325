"""Virtual time: the timeline, the nodes, the network and its faults.

Offers: link_faults, network, nodes, settings, timeline, violations, world.
Imports: config, engine.emulated, fault_simulation.engine, fault_simulation.oracle,
    fault_simulation.processes, frontend.requests, frontend.resumable, instance, messages,
    messaging, policy, scheduler, supervisor.
"""
