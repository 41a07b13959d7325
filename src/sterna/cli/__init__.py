"""The `sterna` command: a module for each subcommand, or a folder for large ones and for those of
operators; `checkout` has the two that need a clone.

`main` has the parser and the exit codes. What a command does is elsewhere; here are its arguments,
and what it prints.

Offers: nothing.
Imports: cli.doctor, cli.operate, cli.serve, cli.simulate, demo_model, engine.emulated,
    engine.profiling, engine.vllm, errors, runtime.home, runtime.processes.
"""
