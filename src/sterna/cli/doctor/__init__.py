"""`sterna doctor`: obstacles to `sterna serve` on this machine, and how to remove them.

`machine` reads the facts, `findings` judges them, `doctor_report` prints and repairs.

Offers: doctor_command.
Imports: cli.serve, demo_model, engine, engine.profiling, engine.vllm, errors, folders,
    runtime.processes.
"""
