"""Figure 11: serving on 16 instances, seven traces at five rates (Section 6.3)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.paper.cells import (
    POLICY_NAMES,
    Cell,
    Options,
    at_paper_seed,
    geometric_mean,
    ratios,
    run_cells,
)
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import grid
from bench.paper.experiment import Experiment
from bench.paper.points import Row, paper_points
from bench.paper.tables import folded, markdown_table, number, points_table
from sterna.simulator.paper import paper_config
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
"""In the order of the paper's columns."""

COMPARED = (
    "request_mean_s",
    "request_p99_s",
    "prefill_mean_s",
    "prefill_p99_s",
    "decode_mean_s",
    "decode_p99_s",
)
"""What the table of the distances from the paper's points lists."""


def cells() -> list[Cell]:
    """Every point of the paper's figure."""
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
    planned = cells()
    return run_cells("figure11", planned[::9] if options.is_quick else planned, options)


# ------------------------------------------------------------------------------------- claims


def gains(rows: Sequence[Row], traces: Sequence[str], metric: str, baseline: str) -> list[float]:
    """The baseline's metric over Llumnix's, one a point of these traces."""
    those = [row for row in rows if row["trace"] in traces]
    return ratios(those, metric, {"policy": baseline}, {"policy": "Llumnix"}, POINT)


def most(traces: Sequence[str], metric: str, *baselines: str) -> Callable[[Sequence[Row]], float]:
    """The largest gain over any of the baselines at any point."""
    return lambda rows: max(
        (gain for each in baselines for gain in gains(rows, traces, metric, each)),
        default=math.nan,
    )


def typical(traces: Sequence[str], metric: str, baseline: str) -> Callable[[Sequence[Row]], float]:
    """The geometric mean of the gains over the points."""
    return lambda rows: geometric_mean(gains(rows, traces, metric, baseline))


def loss_cut(traces: Sequence[str], baseline: str) -> Callable[[Sequence[Row]], float]:
    """By which share the preemption loss shrinks, averaged over the points."""

    def compute(rows: Sequence[Row]) -> float:
        found = gains(rows, traces, "preemption_loss_s", baseline)
        return float(np.mean([1 - 1 / each for each in found])) if found else math.nan

    return compute


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
    """Of an instance's time, that with a migration in flight, averaged over the points."""
    return float(np.mean([row["migrating_fraction"] for row in rows if row["policy"] == "Llumnix"]))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 6.3's sentences; beside the largest gain stands the typical one, which the text
    does not have and the figure's points give."""
    paper = paper_points("figure11")
    rr, infaas = "Round-Robin", "INFaaS++"

    def up_to(text: str, number: float, *which: object) -> Claim:
        return claim(text, "6.3", Kind.FACTOR, number, rows, most(*which))  # type: ignore[arg-type]

    def mean_gain(text: str, *which: object) -> Claim:
        compute = typical(*which)  # type: ignore[arg-type]
        note = "the paper's number is that of its points"
        return claim(text, "6.3", Kind.FACTOR, compute(paper), rows, compute, note=note)

    return [
        up_to("real traces: request mean, up to", 2.0, REAL, "request_mean_s", rr, infaas),
        up_to("real traces: request P99, up to", 2.9, REAL, "request_p99_s", rr, infaas),
        up_to(
            "real traces: prefill mean over round robin, up to", 26.6, REAL, "prefill_mean_s", rr
        ),
        up_to("real traces: prefill P99 over round robin, up to", 34.4, REAL, "prefill_p99_s", rr),
        up_to("real traces: decode P99 over round robin, up to", 2.0, REAL, "decode_p99_s", rr),
        claim(
            "real traces: preemption loss below round robin's, on average",
            "6.3",
            Kind.REDUCTION,
            0.84,
            rows,
            loss_cut(REAL, rr),
        ),
        up_to(
            "real traces: prefill mean over INFaaS++, up to", 2.2, REAL, "prefill_mean_s", infaas
        ),
        up_to("real traces: prefill P99 over INFaaS++, up to", 5.5, REAL, "prefill_p99_s", infaas),
        up_to("real traces: decode P99 over INFaaS++, up to", 1.3, REAL, "decode_p99_s", infaas),
        mean_gain(
            "real traces: prefill mean over INFaaS++, typical", REAL, "prefill_mean_s", infaas
        ),
        mean_gain("real traces: prefill P99 over INFaaS++, typical", REAL, "prefill_p99_s", infaas),
        up_to("generated traces: request mean, up to", 1.5, GENERATED, "request_mean_s", infaas),
        up_to("generated traces: request P99, up to", 1.6, GENERATED, "request_p99_s", infaas),
        up_to("generated traces: prefill mean, up to", 7.7, GENERATED, "prefill_mean_s", infaas),
        up_to("generated traces: prefill P99, up to", 14.8, GENERATED, "prefill_p99_s", infaas),
        mean_gain("generated traces: prefill mean, typical", GENERATED, "prefill_mean_s", infaas),
        mean_gain("generated traces: prefill P99, typical", GENERATED, "prefill_p99_s", infaas),
        up_to("generated traces: decode P99, up to", 2.0, GENERATED, "decode_p99_s", infaas),
        mean_gain("generated traces: decode P99, typical", GENERATED, "decode_p99_s", infaas),
        claim(
            "generated traces: preemption loss below INFaaS++'s, on average",
            "6.3",
            Kind.REDUCTION,
            0.704,
            rows,
            loss_cut(GENERATED, infaas),
        ),
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


def distances(
    rows: Sequence[Row], traces: Sequence[str], policy: str
) -> dict[str, tuple[float, float]]:
    """Of each compared metric: the median |log ratio| to the paper's points, and the median log
    ratio (the bias)."""
    theirs = {
        (point["trace"], point["request_rate"]): point
        for point in paper_points("figure11")
        if point["policy"] == policy
    }
    those = [row for row in rows if row["policy"] == policy and row["trace"] in traces]
    found = {}
    for metric in COMPARED:
        logs = [
            math.log(row[metric] / theirs[row["trace"], row["request_rate"]][metric])
            for row in those
        ]
        found[metric] = (float(np.median(np.abs(logs))), float(np.median(logs)))
    return found


def distances_table(rows: Sequence[Row]) -> str:
    """How far our points are from the paper's, by trace group and policy."""
    header = ["points", "policy", *(name.removesuffix("_s").replace("_", " ") for name in COMPARED)]
    lines = []
    for name, traces in (("generated", GENERATED), ("real", REAL)):
        for policy in ("Llumnix", "INFaaS++", "Round-Robin"):
            if not any(r["policy"] == policy and r["trace"] in traces for r in rows):
                continue
            found = distances(rows, traces, policy)
            lines.append(
                [
                    name,
                    policy,
                    *(f"{found[each][0]:.3f} ({found[each][1]:+.3f})" for each in COMPARED),
                ]
            )
    return markdown_table(header, lines, 2)


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
            "ratio:",
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
    """Seven rows of panels, as the paper's."""
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
