"""`sterna simulate`: workloads, overrides and reports of simulated clusters.

Offers: library, simulate_command, simulate_options.
Imports: cli.options, config, engine.emulated, errors, metrics, policy, policy_file,
    simulator, types, workload.
"""
