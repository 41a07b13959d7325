"""What is said of a seed that fails."""

from bench.simulation.sim_soak import replay_command
from fault_simulation.run import Result


def said(result: Result, *options: str) -> str:
    """What whoever sees the failure needs to know; the options are those that replay it."""
    trace = "\n".join(result.trace[-40:])
    command = replay_command(result.seed, *options)
    return f"seed {result.seed}: {result.violation}\n{result.where}{trace}\n{command}"
