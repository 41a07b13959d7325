"""The processes of the cluster in virtual time: actors around the production cores, and Ray.

Offers: actors, frontends, instances, ray, schedulers, stream_readers, supervisor, world.
Imports: config, engine, fault_simulation.engine, fault_simulation.oracle, fault_simulation.virtual,
    frontend.requests, frontend.resumable, instance, messages, messaging, migration,
    migration.messages, scheduler, supervisor, types.
"""
