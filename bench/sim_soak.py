"""Runs many seeds of the simulator under faults (docs/fault_simulation.md), and shows one again.

    make sim-soak                                        100,000 seeds, into bench/results
    python -m bench.sim_soak --seeds 1000 --first 5000
    python -m bench.sim_soak --replay 308                one seed, with its last events
    python -m bench.sim_soak --planted                   are mistakes found?

A seed is a whole cluster: how many instances and front ends it has, who asks for what, what breaks
and when. The same seed, at the same commit, gives the same events. `bench/results/sim_soak.json`
says how many seeds broke a promise (`summary`), what happened in all of them, and after how many
seeds each planted mistake was found (`rows`).
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import results_io
from bench.command import ended, positive
from sterna.hostile.faults import FaultPlan
from sterna.hostile.planted import MISTAKES, Mistake
from sterna.hostile.run import Result, run_seed

SEEDS = 100_000
MAX_VIOLATIONS = 20
"""So many failing seeds are enough to know."""

MAX_SEEDS_A_MISTAKE = 2000
SEEDS_AT_ONCE = 8
PROGRESS_S = 5.0
TRACE_LINES = 60


@dataclass(slots=True)
class Tally:
    """What many seeds came to."""

    num_seeds: int = 0
    num_events: int = 0
    violations: list[Result] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        """Count one seed in."""
        self.num_seeds += 1
        self.num_events += result.num_events
        self.counts.update(result.counts)
        if result.violation is not None:
            self.violations.append(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds, or show one."""
    options = _parser().parse_args(argv)
    plan = FaultPlan(overlap=options.overlap)
    if options.replay is not None:
        return _replay(options.replay, plan, options.trace)
    exit_code = 0

    def run() -> None:
        nonlocal exit_code
        exit_code = _show_planted(options, plan) if options.planted else _soak(options, plan)

    return ended(run) or exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim_soak", description="Runs the simulator under faults."
    )
    parser.add_argument("--seeds", type=positive, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--workers", type=positive, default=len(os.sched_getaffinity(0)), help="processes"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="break a component while another is down"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="show this one and end")
    parser.add_argument(
        "--planted", action="store_true", help="after how many seeds planted mistakes are found"
    )
    parser.add_argument(
        "--trace", type=positive, default=TRACE_LINES, help="so many events of a failing seed"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where sim_soak.json goes (default: bench/results, of a whole run only)",
    )
    return parser


# ------------------------------------------------------------------------------------- one seed


def _replay(seed: int, plan: FaultPlan, num_lines: int) -> int:
    result = run_seed(seed, plan)
    for line in result.trace[-num_lines:]:
        print(line)
    print(f"seed {seed}: {result.num_events} events, digest {result.digest}")
    for what, count in sorted(result.counts.items()):
        if count:
            print(f"  {count:6} {what}")
    if result.violation is None:
        print("all promises were kept")
        return 0
    print(f"BROKEN: {result.violation}")
    if result.where:
        print(result.where)
    return 1


# ------------------------------------------------------------------------------------ many seeds


def _soak(options: argparse.Namespace, plan: FaultPlan) -> int:
    begin_s = time.perf_counter()
    tally = Tally()
    seeds = range(options.first, options.first + options.seeds)
    with _pool(options.workers) as pool:
        work = pool.imap_unordered(partial(run_seed, plan=plan), seeds, chunksize=8)
        for result in _shown(work, tally, options.seeds, begin_s):
            if result.violation is not None:
                print(f"\nseed {result.seed}: {result.violation}\n  {_command(result.seed, plan)}")
                if len(tally.violations) == MAX_VIOLATIONS:
                    print("that is enough")
                    break
        wall_s = time.perf_counter() - begin_s
        is_whole = tally.num_seeds == SEEDS and options.first == 0 and not options.overlap
        if not tally.violations and (is_whole or options.results is not None):
            rows = [_row(each, plan, pool) for each in MISTAKES]
            print(_write(tally, rows, wall_s, options))
    print(
        f"{tally.num_seeds} seeds, {len(tally.violations)} violations, "
        f"{tally.num_events} events in {wall_s:.0f} s"
    )
    return 1 if tally.violations else 0


@contextlib.contextmanager
def _pool(num_workers: int) -> Iterator[Any]:
    """Processes that leave Ctrl-C to their parent, and end with it."""
    context = multiprocessing.get_context("spawn")
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with context.Pool(num_workers, ignore) as pool:
        yield pool


def _shown(work: Iterator[Result], tally: Tally, total: int, begin_s: float) -> Iterator[Result]:
    """Count the results, and say every few seconds how far it is."""
    shown_s = begin_s
    for result in work:
        tally.add(result)
        yield result
        now_s = time.perf_counter()
        if now_s - shown_s >= PROGRESS_S:
            shown_s = now_s
            per_hour = tally.num_seeds / (now_s - begin_s) * 3600
            print(
                f"{tally.num_seeds} of {total} seeds, {per_hour:.0f} an hour, "
                f"{len(tally.violations)} violations",
                file=sys.stderr,
                flush=True,
            )


def _show_planted(options: argparse.Namespace, plan: FaultPlan) -> int:
    with _pool(options.workers) as pool:
        rows = [_row(each, plan, pool) for each in MISTAKES]
    return 1 if any(each["found_after_seeds"] is None for each in rows) else 0


def _row(mistake: Mistake, plan: FaultPlan, pool: Any) -> dict[str, Any]:
    """After how many seeds the planted mistake is found."""
    for number, result in enumerate(_in_order(pool, plan, mistake), start=1):
        if result.violation is not None:
            print(f"{mistake.name}: found after {number} seeds: {result.violation}", flush=True)
            return {
                "planted": mistake.name,
                "found_after_seeds": number,
                "violation": result.violation,
            }
    print(f"{mistake.name}: NOT found in {MAX_SEEDS_A_MISTAKE} seeds", flush=True)
    return {"planted": mistake.name, "found_after_seeds": None, "violation": None}


def _in_order(pool: Any, plan: FaultPlan, mistake: Mistake) -> Iterator[Result]:
    """The first seeds with this mistake; no more are begun than whoever asks may need."""
    run = partial(run_seed, plan=plan, cores=mistake.cores)
    for first in range(0, MAX_SEEDS_A_MISTAKE, SEEDS_AT_ONCE):
        yield from pool.map(run, range(first, first + SEEDS_AT_ONCE), chunksize=1)


def _command(seed: int, plan: FaultPlan) -> str:
    return f"python -m bench.sim_soak --replay {seed}{' --overlap' if plan.overlap else ''}"


def _write(
    tally: Tally, rows: Sequence[dict[str, Any]], wall_s: float, options: argparse.Namespace
) -> Path:
    return results_io.write(
        "sim_soak",
        {
            "first": options.first,
            "workers": options.workers,
            "overlap": options.overlap,
            "max_seeds_a_mistake": MAX_SEEDS_A_MISTAKE,
        },
        rows,
        options.results or results_io.RESULTS,
        summary={
            "seeds": tally.num_seeds,
            "violations": len(tally.violations),
            "events": tally.num_events,
            "wall_s": round(wall_s, 1),
            "seeds_per_hour": round(tally.num_seeds / wall_s * 3600),
            "planted": len(rows),
            "planted_found": sum(each["found_after_seeds"] is not None for each in rows),
        },
        more={"happened": dict(sorted(tally.counts.items()))},
    )


if __name__ == "__main__":
    sys.exit(main())
