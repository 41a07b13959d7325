"""`sterna serve`: its options, checked and put together as a configuration, and the command.

Offers: cluster_address, engine_options, read_options, serve_command, serve_options.
Imports: cli.options, cli.simulate, config, demo_model, engine, engine.emulated, engine.profiling,
    engine.vllm, errors, policy, policy_file, priority_classes, priority_files, runtime.actors,
    runtime.home, runtime.processes, types.
"""
