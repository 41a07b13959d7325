"""Figure 3: the cost of preemptions on one instance (Section 3)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.common.tables import Row, markdown_table, number, rounded
from bench.paper.cells import Cell, Options, at_paper_seed, run_cells
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import figure
from bench.paper.experiment import Experiment
from bench.paper.points import matching
from sterna.simulator.paper import paper_config
from sterna.simulator.runs import SimulationRun
from sterna.workload.catalog import Workload

RATE = 0.42
LENGTHS = (10_000, 2_000)
"""Requests of a run: of the published M-M trace, by which the claims are judged; and of the paper's
run, whose trace is not published, to show how much such runs differ."""

PERCENTILES = (50, 80, 95, 99)
BAND = 0.005
"""Half of the band of ranks around a percentile over which requests are averaged, as a share of
all: a single request has little meaning."""


def cells() -> list[Cell]:
    """One instance, on which all policies are equal."""
    config = paper_config("infaas++", "M-M", num_instances=1, fragmentation_interval_s=1.0)
    return [
        Cell({"requests": length}, Workload(trace="M-M", rate=RATE, num_requests=length), config)
        for length in LENGTHS
    ]


def percentile_row(run: SimulationRun) -> list[Row]:
    """The decode latency's percentiles, and the preemption losses of the requests there."""
    records, cluster = run.records, run.cluster
    decoded = np.flatnonzero(records.output_tokens > 1)
    num_intervals = records.output_tokens[decoded] - 1
    tpot_s = (records.end_s - records.first_token_s)[decoded] / num_intervals
    order = np.argsort(tpot_s, kind="stable")
    is_arriving = cluster.fragmentation_time_s <= records.arrival_s[-1]
    used = 1 - cluster.free_tokens[is_arriving] / cluster.total_tokens[is_arriving]
    row: Row = {
        "n": len(records),
        "memory_load": rounded(float(used.mean())),
        "preempted_fraction": rounded(float((records.num_preemptions > 0).mean())),
    }
    for percentile in PERCENTILES:
        band = order[_ranks(percentile, len(order))]
        losses_s = records.preemption_loss_s[decoded[band]]
        row[f"decode_p{percentile}_s"] = rounded(float(np.percentile(tpot_s, percentile)))
        row[f"loss_a_token_p{percentile}_s"] = rounded(
            float(np.mean(losses_s / num_intervals[band]))
        )
        row[f"loss_p{percentile}_s"] = rounded(float(losses_s.mean()))
        row[f"preemptions_p{percentile}"] = rounded(
            float(records.num_preemptions[decoded[band]].mean())
        )
    return [row]


def _ranks(percentile: float, num_requests: int) -> slice:
    """The band around the percentile, of at least one request."""
    at, half = percentile / 100 * (num_requests - 1), BAND * num_requests
    return slice(max(0, round(at - half)), min(num_requests, round(at + half) + 1))


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("figure3", cells(), options, percentile_row)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 3's sentences. The paper's P99 request is a single one."""
    one = "the paper's of one request, ours of those from P98.5 to P99.5"
    rows = matching(rows, requests=LENGTHS[0])
    return [
        claim(
            "average memory load at 0.42 requests/s",
            "3",
            Kind.VALUE,
            0.62,
            rows,
            lambda those: those[0]["memory_load"],
            unit="%",
        ),
        claim(
            "requests preempted",
            "3",
            Kind.VALUE,
            0.08,
            rows,
            lambda those: those[0]["preempted_fraction"],
            unit="%",
        ),
        claim(
            "decode latency: P99 over P50",
            "3",
            Kind.FACTOR,
            3.8,
            rows,
            lambda those: those[0]["decode_p99_s"] / those[0]["decode_p50_s"],
        ),
        claim(
            "preemption loss in the P99 request's decode latency",
            "3",
            Kind.VALUE,
            0.70,
            rows,
            lambda those: those[0]["loss_a_token_p99_s"] / those[0]["decode_p99_s"],
            unit="%",
            note=one,
        ),
        claim(
            "preemption loss of the P99 request",
            "3",
            Kind.VALUE,
            50.0,
            rows,
            lambda those: those[0]["loss_p99_s"],
            unit="s",
            note=one,
        ),
    ]


def tables(rows: Sequence[Row]) -> str:
    """The percentiles at the paper's seed, and the spread of runs of either length."""
    (row,) = matching(at_paper_seed(rows), requests=LENGTHS[0])
    lines = [
        [
            f"P{each}",
            number(1000 * row[f"decode_p{each}_s"]),
            number(1000 * row[f"loss_a_token_p{each}_s"]),
            number(row[f"loss_p{each}_s"]),
            number(row[f"preemptions_p{each}"]),
        ]
        for each in PERCENTILES
    ]
    header = [
        "requests at",
        "decode [ms/token]",
        "of it preemption [ms/token]",
        "loss [s]",
        "preemptions",
    ]
    return f"{markdown_table(header, lines)}\n\n{_spread(rows)}"


def _spread(rows: Sequence[Row]) -> str:
    """The differences between seeds of runs of either length."""
    lines = []
    for length in LENGTHS:
        those = matching(rows, requests=length)
        preempted = [100 * row["preempted_fraction"] for row in those]
        factors = [row["decode_p99_s"] / row["decode_p50_s"] for row in those]
        lines.append(
            [
                f"{length}",
                f"{len(those)}",
                *(number(at(each)) for each in (preempted, factors) for at in (min, np.mean, max)),
            ]
        )
    header = ["requests a run", "seeds", "preempted [%]: least", "mean", "most"]
    header += ["P99 / P50: least", "mean", "most"]
    return markdown_table(header, lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars: decode latency a token, with the part that preemption takes."""
    (row,) = matching(at_paper_seed(rows), requests=LENGTHS[0])
    names = [f"P{each}" for each in PERCENTILES]
    with figure(path, 1, 1, (5.0, 3.2)) as axes:
        axis = axes[0][0]
        total = [1000 * row[f"decode_p{each}_s"] for each in PERCENTILES]
        loss = [1000 * row[f"loss_a_token_p{each}_s"] for each in PERCENTILES]
        rest = [a - b for a, b in zip(total, loss, strict=True)]
        axis.bar(names, rest, color="tab:blue", label="decoding, ours")
        axis.bar(names, loss, bottom=rest, color="tab:red", label="preemption loss, ours")
        axis.axhline(
            3.8 * total[0], color="black", linestyle=":", label="P99, paper: 3.8 times the P50"
        )
        axis.set_ylabel("decode latency [ms/token]")
        axis.legend(fontsize=8)


FIGURE3 = Experiment(
    name="figure3",
    title="Figure 3: preemptions on one instance",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "trace": "M-M",
        "rate": RATE,
        "instances": 1,
        "requests": list(LENGTHS),
        "kind": "simulated",
    },
)
