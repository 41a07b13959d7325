"""Compares replicas that Sterna runs with those of vLLM's own data parallelism.

The same requests are sent to each server, one right after the other, as they come (`RATE`) and all
at once; a round has each server once at each load, and other requests than the other rounds. All
servers are up, and one of them runs at a time (`turns`); after some rounds they are started again,
since two starts of the same server differ by some percent. The replicas of the small model share
the machine's cores, so that balance gains little here: the comparison is of costs, and of waits
that queues and memory make.

    sterna bench data-parallel [--replicas 2] [--rounds 5] [--sides sterna vllm ...] [--continue]

`bench/results/data_parallel.json` is written after every run.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.tables import Row, rounded, statistic
from bench.plain_vllm import data_parallel_report as report
from bench.plain_vllm.data_parallel_report import AS_THEY_COME, AT_ONCE, LOADS
from bench.plain_vllm.sides import REPLICA_OPTIONS, SIDES, Side, side
from bench.plain_vllm.turns import Turns
from bench.serving.comparing import add_round_options, in_turn, rows_in_rounds
from bench.serving.measured import LOGS, Measured, Notes
from sterna.demo_model.small_model import default_cache_folder, ensure_small_model
from sterna.workload.catalog import Workload, build_trace

NAME, COMMAND = "data_parallel", "data-parallel"

TRACE, MAX_TOTAL_TOKENS = "M-M", 2_048
"""The paper's medium lengths."""

RATE, ALL_AT_ONCE = 0.6, 10_000.0
"""Requests a second. Two cores without AVX-512 carry the first rate."""

NUM_REQUESTS = {AS_THEY_COME: 80, AT_ONCE: 40}

QUICK_REQUESTS, QUICK_TOKENS = 8, 128

ROUNDS_OF_A_START = 3
"""After as many the servers are started again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: rows_in_rounds(NAME, options, _measure, report.markdown))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    sides = [side(each) for each in options.sides]
    notes = Notes()
    model = ensure_small_model(default_cache_folder(os.environ), notes.say)
    rows[:] = report.whole(rows, {each.name for each in sides})
    known = {(row["replicas"], row["side"], row["seed"], row["load"]) for row in rows}
    for num_replicas in options.replicas:
        for first in range(1, options.rounds + 1, ROUNDS_OF_A_START):
            last = min(first + ROUNDS_OF_A_START - 1, options.rounds)
            lacking = [
                (each, load, _workload(load, seed, is_quick=options.quick))
                for seed in range(first, last + 1)
                for load in LOADS
                for each in in_turn(sides, seed)
                if (num_replicas, each.name, seed, load) not in known
            ]
            for row in _measured_rows(num_replicas, lacking, model, notes):
                rows.append(row)
                _write(options, rows, folder)


def _measured_rows(
    num_replicas: int, lacking: Sequence[tuple[Side, str, Workload]], model: Path, notes: Notes
) -> Iterator[Row]:
    """Start each server once, and send it its workloads in this order; yields after each."""
    with Turns() as turns:
        servers, start_s = {}, {}
        for name, which in {each.name: each for each, _, _ in lacking}.items():
            notes.say(f"{num_replicas} replicas of {name}: the start")
            log = LOGS / NAME / f"{name}-{num_replicas}-{lacking[0][2].seed}.log".replace(" ", "")
            begun_s = time.monotonic()
            servers[name] = turns.start(name, which.started(model, num_replicas, log))
            start_s[name] = rounded(time.monotonic() - begun_s)
            with turns.alone(name):
                servers[name].warm_up()
        for which, load, workload in lacking:
            name, seed = which.name, workload.seed
            notes.say(f"{num_replicas} replicas of {name}: round {seed}, requests {load}")
            with turns.alone(name):
                done = servers[name].measure(build_trace(workload), name, seed=seed)
            notes.say_outcome(done)
            labels = {"replicas": num_replicas, "side": name, "seed": seed, "load": load}
            # Once for each start.
            row = {**labels, "start_s": start_s.pop(name, None), **_metrics(done)}
            notes.say(
                f"TTFT P99 {row['ttft_p99_s']:.2f} s, TPOT {1000 * row['tpot_mean_s']:.1f} ms"
            )
            yield {**row, "commit": results_io.measured_commit()}


def _workload(load: str, seed: int, *, is_quick: bool) -> Workload:
    rate = ALL_AT_ONCE if load == AT_ONCE else RATE
    if is_quick:
        return Workload(TRACE, QUICK_REQUESTS, rate, seed=seed, max_total_tokens=QUICK_TOKENS)
    num_requests = NUM_REQUESTS[load]
    return Workload(TRACE, num_requests, rate, seed=seed, max_total_tokens=MAX_TOTAL_TOKENS)


def _metrics(done: Measured) -> Row:
    summary, records = done.run.summary(), done.run.records
    num_tokens = float(records.output_tokens[~np.isnan(records.end_s)].sum())
    return {
        "n": summary.num_completed,
        "failed": summary.num_requests - summary.num_completed,
        "ttft_mean_s": statistic(summary.ttft_s, "mean"),
        "ttft_p99_s": statistic(summary.ttft_s, "p99"),
        "tpot_mean_s": statistic(summary.tpot_s, "mean"),
        "tpot_p99_s": statistic(summary.tpot_s, "p99"),
        "gap_max_s": statistic(summary.largest_gap_s, "max"),
        "request_mean_s": statistic(summary.request_s, "mean"),
        "makespan_s": rounded(summary.simulated_s),
        "output_tokens_per_s": rounded(num_tokens / summary.simulated_s) if num_tokens else None,
        "foreign_cores": done.foreign_cores,
    }


def _write(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    config = {
        "rounds": options.rounds,
        "workload": {
            "trace": TRACE,
            "rate": {AS_THEY_COME: RATE, AT_ONCE: ALL_AT_ONCE},
            "requests": NUM_REQUESTS,
            "max_total_tokens": MAX_TOTAL_TOKENS,
        },
        "engine_options": REPLICA_OPTIONS,
        "sides": {name: list(each.options) for name, each in SIDES.items()},
    }
    rows.sort(key=_place)
    results_io.write(NAME, config, rows, folder, summary=report.summary(rows))


def _place(row: Row) -> tuple[int, int, int, int]:
    places = LOADS.index(row["load"]), list(SIDES).index(row["side"])
    return row["replicas"], *places, row["seed"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {COMMAND}",
        description="Compare replicas that Sterna runs with vLLM's own data parallelism, on the "
        "small model.",
        epilog="docs/benchmarks.md explains what is measured.",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        choices=(1, 2, 3, 4),
        default=[2],
        metavar="N",
        help="their numbers (default: 2)",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        default=list(SIDES),
        metavar="NAME",
        help=f"some of: {'; '.join(SIDES)} (default: all)",
    )
    add_round_options(parser, quick="few requests, short ones, as a check")
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
