"""Figure 11: serving on 16 instances, seven traces at five rates (Section 6.3)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.common.tables import Row, folded, markdown_table, number
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
from bench.paper.points import LEAST_LOSS_S, distance, matching, paper_points
from bench.paper.tables import points_table, short_name
from sterna.policy.presets import preset
from sterna.simulator.paper import paper_config, shipped_config
from sterna.workload.catalog import Workload

REAL = ("ShareGPT", "BurstGPT")
GENERATED = ("S-S", "M-M", "L-L", "S-L", "L-S")
POINT = ("trace", "request_rate")

METRICS = (
    "request_p99_s",
    "request_mean_s",
    "prefill_p99_s",
    "prefill_mean_s",
    "decode_p99_s",
    "decode_mean_s",
    "preemption_loss_s",
)
"""The metrics in the order of the paper's columns."""


def cells(policy: str | None = None) -> list[Cell]:
    """Every point of the paper's figure.

    Args:
        policy: a preset that runs at each of the points in place of the paper's policies, by its
            own rules and with live load reports.

    Raises:
        ConfigurationError: there is no such preset.
    """
    if policy is not None:
        return [
            Cell(
                {**{name: point[name] for name in POINT}, "policy": policy},
                Workload(trace=point["trace"], rate=point["request_rate"]),
                shipped_config(preset(policy), point["trace"]),
            )
            for point in paper_points("figure11")
            if point["policy"] == "Llumnix"
        ]
    ours = {theirs: name for name, theirs in POLICY_NAMES.items()}
    return [
        Cell(
            {name: point[name] for name in (*POINT, "policy")},
            Workload(trace=point["trace"], rate=point["request_rate"]),
            paper_config(ours[point["policy"]], point["trace"]),
        )
        for point in paper_points("figure11")
    ]


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("figure11", cells(options.policy), options)


# ------------------------------------------------------------------------------------- claims


def gains(rows: Sequence[Row], traces: Sequence[str], metric: str, baseline: str) -> list[float]:
    """The baseline's metric over Llumnix's, one for each point of these traces."""
    those = [row for row in rows if row["trace"] in traces]
    return ratios(those, metric, {"policy": baseline}, {"policy": "Llumnix"}, POINT)


def most(traces: Sequence[str], metric: str, *baselines: str) -> Callable[[Sequence[Row]], float]:
    """The largest gain over any of the baselines at any point."""
    return lambda rows: max(
        (gain for each in baselines for gain in gains(rows, traces, metric, each)),
        default=math.nan,
    )


def typical(
    traces: Sequence[str], metric: str, *baselines: str
) -> Callable[[Sequence[Row]], float]:
    """The geometric mean of the gains over the points and baselines."""
    return lambda rows: geometric_mean(
        [gain for each in baselines for gain in gains(rows, traces, metric, each)]
    )


def loss_cut(traces: Sequence[str], baseline: str) -> Callable[[Sequence[Row]], float]:
    """The share by which the preemption loss shrinks, averaged over the points with a loss."""

    def compute(rows: Sequence[Row]) -> float:
        those = [row for row in rows if row["trace"] in traces]
        cuts = [
            1 - ours / theirs
            for theirs, ours in _pairs(those, "preemption_loss_s", baseline)
            if theirs > 0
        ]
        return float(np.mean(cuts)) if cuts else math.nan

    return compute


def _pairs(rows: Sequence[Row], metric: str, baseline: str) -> list[tuple[float, float]]:
    """The baseline's metric and Llumnix's, at each point."""
    found = {(row["policy"], *(row[each] for each in POINT)): row[metric] for row in rows}
    points = [key[1:] for key in found if key[0] == "Llumnix"]
    return [
        (found[baseline, *point], found["Llumnix", *point])
        for point in points
        if (baseline, *point) in found
    ]


def request_cut_s(rows: Sequence[Row]) -> float:
    """The preemption loss that Llumnix saves a request against INFaaS++, over the points."""
    below = {
        (row["trace"], row["request_rate"]): row["preemption_loss_s"]
        for row in rows
        if row["policy"] == "Llumnix"
    }
    cuts = [
        row["preemption_loss_s"] - below[row["trace"], row["request_rate"]]
        for row in rows
        if row["policy"] == "INFaaS++" and row["trace"] in GENERATED
    ]
    return float(np.mean(cuts))


