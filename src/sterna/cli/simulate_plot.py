"""The plot of `sterna simulate`."""

from collections.abc import Sequence
from pathlib import Path

from sterna.cli.run_plot import Drawn, draw_runs
from sterna.cli.workload_options import arrivals_of
from sterna.simulator.runs import Run


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the runs into the file, whose suffix says how: see `draw_runs`.

    Runs of one policy with several seeds share their lines; what has a time is the first seed's.

    Raises:
        OSError: the file cannot be written.
    """
    drawn = [Drawn(run.job.policy, run.records, run.cluster) for run in runs]
    draw_runs(drawn, _title(runs), path)


def _title(runs: Sequence[Run]) -> str:
    """What all runs have in common; variants may differ in more than their names."""
    workload = runs[0].job.workload
    rate = "" if workload.rate is None else f" at {workload.rate:g}/s"
    seeds = list(dict.fromkeys(run.job.workload.seed for run in runs))
    note = f"{len(seeds)} seeds; below, seed {seeds[0]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    sizes = {run.job.config.num_instances for run in runs}
    instances = f", {sizes.pop()} instances" if len(sizes) == 1 else ""
    return (
        f"{workload.trace}{rate}, {arrivals_of(workload)}, {len(runs[0].records):,} requests"
        f"{instances} (simulated; {note})"
    )
