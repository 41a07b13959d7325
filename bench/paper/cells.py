"""Simulated runs: cells of a figure's grid, and the rows that come of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.common.command import simulation_progress
from bench.common.tables import LOSS_FLOOR_S, Row, rounded, statistic
from sterna.metrics.summary import Summary
from sterna.simulator.config import SimulationConfig
from sterna.simulator.runs import Job, SimulationRun, map_runs
from sterna.workload.catalog import Workload
from sterna.workload.seeds import PAPER_SEED

NUM_REQUESTS = 10_000
"""The cluster of every run on 16 instances (Section 6.1)."""

POLICY_NAMES = {
    "infaas++": "INFaaS++",
    "llumnix": "Llumnix",
    "llumnix-base": "Llumnix-base",
    "round-robin": "Round-Robin",
}
"""Our names of the policies, with those in the paper's figures."""


@dataclass(frozen=True, slots=True)
class Options:
    """The extent of the runs.

    Attributes:
        num_seeds: number of seeds besides the paper's.
        is_quick: whether a run has few requests, as a check; its numbers have no meaning.
        num_processes: concurrent processes; None: one a core.
        policy: a preset in place of the paper's policies, to compare it with the sources of
            another revision; None: the paper's. Figure 11 only.
    """

    num_seeds: int = 0
    is_quick: bool = False
    num_processes: int | None = None
    policy: str | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        """The paper's seed, then 1, 2, ..."""
        return (PAPER_SEED, *range(1, self.num_seeds + 1))

    def num_requests(self, wanted: int) -> int:
        """The number of requests of a run, from the number that it wants."""
        return min(wanted, 200) if self.is_quick else wanted


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a grid, except for its seed.

    Attributes:
        labels: its labels in the rows.
    """

    labels: Mapping[str, str | float]
    workload: Workload
    config: SimulationConfig


def run_cells(
    name: str,
    cells: Sequence[Cell],
    options: Options,
    reduce: Callable[[SimulationRun], list[Row]] | None = None,
) -> list[Row]:
    """The rows of all cells with all seeds, the paper's seed first.

    Args:
        name: the text of the progress bar.
        reduce: the rows of one run, `serving_row` by default; a function of a module.
    """
    planned = [(seed, cell) for seed in options.seeds for cell in cells]
    jobs = [
        Job(
            replace(
                cell.workload,
                seed=seed,
                num_requests=options.num_requests(cell.workload.num_requests or NUM_REQUESTS),
            ),
            cell.config,
        )
        for seed, cell in planned
    ]
    with simulation_progress() as progress:
        task = progress.add_task(name, total=len(jobs))
        results = map_runs(
            jobs,
            serving_row if reduce is None else reduce,
            num_processes=options.num_processes,
            on_done=lambda _: progress.advance(task),
        )
    return [
        {**cell.labels, "seed": seed, **row}
        for (seed, cell), rows in zip(planned, results, strict=True)
        for row in rows
    ]


def serving_row(run: SimulationRun) -> list[Row]:
    """One row with the columns of the paper's figures, and some of our own."""
    summary = run.summary()
    return [{"n": summary.num_requests, **latency_columns(summary), **_cluster_columns(summary)}]


def latency_columns(summary: Summary) -> Row:
    """The latencies under the names that the files of the paper's points use."""
    return {
        "request_p99_s": statistic(summary.request_s, "p99"),
        "request_mean_s": statistic(summary.request_s, "mean"),
        "prefill_p99_s": statistic(summary.ttft_s, "p99"),
        "prefill_mean_s": statistic(summary.ttft_s, "mean"),
        "decode_p99_s": statistic(summary.tpot_s, "p99"),
        "decode_mean_s": statistic(summary.tpot_s, "mean"),
        "decode_execution_s": statistic(summary.tpot_execution_s, "mean"),
        "preemption_loss_s": statistic(summary.preemption_loss_s, "mean"),
    }


def _cluster_columns(summary: Summary) -> Row:
    return {
        "preempted_fraction": rounded(summary.preempted_fraction),
        "migrations": summary.migrations_committed,
        "migrations_aborted": summary.migrations_aborted,
        "migrating_fraction": rounded(summary.migrating_fraction),
        "fragmentation_mean": rounded(summary.fragmentation_mean),
        "avg_instances": rounded(summary.instances_avg),
        "wall_s": round(summary.wall_s, 2),
    }


def at_paper_seed(rows: Sequence[Row]) -> list[Row]:
    """The rows of the paper's seed."""
    return [row for row in rows if row["seed"] == PAPER_SEED]


def ratios(
    rows: Sequence[Row],
    metric: str,
    over: Mapping[str, str],
    under: Mapping[str, str],
    point: Sequence[str],
) -> list[float]:
    """One ratio for each point of the grid: the metric of the rows labelled `over` to that of the
    rows labelled `under`. Preemption losses count with at least `LOSS_FLOOR_S`.

    Args:
        point: the columns that identify a point.
    """
    floor = LOSS_FLOOR_S if metric == "preemption_loss_s" else 0.0
    below = {_key(row, point): max(floor, row[metric]) for row in rows if _has(row, under)}
    return [
        max(floor, row[metric]) / below[_key(row, point)]
        for row in rows
        if _has(row, over) and below.get(_key(row, point))
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios; NaN of none."""
    if not values:
        return math.nan
    return float(np.exp(np.mean(np.log(values))))


def _key(row: Row, point: Sequence[str]) -> tuple[object, ...]:
    return tuple(row[column] for column in point)


def _has(row: Row, labels: Mapping[str, str]) -> bool:
    return all(row[column] == value for column, value in labels.items())
