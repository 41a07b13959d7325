"""The supervisor's shell: carries out what its pure core (`sterna.supervisor`) decides, on Ray.

`shell` drives the core; `instance_actors` and `services` start and end actors, `watch` notices
their deaths and hangs, `recovery` finds what a predecessor left.

Offers: instance_actors, ray_errors, shell.
Imports: config, engine, engine.emulated, engine.vllm, errors, messages, messaging, own_log,
    runtime.actors, runtime.fork_server, runtime.processes, supervisor, types.
"""
