"""`sterna doctor`: what of a machine keeps `sterna serve` from working well, and how to mend it.

`machine` reads the facts, `findings` judges them, `doctor_report` prints and mends.

Offers: doctor_command.
Imports: cli.serve, demo_model, engine.profiling, engine.vllm, errors, folders, runtime.processes.
"""
