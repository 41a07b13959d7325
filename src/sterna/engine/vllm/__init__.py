"""The real engine: vLLM, unpatched, through its own extension points.

`engine` implements `engine.interface`: `step_thread` steps vLLM's core, `scheduler` gives requests
away and takes them in, `worker` has a rank's KV data plane, `transfers` counts the copies of all
ranks, `offloading` tells vLLM's KV offloading of requests that move, `weight_updates` labels
engines by the updates of their weights; `sampling` is a package of its own. `arguments`, `facts`,
`support` and `guard` read vLLM's options, configuration, limits and installation.

Offers: arguments, engine, facts, guard, hosted_core, kv_groups, payload, step_timing.
Imports: config, engine, engine.emulated, engine.profiling, engine.vllm.sampling, errors, folders,
    messages, migration.messages, own_log, priority_classes, transport, transport.memory, types.
"""
