"""Scheduling stalls, the time between two steps of a busy engine (Section 6.6, Figure 16).

On the wall clock, emulated engines of `sterna serve` count it themselves, from the end of a step
until the next one has begun: the engine's scheduling, its outputs, its view, commands, and load
reports that are due then, on cores that all instances, the front end and the client share. Clusters
of 64 and 1,024 instances are simulated, with the costs that `bench.paper.decode_profile` has
measured with vLLM's own scheduler, and `sterna bench dispatch` with the default policy.

    sterna bench stalls [--instances 1 4 ...] [--rounds 5] [--continue]

`bench/results/stalls.json` is written after every row.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.tables import Row, rounded, statistic
from bench.paper.figures.scheduling_costs import NUM_TOKENS, Costs, iteration_costs, profile_line
from bench.paper.figures.stress import LLUMLETS, WARM_UP_S, stress_row
from bench.scheduling import report as dispatch_report
from bench.scheduling import stalls_report as report
from bench.serving.comparing import add_round_options, rows_in_rounds
from bench.serving.measured import LOGS, Notes, started
from sterna.engine.emulated.emulated_engine import STALLS_INTERVAL_S
from sterna.errors import ConfigurationError
from sterna.workload.catalog import Workload, build_trace
from sterna.workload.seeds import PAPER_SEED

NAME = "stalls"

PAGE = results_io.ROOT / "docs" / "performance.md"

INSTANCES = (1, 4, 16)
"""On the wall clock. The most of them keep two cores busy."""

SIMULATED_INSTANCES = (64, 1_024)
SIMULATED_RATES = (1.0, 2.0, 3.0)

PROFILE = "a10-llama-7b"
TRACE = f"fixed:{NUM_TOKENS}-{NUM_TOKENS}"

RATE, SECONDS, QUICK_SECONDS = 1.0, 30.0, 12.0
"""Requests a second for each instance, on the wall clock."""

SIMULATED_S, QUICK_SIMULATED_S = 20.0, WARM_UP_S + 1.0

COUNTS = re.compile(
    r"stalls counted instance=(\w+) steps=(\d+) seconds=([\d.]+) following=(\d+)"
    r" stalled_seconds=([\d.]+)"
)
"""The line with what an instance has counted so far: at the end, and while it steps every
`STALLS_INTERVAL_S`."""

PAUSE_S = STALLS_INTERVAL_S + 1.0
"""Between the warm-up and the run: then the first step that follows another one writes a line,
which has all of the warm-up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: rows_in_rounds(NAME, options, _measure, report.markdown, PAGE))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    notes = Notes()
    seconds, simulated_s = SECONDS, SIMULATED_S
    if options.quick:
        seconds, simulated_s = QUICK_SECONDS, QUICK_SIMULATED_S

    def add(row: Row) -> None:
        rows.append({**row, "commit": results_io.measured_commit()})
        config = {
            **{"trace": TRACE, "profile": PROFILE, "rounds": options.rounds},
            **{"seconds": seconds, "simulated_s": simulated_s},
        }
        results_io.write(NAME, config, rows, folder, summary=report.summary(rows))

    known = {(row["kind"], row["instances"], row["seed"], row["rate"]) for row in rows}
    for seed in range(1, options.rounds + 1):
        for num_instances in options.instances:
            if (report.WALL_CLOCK, num_instances, seed, RATE) not in known:
                notes.say(f"round {seed} of {options.rounds}: {num_instances} instances")
                add(wall_clock_row(num_instances, seconds, seed, notes))
    for num_instances in SIMULATED_INSTANCES:
        for rate in SIMULATED_RATES:
            if (report.SIMULATED, num_instances, PAPER_SEED, rate) not in known:
                notes.say(f"simulated: {num_instances:,} instances, {rate:g} requests/s for each")
                add(simulated_row(num_instances, rate, measured_costs(num_instances), simulated_s))


