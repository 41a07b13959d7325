"""Figure 13: priorities (Section 6.4)."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.common.tables import Row
from bench.paper.cells import (
    POLICY_NAMES,
    Cell,
    Options,
    at_paper_seed,
    latency_columns,
    ratios,
    run_cells,
)
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import grid
from bench.paper.experiment import Experiment
from bench.paper.points import paper_points
from bench.paper.tables import points_table
from sterna.simulator.paper import paper_config
from sterna.simulator.runs import SimulationRun
from sterna.types import HIGH, NORMAL
from sterna.workload.catalog import Workload

RATE = 26.0
CVS = (2.0, 4.0, 6.0, 8.0)
HIGH_FRACTION = 0.1
POINT = ("priority", "gamma_cv")

METRICS = (
    "request_p99_s",
    "request_mean_s",
    "prefill_p99_s",
    "prefill_mean_s",
    "decode_p99_s",
    "decode_mean_s",
    "decode_execution_request_s",
)


def cells() -> list[Cell]:
    """S-S, bursty arrivals, a tenth of the requests of high priority."""
    return [
        Cell(
            {"gamma_cv": cv, "policy": POLICY_NAMES[policy]},
            Workload(
                trace="S-S",
                rate=RATE,
                arrivals=f"gamma:{cv:g}",
                class_fractions={HIGH: HIGH_FRACTION},
            ),
            paper_config(policy, "S-S"),
        )
        for cv in CVS
        for policy in ("llumnix", "llumnix-base")
    ]


def rows_of_both(run: SimulationRun) -> list[Row]:
    """One row for each priority; the paper's decode computation is of a whole request."""
    rows = []
    for name, priority in (("high", HIGH), ("normal", NORMAL)):
        summary = run.summary(priority)
        execution_s = run.records.decode_execution_s[run.records.priority == int(priority)]
        rows.append(
            {
                "priority": name,
                "n": summary.num_requests,
                **latency_columns(summary),
                "decode_execution_request_s": float(f"{np.mean(execution_s):.5g}"),
            }
        )
    return rows


def rows(options: Options) -> list[Row]:
    """The runs, two rows each."""
    return run_cells("figure13", cells(), options, rows_of_both)


def gains(rows: Sequence[Row], priority: str, metric: str) -> list[float]:
    """Llumnix-base over Llumnix, one for each CV."""
    those = [row for row in rows if row["priority"] == priority]
    return ratios(those, metric, {"policy": "Llumnix-base"}, {"policy": "Llumnix"}, POINT)


def least(metric: str) -> Callable[[Sequence[Row]], float]:
    """The smallest gain of the high priority over the CVs."""
    return lambda rows: min(gains(rows, "high", metric))


def most(metric: str) -> Callable[[Sequence[Row]], float]:
    """The largest gain of the high priority over the CVs."""
    return lambda rows: max(gains(rows, "high", metric))


def harm(metric: str) -> Callable[[Sequence[Row]], float]:
    """The largest growth of the normal priority's metric."""
    return lambda rows: max(1 / gain for gain in gains(rows, "normal", metric)) - 1


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Both ends of Section 6.4's ranges."""
    found = []
    for name, metric, low, high in (
        ("request mean", "request_mean_s", 1.2, 1.5),
        ("prefill mean", "prefill_mean_s", 2.9, 8.6),
        ("prefill P99", "prefill_p99_s", 3.6, 10.0),
        ("decode mean", "decode_mean_s", 1.2, 1.5),
        ("decode P99", "decode_p99_s", 1.3, 2.2),
    ):
        text = f"high priority: {name}"
        found += [
            claim(f"{text}, at least", "6.4", Kind.FACTOR, low, rows, least(metric)),
            claim(f"{text}, up to", "6.4", Kind.FACTOR, high, rows, most(metric)),
        ]
    for name, metric, bound in (
        ("request mean", "request_mean_s", 0.045),
        ("prefill mean", "prefill_mean_s", 0.13),
        ("decode mean", "decode_mean_s", 0.02),
    ):
        text = f"normal priority: {name} longer by at most"
        found.append(claim(text, "6.4", Kind.AT_MOST, bound, rows, harm(metric), unit="%"))
    return found


def tables(rows: Sequence[Row]) -> str:
    """All points."""
    labels = {"priority": "priority", "gamma_cv": "CV", "policy": "policy"}
    ours = sorted(at_paper_seed(rows), key=lambda row: (row["priority"], row["gamma_cv"]))
    return "Ours / the paper's (ratio):\n\n" + points_table(
        ours, paper_points("figure13"), labels, METRICS
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panels for each priority, as in the paper."""
    grid(
        path,
        at_paper_seed(rows),
        paper_points("figure13"),
        panel_row="priority",
        x="gamma_cv",
        x_names="CV",
        metrics=METRICS,
    )


FIGURE13 = Experiment(
    name="figure13",
    title="Figure 13: priorities",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "trace": "S-S",
        "rate": RATE,
        "high_fraction": HIGH_FRACTION,
        "instances": 16,
        "requests": 10_000,
        "report": "stale",
        "kind": "simulated",
    },
)
