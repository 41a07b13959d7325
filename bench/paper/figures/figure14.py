"""Figure 14: auto-scaling over rates and over the burstiness of the arrivals (Section 6.5)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.common.tables import Row
from bench.paper.cells import (
    POLICY_NAMES,
    Cell,
    Options,
    at_paper_seed,
    geometric_mean,
    ratios,
    run_cells,
)
from bench.paper.claims import Claim, Kind, claim, up_to_and_typical
from bench.paper.drawing import grid
from bench.paper.experiment import Experiment
from bench.paper.points import paper_points
from bench.paper.tables import points_table
from sterna.simulator.config import SimulationConfig
from sterna.simulator.paper import PAPER_SCALING, PAPER_SCALING_BEGINS_S, paper_config
from sterna.workload.catalog import Workload

POISSON, GAMMA = "poisson_rate", "gamma_cv_at_rate_2"
POINT = ("arrivals", "rate_or_cv")
ARRIVALS_NAMES = {POISSON: "Poisson", GAMMA: "Gamma, 2 requests/s"}
"""Names of the two rows of the figure, for readers."""

STEPS_A_BLOCK = 16
"""Decode steps of a block: the paper's runs have freeness in blocks a request."""

METRICS = (
    "request_p99_s",
    "request_mean_s",
    "prefill_p99_s",
    "prefill_mean_s",
    "decode_p99_s",
    "decode_mean_s",
    "avg_instances",
)


def scaling_config(
    policy: str, low_blocks: float = 10.0, width_blocks: float = 50.0
) -> SimulationConfig:
    """The paper's runs: a decision every 10 s from 100 s on, 8 instances at the start, 1 to 16.

    The average is checked once a period, an instance serves as soon as it is added, and the newest
    one is terminated.
    """
    return paper_config(
        policy,
        "L-L",
        num_instances=8,
        scaling=replace(
            PAPER_SCALING,
            low_freeness_steps=low_blocks * STEPS_A_BLOCK,
            high_freeness_steps=(low_blocks + width_blocks) * STEPS_A_BLOCK,
        ),
        scaling_begins_s=PAPER_SCALING_BEGINS_S,
    )


def cells() -> list[Cell]:
    """Every point of the paper's figure."""
    ours = {theirs: name for name, theirs in POLICY_NAMES.items()}
    return [
        Cell(
            {name: point[name] for name in (*POINT, "policy")},
            _workload(point["arrivals"], point["rate_or_cv"]),
            scaling_config(ours[point["policy"]]),
        )
        for point in paper_points("figure14")
    ]


def _workload(arrivals: str, rate_or_cv: float) -> Workload:
    if arrivals == POISSON:
        return Workload(trace="L-L", rate=rate_or_cv)
    return Workload(trace="L-L", rate=2.0, arrivals=f"gamma:{rate_or_cv:g}")


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("figure14", cells(), options)


def gains(rows: Sequence[Row], arrivals: str, metric: str) -> list[float]:
    """INFaaS++ over Llumnix, one for each point of this row of the figure."""
    those = [row for row in rows if row["arrivals"] == arrivals]
    return ratios(those, metric, {"policy": "INFaaS++"}, {"policy": "Llumnix"}, POINT)


def most(arrivals: str, metric: str) -> Callable[[Sequence[Row]], float]:
    """The largest gain of this row of the figure."""
    return lambda rows: max(gains(rows, arrivals, metric))


def saving(arrivals: str) -> Callable[[Sequence[Row]], float]:
    """The largest share of instances saved in this row of the figure."""
    return lambda rows: 1 - 1 / max(gains(rows, arrivals, "avg_instances"))


def typical(arrivals: str, metric: str) -> Callable[[Sequence[Row]], float]:
    """The geometric mean of the gains in this row of the figure."""
    return lambda rows: geometric_mean(gains(rows, arrivals, metric))


def typical_saving(arrivals: str) -> Callable[[Sequence[Row]], float]:
    """The share of instances saved in this row of the figure, averaged."""
    return lambda rows: 1 - 1 / geometric_mean(gains(rows, arrivals, "avg_instances"))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 6.5's sentences on the figure, with largest and typical gains."""
    points = paper_points("figure14")
    found = []
    for name, arrivals, factor, saved in (
        ("rates", POISSON, 12.2, 0.16),
        ("burstiness", GAMMA, 11.0, 0.18),
    ):
        found += up_to_and_typical(
            f"{name}: prefill P99",
            "6.5",
            factor,
            rows,
            points,
            most(arrivals, "prefill_p99_s"),
            typical(arrivals, "prefill_p99_s"),
        )
        mean = typical_saving(arrivals)
        found += [
            claim(
                f"{name}: instances saved, up to",
                "6.5",
                Kind.REDUCTION,
                saved,
                rows,
                saving(arrivals),
            ),
            claim(
                f"{name}: instances saved, typical",
                "6.5",
                Kind.REDUCTION,
                mean(points),
                rows,
                mean,
                note="the paper's number is that of its points",
            ),
        ]
    return found


def tables(rows: Sequence[Row]) -> str:
    """All points."""
    labels = {"arrivals": "arrivals", "rate_or_cv": "rate (Poisson) or CV (Gamma)"}
    return "Ours / the paper's (ratio):\n\n" + points_table(
        _named(at_paper_seed(rows)),
        _named(paper_points("figure14")),
        {**labels, "policy": "policy"},
        METRICS,
    )


def _named(rows: Sequence[Row]) -> list[Row]:
    """The rows with their arrivals' name for readers."""
    return [{**row, "arrivals": ARRIVALS_NAMES[row["arrivals"]]} for row in rows]


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panels for the rates and one for the CVs, as in the paper."""
    grid(
        path,
        _named(at_paper_seed(rows)),
        _named(paper_points("figure14")),
        panel_row="arrivals",
        x="rate_or_cv",
        x_names={ARRIVALS_NAMES[POISSON]: "requests/s", ARRIVALS_NAMES[GAMMA]: "CV"},
        metrics=METRICS,
    )


FIGURE14 = Experiment(
    name="figure14",
    title="Figure 14: auto-scaling",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "trace": "L-L",
        "instances": "8 at the start, 1 to 16",
        "scaling": "every 10 s from 100 s on, [10, 60] blocks a request, the newest terminates",
        "requests": 10_000,
        "report": "stale",
        "kind": "simulated",
    },
)
