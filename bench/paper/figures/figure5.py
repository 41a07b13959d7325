"""Figure 5: free memory of four instances against the demands at the heads of their lines
(Section 3)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.common.tables import Row, markdown_table, number, rounded
from bench.paper.cells import Cell, Options, at_paper_seed, run_cells
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import figure
from bench.paper.experiment import Experiment
from sterna.simulator.paper import paper_config
from sterna.simulator.runs import SimulationRun
from sterna.workload.catalog import Workload
from sterna.workload.seeds import PAPER_SEED

RATE = 1.9
NUM_INSTANCES = 4
NUM_REQUESTS = 2_000
BLOCK_SIZE = 16


def cells() -> list[Cell]:
    """Spreading: a request goes to the instance with the lowest memory load."""
    config = paper_config(
        "infaas++", "M-M", num_instances=NUM_INSTANCES, fragmentation_interval_s=1.0
    )
    return [Cell({}, Workload(trace="M-M", rate=RATE, num_requests=NUM_REQUESTS), config)]


def memory_row(run: SimulationRun) -> list[Row]:
    """How often blocked requests would fit into the free memory of all instances."""
    cluster = run.cluster
    sampled = list(zip(cluster.room_tokens.tolist(), cluster.blocked_demands_tokens, strict=True))
    blocked = [(free, demands) for free, demands in sampled if demands]
    left = [_num_left(free, demands) for free, demands in blocked]
    three = [
        len(demands) - num_left >= min(3, len(demands))
        for (_, demands), num_left in zip(blocked, left, strict=True)
    ]
    many = [fit for fit, (_, demands) in zip(three, blocked, strict=True) if len(demands) >= 3]
    row: Row = {
        "n": len(run.records),
        "num_samples": len(sampled),
        "blocked_fraction": rounded(len(left) / max(1, len(sampled))),
        "three_fit_fraction": rounded(_share(three)),
        "three_of_many_fit_fraction": rounded(_share(many)),
        "all_fit_fraction": rounded(_share([each == 0 for each in left])),
    }
    if run.job.workload.seed == PAPER_SEED:
        row["free_blocks"] = [free // BLOCK_SIZE for free, _ in sampled]
        row["demand_blocks"] = [[each // BLOCK_SIZE for each in them] for _, them in sampled]
    return [row]


def _share(are_so: Sequence[bool]) -> float:
    """The fraction of true values; 0 of none."""
    return sum(are_so) / max(1, len(are_so))


def _num_left(free_tokens: int, demands_tokens: Sequence[int]) -> int:
    """Blocked requests that remain when as many as possible get the free memory."""
    for index, demand_tokens in enumerate(sorted(demands_tokens)):
        if demand_tokens > free_tokens:
            return len(demands_tokens) - index
        free_tokens -= demand_tokens
    return 0


def rows(options: Options) -> list[Row]:
    """The runs."""
    return run_cells("figure5", cells(), options, memory_row)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 3: "for most of the time span, the total free memory can accommodate the queuing
    requests on at least three instances (sometimes all of them)"."""
    half = "“most of the time” read as half of the moments"
    return [
        claim(
            "the free memory of all fits three blocked heads of line, or all where fewer are",
            "3",
            Kind.AT_LEAST,
            0.5,
            rows,
            lambda those: those[0]["three_fit_fraction"],
            note=f"{half} at which a head of line is blocked",
        ),
        claim(
            "where three or four heads of line are blocked, it fits three of them",
            "3",
            Kind.AT_LEAST,
            0.5,
            rows,
            lambda those: those[0]["three_of_many_fit_fraction"],
            note=half,
        ),
    ]


def tables(rows: Sequence[Row]) -> str:
    """The observations at the paper's seed."""
    (row,) = at_paper_seed(rows)
    lines = [
        ["moments (one a second)", str(row["num_samples"])],
        ["a head of line is blocked somewhere", _percent(row["blocked_fraction"])],
        ["of these: all would fit without fragmentation", _percent(row["all_fit_fraction"])],
        ["of these: three would, or all where fewer are", _percent(row["three_fit_fraction"])],
        ["three would, where at least three are", _percent(row["three_of_many_fit_fraction"])],
    ]
    return markdown_table(["", "ours"], lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Free blocks, and the demands stacked, over the time with most blocked moments."""
    (row,) = at_paper_seed(rows)
    demands: list[list[int]] = row["demand_blocks"]
    window_s = min(150, len(demands))
    is_blocked = np.array([bool(each) for each in demands], np.int64)
    begin = int(np.argmax(np.convolve(is_blocked, np.ones(window_s, np.int64), "valid")))
    times = np.arange(begin, begin + window_s)
    layers = np.zeros((NUM_INSTANCES, window_s))
    for column, time in enumerate(times):
        for layer, demand in enumerate(demands[time]):
            layers[layer][column] = demand
    with figure(path, 1, 1, (7.0, 3.2)) as axes:
        axis = axes[0][0]
        names = [f"demand at head of line {each + 1}" for each in range(NUM_INSTANCES)]
        axis.stackplot(times, layers, labels=names, step="mid", alpha=0.8)
        free = row["free_blocks"][begin : begin + window_s]
        axis.step(times, free, "k", where="mid", label="free, all instances")
        axis.set_xlabel("time [s]")
        axis.set_ylabel("blocks")
        axis.legend(fontsize=7)


def _percent(value: float) -> str:
    return f"{number(100 * value)} %"


FIGURE5 = Experiment(
    name="figure5",
    title="Figure 5: fragmentation of four instances",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "trace": "M-M",
        "rate": RATE,
        "instances": NUM_INSTANCES,
        "requests": NUM_REQUESTS,
        "policy": "infaas++",
        "kind": "simulated",
    },
)