def wall_clock_row(num_instances: int, seconds: float, seed: int, notes: Notes) -> Row:
    """Requests at a constant rate to a server of emulated instances.

    Raises:
        ConfigurationError: it did not start, or an instance did not count its stalls.
    """
    rate = RATE * num_instances
    log = LOGS / NAME / f"{num_instances}-{seed}.log"
    options = (
        *("--engine", "emulated", "--profile", PROFILE),
        *("--instances", str(num_instances), "--sterna-log-level", "DEBUG"),
    )
    trace = build_trace(Workload(TRACE, round(rate * seconds), rate, seed=seed))
    with started(options, log) as server:
        server.warm_up(num_instances)
        time.sleep(PAUSE_S)
        num_bytes_before = log.stat().st_size
        done = server.measure(trace, f"{num_instances} instances", seed=seed)
    notes.say_outcome(done)
    stalls = stalls_of(log.read_bytes()[num_bytes_before:].decode("utf-8", "replace"))
    if stalls.num_instances != num_instances or stalls.num_followed == 0:
        raise ConfigurationError(
            f"{stalls.num_instances} of {num_instances} instances counted their stalls: see {log}"
        )
    summary = done.run.summary()
    stall_ms = 1_000 * stalls.stalled_s / stalls.num_followed
    notes.say(f"{stall_ms:.3f} ms a step")
    return {
        "kind": report.WALL_CLOCK,
        "instances": num_instances,
        "seed": seed,
        "rate": RATE,
        "n": stalls.num_followed,
        "step_mean_ms": rounded(1_000 * stalls.steps_s / stalls.num_steps),
        "stall_mean_ms": rounded(stall_ms),
        "tpot_mean_ms": rounded(1_000 * (statistic(summary.tpot_s, "mean") or 0.0)),
        "failed": summary.num_requests - summary.num_completed,
        "foreign_cores": done.foreign_cores,
    }


@dataclass(frozen=True, slots=True)
class Stalls:
    """The counts of all instances together.

    Attributes:
        num_followed: steps that began right behind another one.
        stalled_s: what passed between the two.
    """

    num_instances: int
    num_steps: int
    steps_s: float
    num_followed: int
    stalled_s: float


def stalls_of(log: str) -> Stalls:
    """Counts of all instances of a server, from the first line of each in its output to the
    last."""
    first: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    for name, *counts in COUNTS.findall(log):
        last[name] = [float(each) for each in counts]
        first.setdefault(name, last[name])
    num_steps, steps_s, num_followed, stalled_s = (
        sum(last[name][k] - first[name][k] for name in last) for k in range(4)
    )
    return Stalls(len(last), round(num_steps), steps_s, round(num_followed), stalled_s)


def measured_costs(num_instances: int) -> Costs:
    """The mean costs of the default policy with this number of instances, from the committed
    results.

    Raises:
        ConfigurationError: there are none.
    """
    local_s, central_s = iteration_costs()
    dispatch = dispatch_report.summary(results_io.read("dispatch")["rows"])
    for each in dispatch["instances"]:
        if each["instances"] == num_instances:
            # The mean: a queue has the work of the long ones, too.
            dispatch_s = 1 / each["decisions_per_s_per_core"]
            return Costs(local_s, central_s, dispatch_s, each["load_report_us"] / 1e6)
    raise ConfigurationError(
        f"bench/results/dispatch.json has nothing of {num_instances:,} instances: run "
        "`sterna bench dispatch`"
    )


def simulated_row(num_instances: int, rate: float, costs: Costs, seconds: float) -> Row:
    """A cluster of this size, and how much of its stalls is Sterna's.

    A stall is the measured cost of a step of as many requests, whatever the size of the cluster;
    only the queue at the scheduler depends on that.

    Args:
        rate: requests a second for each instance.
    """
    alone = replace(costs, local_s=profile_line("report_ms"))
    all_of_it, own = (
        stress_row(LLUMLETS, rate * num_instances, each, seconds, num_instances)
        for each in (costs, alone)
    )
    return {
        **all_of_it,
        "kind": report.SIMULATED,
        "instances": num_instances,
        "seed": PAPER_SEED,
        "rate": rate,
        "own_stall_mean_ms": own["stall_mean_ms"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="Measure the time between two steps of a busy engine: with emulated instances "
        "on the wall clock, and in simulated clusters of 64 and 1,024.",
        epilog="docs/performance.md explains what is measured.",
    )
    parser.add_argument(
        "--instances",
        type=positive,
        nargs="+",
        default=list(INSTANCES),
        metavar="N",
        help=f"their numbers on the wall clock (default: {' '.join(map(str, INSTANCES))})",
    )
    add_round_options(parser, quick="few requests, as a check")
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
