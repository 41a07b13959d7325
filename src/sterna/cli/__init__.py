"""The `sterna` command: one module for each subcommand, or a folder where one has many options.

`main` has the parser and the exit codes. What a command does is elsewhere; here are its arguments,
and what it prints.

Offers: nothing.
Imports: cli.doctor, cli.operate, cli.serve, cli.simulate, demo_model, engine.emulated,
    engine.profiling, engine.vllm, errors, runtime.home.
"""
