"""Figure 15: cost against latency over scaling thresholds (Section 6.5)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.common.tables import Row, markdown_table, number
from bench.paper.cells import POLICY_NAMES, Cell, Options, at_paper_seed, run_cells
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import COLORS, figure
from bench.paper.experiment import Experiment
from bench.paper.figures.figure14 import scaling_config
from bench.paper.points import matching, paper_points
from sterna.workload.catalog import Workload

THRESHOLDS = (5.0, 25.0, 45.0, 65.0, 85.0)
"""t, in blocks a request; the range is [t, t + 50]."""
POLICIES = ("infaas++", "llumnix")
TARGET_S = 5.0
"""The paper's "roughly 5s"."""


def cells() -> list[Cell]:
    """L-L at 2 requests/s, CV 2."""
    return [
        Cell(
            {"policy": POLICY_NAMES[policy], "threshold_blocks": threshold},
            Workload(trace="L-L", rate=2.0, arrivals="gamma:2"),
            scaling_config(policy, low_blocks=threshold),
        )
        for policy in POLICIES
        for threshold in THRESHOLDS
    ]


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("figure15", cells(), options)


def points() -> list[Row]:
    """The paper's points with their thresholds, in whose order they are."""
    found = []
    for policy in dict.fromkeys(row["policy"] for row in paper_points("figure15")):
        those = matching(paper_points("figure15"), policy=policy)
        found += [
            {**row, "threshold_blocks": threshold}
            for row, threshold in zip(those, THRESHOLDS, strict=True)
        ]
    return found


def cost_at(rows: Sequence[Row], policy: str, target_s: float) -> float:
    """Instances at which the policy's curve first comes down to a P99 prefill latency.

    Between two points the logarithm of the latency is linear in the instances. NaN where the curve
    does not cross the latency: then there is no number at *equal* latency.
    """
    curve = sorted(
        (row["avg_instances"], row["prefill_p99_s"]) for row in matching(list(rows), policy=policy)
    )
    for (fewer, slower_s), (more, faster_s) in pairwise(curve):
        if faster_s <= target_s < slower_s:
            share = math.log(slower_s / target_s) / math.log(slower_s / faster_s)
            return float(fewer + share * (more - fewer))
    return math.nan


def saving_at(rows: Sequence[Row], target_s: float) -> float:
    """The share of instances that Llumnix saves at this latency."""
    return 1 - cost_at(rows, "Llumnix", target_s) / cost_at(rows, "INFaaS++", target_s)


def shared_latencies(rows: Sequence[Row]) -> list[float]:
    """Five latencies that both curves cross, from the most expensive to the cheapest."""
    low = max(
        min(row["prefill_p99_s"] for row in matching(list(rows), policy=POLICY_NAMES[each]))
        for each in POLICIES
    )
    high = min(
        max(row["prefill_p99_s"] for row in matching(list(rows), policy=POLICY_NAMES[each]))
        for each in POLICIES
    )
    if low >= high:
        return []
    return [low * (high / low) ** ((step + 0.5) / 5) for step in range(5)]


def mean_saving(rows: Sequence[Row]) -> float:
    """The saving averaged over the latencies that both curves cross."""
    found = [saving_at(rows, each) for each in shared_latencies(rows)]
    found = [each for each in found if not math.isnan(each)]
    return sum(found) / len(found) if found else math.nan


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The text's number, and that of its figure's points at equal latency."""
    paper = points()
    own = "the paper's number is what its own points give at equal latency"

    def at_target(those: Sequence[Row]) -> float:
        return saving_at(those, TARGET_S)

    return [
        claim(
            f"instances saved at a P99 prefill latency of {TARGET_S:g} s",
            "6.5",
            Kind.REDUCTION,
            0.36,
            rows,
            at_target,
            note="the text's number; its figure compares points of different latency",
        ),
        claim(
            f"instances saved at a P99 prefill latency of {TARGET_S:g} s",
            "6.5",
            Kind.REDUCTION,
            at_target(paper),
            rows,
            at_target,
            note=own,
        ),
        claim(
            "instances saved, mean over the latencies that both reach",
            "6.5",
            Kind.REDUCTION,
            mean_saving(paper),
            rows,
            mean_saving,
            note=own,
        ),
    ]


def tables(rows: Sequence[Row]) -> str:
    """All points at the paper's seed."""
    paper = points()
    lines = []
    for row in at_paper_seed(rows):
        labels = {"policy": row["policy"], "threshold_blocks": row["threshold_blocks"]}
        (point,) = matching(paper, **labels)
        lines.append(
            [
                row["policy"],
                f"[{row['threshold_blocks']:g}, {row['threshold_blocks'] + 50:g}]",
                *(
                    f"{number(row[each])} / {number(point[each])} ({row[each] / point[each]:.2f})"
                    for each in ("avg_instances", "prefill_p99_s")
                ),
            ]
        )
    header = ["policy", "thresholds [blocks a request]", "instances", "prefill P99 [s]"]
    return "Ours / the paper's (ratio):\n\n" + markdown_table(header, lines, 2)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Latency over cost, as in the paper."""
    with figure(path, 1, 1, (5.5, 3.6)) as axes:
        axis = axes[0][0]
        for whose, those in (("ours", at_paper_seed(rows)), ("paper", points())):
            for policy in (POLICY_NAMES[each] for each in POLICIES):
                curve = matching(list(those), policy=policy)
                axis.plot(
                    [row["avg_instances"] for row in curve],
                    [row["prefill_p99_s"] for row in curve],
                    color=COLORS[policy],
                    marker="o" if whose == "ours" else "s",
                    markerfacecolor=COLORS[policy] if whose == "ours" else "none",
                    linestyle="-" if whose == "ours" else ":",
                    label=f"{policy}, {whose}",
                )
        axis.axhline(TARGET_S, color="tab:red", linestyle="--", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_xlabel("average instances")
        axis.set_ylabel("prefill P99 [s]")
        axis.legend(fontsize=7)


FIGURE15 = Experiment(
    name="figure15",
    title="Figure 15: cost against latency",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "trace": "L-L",
        "rate": 2.0,
        "arrivals": "gamma:2",
        "instances": "8 at the start, 1 to 16",
        "requests": 10_000,
        "kind": "simulated",
    },
)
