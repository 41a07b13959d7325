"""`sterna simulate`: its options, and the tables and plots of runs, simulated or real.

Offers: simulate_command, simulate_options.
Imports: cli, config, engine.emulated, errors, metrics, policy, simulator, types, workload.
"""
