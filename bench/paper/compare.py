"""Comparison with another revision's code on the same grid, at every point."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common.results_io import ROOT
from bench.common.tables import Row
from bench.paper.cells import Options, geometric_mean
from bench.paper.experiment import Experiment
from sterna.errors import ConfigurationError

METRICS = (
    "request_mean_s",
    "request_p99_s",
    "prefill_mean_s",
    "prefill_p99_s",
    "decode_p99_s",
    "preemption_loss_s",
    "avg_instances",
)

COMPARED = ("figure3", "figure11", "figure13", "figure14", "figure15", "loads", "sensitivity")
"""The experiments whose rows have some of these metrics, all of them simulated."""


def show(console: Console, experiments: Sequence[Experiment], options: Options, base: str) -> None:
    """Run the experiments with this checkout's code and with the base's, and print base over
    ours at each point: above 1 this checkout is better.

    Raises:
        ConfigurationError: there is no such revision, it does not run the grid, or an experiment
            has nothing to compare.
    """
    for each in experiments:
        if each.name not in COMPARED:
            raise ConfigurationError(
                f"{each.name} has nothing to compare; --compare is for {', '.join(COMPARED)}"
            )
    with worktree(base) as root:
        theirs = rows_of(root, experiments, options, base)
    for each in experiments:
        ours = each.rows(options)
        console.print(table_of(each, ours, theirs[each.name], base))


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of the revision in a folder of its own, removed at the end.

    Raises:
        ConfigurationError: git knows no such revision.
    """
    with tempfile.TemporaryDirectory(prefix="sterna-compare-") as folder:
        root = Path(folder) / "base"
        added = _git("worktree", "add", "--detach", str(root), revision)
        if added.returncode != 0:
            raise ConfigurationError(
                f"--compare: git has no revision {revision!r}; try HEAD~1 or a commit's id"
            )
        try:
            yield root
        finally:
            _git("worktree", "remove", "--force", str(root))


def rows_of(
    root: Path, experiments: Sequence[Experiment], options: Options, revision: str
) -> dict[str, list[Row]]:
    """The rows of the experiments with the sources of `root` and the grid of this checkout.

    Raises:
        ConfigurationError: these sources cannot run the grid.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench.paper", *(each.name for each in experiments)]
        command += ["--seeds", str(options.num_seeds), "--rows-only", str(path)]
        if options.is_quick:
            command.append("--quick")
        if options.num_processes is not None:
            command += ["--processes", str(options.num_processes)]
        if options.policy is not None:
            command += ["--policy", options.policy]
        # The base's package comes first on the path; the grid is that of this checkout.
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode != 0:
            raise ConfigurationError(
                f"--compare: the sources of {revision} do not run this grid (see above); choose a "
                "later revision"
            )
        found: dict[str, list[Row]] = json.loads(path.read_text())
        return found


def table_of(
    experiment: Experiment, ours: Sequence[Row], theirs: Sequence[Row], base: str
) -> Table:
    """A line for each point (geometric means over the seeds), and the geometric mean of all."""
    metrics = [each for each in METRICS if all(row.get(each) is not None for row in ours)]
    table = Table("point", *metrics, title=f"{experiment.title}: {base} over this checkout")
    points: dict[str, dict[str, list[float]]] = {}
    for our, their in zip(ours, theirs, strict=True):
        ratios = points.setdefault(_name(our), {each: [] for each in metrics})
        for metric in metrics:
            if our[metric] > 0 and their[metric] > 0:
                ratios[metric].append(their[metric] / our[metric])
    for name, ratios in points.items():
        table.add_row(name, *(_mean(ratios[each]) for each in metrics))
    table.add_section()
    together = [[each for ratios in points.values() for each in ratios[name]] for name in metrics]
    table.add_row("geometric mean", *(_mean(each) for each in together))
    return table


def _name(row: Row) -> str:
    """The columns of a point: all before the seed, and every text, such as a priority."""
    names = list(row)
    num_labels = names.index("seed")
    words = [
        f"{value}"
        for place, value in enumerate(row.values())
        if place < num_labels or isinstance(value, str)
    ]
    return " ".join(words)


def _mean(values: Sequence[float]) -> str:
    return f"{geometric_mean(values):.3f}" if values else ""


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
