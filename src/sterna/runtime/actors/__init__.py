"""The Ray actors that host scheduler, instances and front ends, each in a process of its own.

Offers: actor_classes, addresses, member_status, packed_args.
Imports: config, engine, engine.emulated, engine.vllm, errors, frontend.metrics,
    frontend.vllm_server, instance, messages, messaging, policy_file, runtime.processes, scheduler,
    supervisor, types.
"""
