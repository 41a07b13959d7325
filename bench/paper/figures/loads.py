"""Beyond the paper: Llumnix and INFaaS++ from a nearly empty to a full cluster.

The paper's rates are those at which migration helps most. Below them all instances have free
memory, above them none has.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.common.tables import Row, markdown_table, number, rounded
from bench.paper.cells import (
    POLICY_NAMES,
    Cell,
    Options,
    at_paper_seed,
    geometric_mean,
    ratios,
    run_cells,
    serving_row,
)
from bench.paper.claims import Claim
from bench.paper.drawing import COLORS, figure
from bench.paper.experiment import Experiment
from bench.paper.points import matching
from sterna.simulator.paper import paper_config
from sterna.simulator.runs import SimulationRun
from sterna.workload.catalog import Workload

TRACE = "M-M"
RATES = (4.0, 5.0, 6.0, 6.5, 7.0, 7.5, 8.0, 9.0)
METRICS = ("prefill_mean_s", "prefill_p99_s", "decode_p99_s", "preemption_loss_s")


def cells() -> list[Cell]:
    """Both policies at every rate."""
    return [
        Cell(
            {"request_rate": rate, "policy": POLICY_NAMES[policy]},
            Workload(trace=TRACE, rate=rate),
            paper_config(policy, TRACE, fragmentation_interval_s=1.0),
        )
        for rate in RATES
        for policy in ("infaas++", "llumnix")
    ]


def loaded_row(run: SimulationRun) -> list[Row]:
    """The serving columns, and the share of the memory in use while requests arrive."""
    cluster = run.cluster
    is_arriving = cluster.fragmentation_time_s <= run.records.arrival_s[-1]
    used = 1 - cluster.free_tokens[is_arriving] / cluster.total_tokens[is_arriving]
    (row,) = serving_row(run)
    return [{**row, "memory_load": rounded(float(used.mean()))}]


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("loads", cells(), options, loaded_row)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper has no claims on this."""
    return []


def gains(rows: Sequence[Row], rate: float, metric: str) -> list[float]:
    """INFaaS++ over Llumnix at this rate, one for each seed."""
    those = matching(list(rows), request_rate=rate)
    return ratios(those, metric, {"policy": "INFaaS++"}, {"policy": "Llumnix"}, ("seed",))


def tables(rows: Sequence[Row]) -> str:
    """A line for each rate; gains over all seeds together."""
    lines = []
    for rate in dict.fromkeys(row["request_rate"] for row in rows):
        (llumnix,) = matching(at_paper_seed(rows), request_rate=rate, policy="Llumnix")
        found = [gains(rows, rate, metric) for metric in METRICS]
        lines.append(
            [
                f"{rate:g}",
                f"{100 * llumnix['memory_load']:.0f} %",
                number(llumnix["prefill_p99_s"]),
                *(f"{number(geometric_mean(each))}×" if each else "" for each in found),
            ]
        )
    header = [
        "requests/s",
        "memory in use",
        "Llumnix: prefill P99 [s]",
        "gain: prefill mean",
        "prefill P99",
        "decode P99",
        "preemption loss",
    ]
    return markdown_table(header, lines, 0)


def draw(rows: Sequence[Row], path: Path) -> None:
    """P99 prefill and decode latency over the rate."""
    with figure(path, 1, 2, (4.2, 3.0)) as axes:
        for axis, metric, name in (
            (axes[0][0], "prefill_p99_s", "prefill P99 [s]"),
            (axes[0][1], "decode_p99_s", "decode P99 [s/token]"),
        ):
            for policy in ("INFaaS++", "Llumnix"):
                line = matching(at_paper_seed(rows), policy=policy)
                axis.plot(
                    [row["request_rate"] for row in line],
                    [row[metric] for row in line],
                    color=COLORS[policy],
                    marker="o",
                    label=policy,
                )
            axis.axvspan(7.4, 7.8, color="tab:gray", alpha=0.2, label="the paper's rates")
            axis.set_xlabel("requests/s")
            axis.set_ylabel(name)
            axis.legend(fontsize=7)
        axes[0][0].set_yscale("log")


LOADS = Experiment(
    name="loads",
    title="Beyond the paper: the whole range of loads",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "trace": TRACE,
        "rates": [f"{rate:g}" for rate in RATES],
        "instances": 16,
        "requests": 10_000,
        "kind": "simulated",
    },
)
