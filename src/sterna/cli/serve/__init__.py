"""`sterna serve`: its options, the cluster that they describe, and its start.

Offers: engine_options, serve_command, serve_options.
Imports: cli, cli.simulate, config, demo_model, engine.emulated, engine.profiling, engine.vllm,
    errors, policy, priority_classes, runtime.home, runtime.processes, types.
"""
