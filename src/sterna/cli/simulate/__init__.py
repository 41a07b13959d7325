"""`sterna simulate` and `sterna replay`: workloads, overrides and reports of simulated clusters.

Offers: library, replay_command, simulate_command, simulate_options.
Imports: cli.options, config, dashboard, engine.emulated, engine.profiling, errors, metrics, policy,
    policy_file, simulator, types, workload.
"""
