"""Runs many seeds of the fault simulation (docs/internals/fault_simulation.md); shows one again.

    make sim-soak                                     100,000 seeds, into bench/results
    make sim-soak ARGS=--continue                     go on where Ctrl-C, or a crash, ended it
    make sim-soak ARGS="--results FOLDER"             write the results so far to FOLDER
    python -m bench.simulation.sim_soak --seeds 1000 --first 5000
    python -m bench.simulation.sim_soak --replay 308  one seed, with its last events
    python -m bench.simulation.sim_soak --planted     search for planted mistakes (`sim_planted`)

A seed determines a whole cluster: its instances and front ends, all requests, all faults and their
times. The same seed, at the same commit, gives the same events. `bench/results/sim_soak.json` has
the number of seeds that broke a promise (`summary`), the counts of events in all seeds
(`happened`), and the broken promises (`rows`).
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.common import results_io
from bench.common.command import ended, positive
from bench.common.jobs import INTERRUPTED, Stop, workers
from bench.simulation import sim_planted, sim_progress
from bench.simulation.sim_code import code_of_seeds
from bench.simulation.sim_progress import Progress
from fault_simulation.adversary.faults import LINKS_ONLY, FaultPlan
from fault_simulation.run import Result, run_seed

SEEDS = 100_000
MAX_VIOLATIONS = 20
"""Number of failing seeds after which a run ends."""

SEEDS_AT_ONCE = 8
PROGRESS_S = 5.0
TRACE_LINES = 60
UNFINISHED = results_io.ROOT / ".cache" / "bench" / "sim_soak.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds, or replay one."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.links_only and options.replay is None:
        parser.error("--links-only needs --replay")
    plan = replace(LINKS_ONLY if options.links_only else FaultPlan(), overlap=options.overlap)
    if options.replay is not None:
        return _replay(options.replay, plan, options.trace)
    exit_code = 0

    def run() -> None:
        nonlocal exit_code
        if options.planted:
            exit_code = sim_planted.search(options.overlap, options.workers, options.results)
        else:
            exit_code = _soak(options, plan)

    return ended(run) or exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation.sim_soak", description="Runs the simulator under faults."
    )
    parser.add_argument("--seeds", type=positive, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="is_continued",
        help="add to what is done already of these seeds, or of others, by the same code: what the "
        "file of --progress says, or, where there is none, the results",
    )
    parser.add_argument(
        "--workers", type=positive, default=len(os.sched_getaffinity(0)), help="processes"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="break a component while another is down"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="show this one and end")
    parser.add_argument(
        "--links-only",
        action="store_true",
        help="with --replay: cut links, and break nothing else "
        "(tests/fault_simulation/test_leases.py)",
    )
    parser.add_argument(
        "--planted", action="store_true", help="after how many seeds planted mistakes are found"
    )
    parser.add_argument(
        "--trace",
        type=positive,
        default=TRACE_LINES,
        help="number of printed events of a failing seed",
    )
    parser.add_argument(
        "--progress",
        type=Path,
        default=UNFINISHED,
        metavar="FILE",
        help="where it is kept what is done (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the result goes, however much is done (default: bench/results, of a whole "
        "run only)",
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
    """Raises ConfigurationError: there is nothing to continue."""
    code = code_of_seeds()
    progress = Progress(code, plan.overlap)
    folder = options.results or results_io.RESULTS
    if options.is_continued and options.progress.exists():
        progress = sim_progress.load(options.progress, code, overlap=plan.overlap)
    elif options.is_continued:
        progress = sim_progress.load_results(folder, code, overlap=plan.overlap)
    end = options.first + options.seeds
    with workers(options.workers) as (pool, stop):
        left = progress.left(options.first, end)
        # In order, so that the done seeds are few ranges.
        results = pool.map(partial(run_seed, plan=plan), left, chunksize=SEEDS_AT_ONCE)
        shown = _Shown(progress, progress.num_left(options.first, end), options.progress)
        for result in _until_stop(results, stop):
            shown.add(result)
            if result.violation is not None:
                more = ("--overlap",) if plan.overlap else ()
                command = replay_command(result.seed, *more)
                print(f"\nseed {result.seed}: {result.violation}\n  {command}")
                if len(progress.violations) >= MAX_VIOLATIONS:
                    print("that is enough")
                    break
        shown.save()
    is_interrupted = stop.is_wanted and progress.num_left(options.first, end) > 0
    is_whole = progress.num_left(0, SEEDS) == 0 and not plan.overlap
    if is_whole or options.results is not None:
        print(sim_progress.write(progress, options.workers, folder))
    print(
        f"{progress.num_seeds} seeds, {len(progress.violations)} violations, "
        f"{progress.num_events} events in {progress.wall_s:.0f} s"
    )
    if is_interrupted:
        print("interrupted; the same command with --continue goes on from here")
        return INTERRUPTED
    return 1 if progress.violations else 0


def _until_stop(results: Iterator[Result], stop: Stop) -> Iterator[Result]:
    for result in results:
        yield result
        if stop.is_wanted:
            return


class _Shown:
    """Saves the progress, and prints it every few seconds."""

    def __init__(
        self,
        progress: Progress,
        num_left: int,
        path: Path,
    ) -> None:
        self._progress = progress
        self._num_left = num_left
        self._num_before = progress.num_seeds
        self._wall_before_s = progress.wall_s
        self._path = path
        self._begin_s = self._shown_s = time.perf_counter()

    def add(self, result: Result) -> None:
        """Add the seed's result."""
        self._progress.add(result)
        if time.perf_counter() - self._shown_s >= PROGRESS_S:
            self.save()
            self._show()

    def save(self) -> None:
        """Save the final progress."""
        self._shown_s = time.perf_counter()
        self._progress.wall_s = self._wall_before_s + self._shown_s - self._begin_s
        self._progress.save(self._path)

    def _show(self) -> None:
        num_done = self._progress.num_seeds - self._num_before
        per_s = num_done / (self._shown_s - self._begin_s)
        left_s = (self._num_left - num_done) / per_s
        print(
            f"{num_done} of {self._num_left} seeds, {per_s * 3600:.0f} an hour, "
            f"{left_s / 60:.0f} minutes to go, {len(self._progress.violations)} violations",
            file=sys.stderr,
            flush=True,
        )


def replay_command(seed: int, *options: str) -> str:
    """Return the command that replays this seed, also in a clone without an environment."""
    return f'make sim-soak ARGS="{" ".join(["--replay", str(seed), *options])}"'


if __name__ == "__main__":
    sys.exit(main())