def migrating_fraction(rows: Sequence[Row]) -> float:
    """The share of an instance's time with a migration in flight, averaged over the points."""
    return float(np.mean([row["migrating_fraction"] for row in rows if row["policy"] == "Llumnix"]))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 6.3's sentences; each largest gain is followed by the typical one, from the figure's
    points."""
    infaas, rr = ("INFaaS++",), ("Round-Robin",)
    found = []
    for text, factor, traces, metric, baselines in (
        ("real traces: request mean", 2.0, REAL, "request_mean_s", rr + infaas),
        ("real traces: request P99", 2.9, REAL, "request_p99_s", rr + infaas),
        ("real traces: prefill mean over round robin", 26.6, REAL, "prefill_mean_s", rr),
        ("real traces: prefill P99 over round robin", 34.4, REAL, "prefill_p99_s", rr),
        ("real traces: decode P99 over round robin", 2.0, REAL, "decode_p99_s", rr),
        ("real traces: prefill mean over INFaaS++", 2.2, REAL, "prefill_mean_s", infaas),
        ("real traces: prefill P99 over INFaaS++", 5.5, REAL, "prefill_p99_s", infaas),
        ("real traces: decode P99 over INFaaS++", 1.3, REAL, "decode_p99_s", infaas),
        ("generated traces: request mean", 1.5, GENERATED, "request_mean_s", infaas),
        ("generated traces: request P99", 1.6, GENERATED, "request_p99_s", infaas),
        ("generated traces: prefill mean", 7.7, GENERATED, "prefill_mean_s", infaas),
        ("generated traces: prefill P99", 14.8, GENERATED, "prefill_p99_s", infaas),
        ("generated traces: decode P99", 2.0, GENERATED, "decode_p99_s", infaas),
    ):
        found += up_to_and_typical(
            text,
            "6.3",
            factor,
            rows,
            paper_points("figure11"),
            most(traces, metric, *baselines),
            typical(traces, metric, *baselines),
        )
    found += [
        claim(
            f"{name} traces: preemption loss below {baseline}'s, on average",
            "6.3",
            Kind.REDUCTION,
            share,
            rows,
            loss_cut(traces, baseline),
        )
        for name, share, traces, (baseline,) in (
            ("real", 0.84, REAL, rr),
            ("generated", 0.704, GENERATED, infaas),
        )
    ]
    return [
        *found,
        claim(
            "generated traces: shorter preemption loss of a request, on average",
            "6.3",
            Kind.VALUE,
            1.3,
            rows,
            request_cut_s,
            unit="s",
        ),
        claim(
            "share of an instance's time with a migration in flight",
            "6.2",
            Kind.VALUE,
            0.1,
            rows,
            migrating_fraction,
            unit="%",
        ),
    ]


# -------------------------------------------------------------------------------------- tables


def paper_point(row: Row) -> Row:
    """The paper's point for the row."""
    (point,) = matching(
        paper_points("figure11"), policy=row["policy"], **{name: row[name] for name in POINT}
    )
    return point


def distances_table(rows: Sequence[Row]) -> str:
    """The distances of our points from the paper's, by kind of trace and policy."""
    lines = []
    for name, traces in (("generated", GENERATED), ("real", REAL)):
        for policy in ("Llumnix", "INFaaS++", "Round-Robin"):
            those = [row for row in rows if row["policy"] == policy and row["trace"] in traces]
            if not those:
                continue
            found = [
                distance(metric, [(row[metric], paper_point(row)[metric]) for row in those])
                for metric in METRICS
            ]
            lines.append([name, policy, *(str(each or "") for each in found)])
    return markdown_table(["points", "policy", *map(short_name, METRICS)], lines, 2)


def gains_table(rows: Sequence[Row]) -> str:
    """INFaaS++ over Llumnix at each point: the paper's, ours, and ours over seeds."""
    paper = paper_points("figure11")
    metrics = ("prefill_mean_s", "prefill_p99_s", "decode_p99_s")
    lines = []
    for trace in (*REAL, *GENERATED):
        for rate in sorted({point["request_rate"] for point in paper if point["trace"] == trace}):
            cells = [_gain_cell(rows, paper, trace, rate, metric) for metric in metrics]
            lines.append([trace, f"{rate:g}", *cells])
    header = ["trace", "rate", "prefill mean", "prefill P99", "decode P99"]
    return markdown_table(header, lines, 2)


def _gain_cell(
    rows: Sequence[Row], paper: Sequence[Row], trace: str, rate: float, metric: str
) -> str:
    def at(those: Sequence[Row]) -> list[float]:
        here = [row for row in those if row["trace"] == trace and row["request_rate"] == rate]
        return gains(here, (trace,), metric, "INFaaS++")

    ours = at(at_paper_seed(rows))
    text = f"{at(paper)[0]:.2f} → {ours[0]:.2f}" if ours else ""
    seeds = sorted({row["seed"] for row in rows} - {row["seed"] for row in at_paper_seed(rows)})
    others = [gain for seed in seeds for gain in at([r for r in rows if r["seed"] == seed])]
    if others:
        low, high = min(others), max(others)
        text += f"; {geometric_mean(others):.2f} [{number(low)}, {number(high)}]"
    return text


def tables(rows: Sequence[Row]) -> str:
    """The distances, the gains and, folded, all points."""
    ours = at_paper_seed(rows)
    labels = {"trace": "trace", "request_rate": "rate", "policy": "policy"}
    return "\n\n".join(
        [
            "Median distance from the paper's points, |log ratio|, and in brackets the median log "
            f"ratio; of preemption losses only those of at least {LEAST_LOSS_S:g} s in the paper:",
            distances_table(ours),
            "Gain of Llumnix over INFaaS++ at each point: the paper's → ours at its seed; the "
            "geometric mean over the other seeds and their range:",
            gains_table(rows),
            folded(
                "All points: ours / the paper's (ratio)",
                points_table(ours, paper_points("figure11"), labels, METRICS),
            ),
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Seven rows of panels, as in the paper."""
    grid(
        path,
        at_paper_seed(rows),
        paper_points("figure11"),
        panel_row="trace",
        x="request_rate",
        x_names="requests/s",
        metrics=METRICS,
        log_metrics=("prefill_p99_s", "prefill_mean_s"),
    )


FIGURE11 = Experiment(
    name="figure11",
    title="Figure 11: serving on 16 instances",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={"instances": 16, "requests": 10_000, "report": "stale", "kind": "simulated"},
)
