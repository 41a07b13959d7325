"""The processes of `sterna serve` on its own node: the command's process, the driver, Ray's head.

`launch` starts all of it and ends it; `driver` has a supervisor running, and replaces one that
died.

Offers: driver_messages, launch, options_process, ray_environment.
Imports: config, engine.emulated, errors, folders, messaging, runtime.actors, runtime.fork_server,
    runtime.processes, runtime.supervisor, supervisor.
"""
