"""Figure 12: fragmented memory over time (Section 6.3)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.common.tables import Row, markdown_table, rounded
from bench.paper.cells import POLICY_NAMES, Cell, Options, at_paper_seed, run_cells
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import COLORS, figure
from bench.paper.experiment import Experiment
from bench.paper.points import matching
from sterna.simulator.paper import paper_config
from sterna.simulator.runs import SimulationRun
from sterna.workload.catalog import Workload
from sterna.workload.seeds import PAPER_SEED

RATE = 7.5
PAPER_MEANS = {"Llumnix": 0.007, "INFaaS++": 0.079}


def cells() -> list[Cell]:
    """M-M at 7.5 requests/s."""
    return [
        Cell(
            {"policy": POLICY_NAMES[policy]},
            Workload(trace="M-M", rate=RATE),
            paper_config(policy, "M-M", fragmentation_interval_s=1.0),
        )
        for policy in ("infaas++", "llumnix")
    ]


def fragmentation_row(run: SimulationRun) -> list[Row]:
    """While requests arrive; the series only of the paper's seed."""
    cluster = run.cluster
    is_arriving = cluster.fragmentation_time_s <= run.records.arrival_s[-1]
    proportions = cluster.fragmentation_proportion[is_arriving]
    row: Row = {
        "n": len(run.records),
        "num_samples": len(proportions),
        "fragmentation_mean": rounded(float(proportions.mean())),
        "above_10_percent_fraction": rounded(float((proportions > 0.1).mean())),
        "zero_fraction": rounded(float((proportions == 0).mean())),
    }
    if run.job.workload.seed == PAPER_SEED:
        row["time_s"] = cluster.fragmentation_time_s[is_arriving].tolist()
        row["proportion"] = [round(each, 4) for each in proportions.tolist()]
    return [row]


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("figure12", cells(), options, fragmentation_row)


def mean_of(policy: str, rows: Sequence[Row]) -> float:
    """The mean fragmentation."""
    (row,) = matching(list(rows), policy=policy)
    return float(row["fragmentation_mean"])


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 6.3: "The average values during this period are 0.7% and 7.9% for Llumnix and
    INFaaS++ respectively (92% reduction)"."""
    note = "the paper's mean is over a busy period, ours over all the time of arrivals"
    return [
        claim(
            "mean fragmentation, INFaaS++",
            "6.3",
            Kind.VALUE,
            PAPER_MEANS["INFaaS++"],
            rows,
            lambda those: mean_of("INFaaS++", those),
            unit="%",
            note=note,
        ),
        claim(
            "mean fragmentation, Llumnix",
            "6.3",
            Kind.AT_MOST,
            PAPER_MEANS["Llumnix"],
            rows,
            lambda those: mean_of("Llumnix", those),
            unit="%",
            note=note,
        ),
        claim(
            "fragmentation, reduction",
            "6.3",
            Kind.REDUCTION,
            0.92,
            rows,
            lambda those: 1 - mean_of("Llumnix", those) / mean_of("INFaaS++", those),
        ),
    ]


def tables(rows: Sequence[Row]) -> str:
    """The means, and how often the fragmentation is high or zero."""
    lines = [
        [
            row["policy"],
            f"{100 * row['fragmentation_mean']:.1f} %",
            f"{100 * PAPER_MEANS[row['policy']]:.1f} %",
            f"{100 * row['above_10_percent_fraction']:.0f} %",
            f"{100 * row['zero_fraction']:.0f} %",
        ]
        for row in at_paper_seed(rows)
    ]
    header = ["policy", "mean, ours", "mean, paper", "time above 10 %", "time at 0"]
    return markdown_table(header, lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The series, with the paper's means."""
    with figure(path, 1, 1, (8.0, 3.0)) as axes:
        axis = axes[0][0]
        for row in at_paper_seed(rows):
            policy = row["policy"]
            percent = 100 * np.array(row["proportion"])
            axis.plot(row["time_s"], percent, color=COLORS[policy], linewidth=0.8, label=policy)
            axis.axhline(
                100 * PAPER_MEANS[policy],
                color=COLORS[policy],
                linestyle=":",
                label=f"{policy}, the paper's mean",
            )
        axis.set_xlabel("time [s]")
        axis.set_ylabel("fragmented memory [%]")
        axis.legend(fontsize=7)


FIGURE12 = Experiment(
    name="figure12",
    title="Figure 12: fragmentation over time",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={"trace": "M-M", "rate": RATE, "instances": 16, "kind": "simulated"},
)
