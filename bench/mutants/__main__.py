"""Mutation run of the pure modules: plants small mistakes, counts those that the tests find.

    make mutants                                 all modules, into bench/results/mutants.json
    make mutants ARGS="fleet policy.scaling"     these alone; prints what survives, writes nothing
    make mutants ARGS="fleet --own"              by its own tests alone, without the wider ones
    make mutants ARGS="fleet --list"             prints the mutants

Each mutant is run in a process of its own; no file is changed. `bench/results/mutants.json` has a
row for each module with `planted`, `killed`, `equivalent`, `survived` and the `score`, which is
killed / (planted - equivalent), and names what survived. Exits with 1 where a score is below
`GOAL`, or the list of equivalent mutants is not of this code.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.command import ended, positive
from bench.common.jobs import INTERRUPTED, Stop, Workers, workers
from bench.mutants import equivalents, operators, trials
from bench.mutants.equivalents import Equivalent
from bench.mutants.operators import Mutant
from bench.mutants.targets import ROOT, TARGETS, Target
from bench.mutants.trials import Trial, Verdict
from sterna.errors import SternaError

GOAL = 0.9
"""Of the mutants of a module that are not equivalent."""

BASELINE_LIMIT_S = 600.0
LIMIT_FACTOR = 3.0
LIMIT_MORE_S = 5.0
"""The time limit of a mutant: this factor times the original time, and this many seconds more."""

PROGRESS_S = 1.0


class BrokenBaselineError(SternaError):
    """Tests fail without a mutant."""


@dataclass(slots=True)
class Result:
    """What the mutants of one module came to."""

    module: str
    planted: int = 0
    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    @property
    def score(self) -> float:
        """killed / (planted - equivalent); 1 where there is nothing to kill."""
        num_judged = self.killed + len(self.survivors)
        return self.killed / num_judged if num_judged else 1.0

    def row(self) -> dict[str, Any]:
        """Of the result file."""
        return {
            "module": self.module,
            "planted": self.planted,
            "killed": self.killed,
            "equivalent": self.equivalent,
            "survived": len(self.survivors),
            "score": round(self.score, 3),
            "survivors": [said(each) for each in self.survivors],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants of the chosen modules."""
    parser = _parser()
    options = parser.parse_args(argv)
    targets = _chosen(options.modules, parser)
    if options.own:
        targets = [replace(each, wider=()) for each in targets]
    if options.list:
        for target in targets:
            for mutant in operators.mutants(target.source):
                print(f"{target.module}: {said(mutant)}")
        return 0
    exit_code = 0

    def run() -> None:
        nonlocal exit_code
        exit_code = _run(targets, options)

    return ended(run) or exit_code


def said(mutant: Mutant) -> str:
    """The mutant in one line, by the words that `equivalents.toml` uses."""
    return f"{mutant.function}: {mutant.line}: {mutant.change}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutants",
        description="Plants small mistakes in the pure modules and runs their tests.",
    )
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="such as policy.scaling (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument(
        "--own",
        action="store_true",
        help="run the module's own tests and not the wider ones; writes nothing",
    )
    parser.add_argument(
        "--equivalents",
        action="store_true",
        help="run the equivalent mutants, too, and name those that a test finds",
    )
    parser.add_argument(
        "--workers", type=positive, default=len(os.sched_getaffinity(0)), help="processes"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the result goes (default: bench/results, of a run of all modules only)",
    )
    return parser


def _chosen(names: Sequence[str], parser: argparse.ArgumentParser) -> list[Target]:
    by_name = {each.module.removeprefix("sterna."): each for each in TARGETS}
    chosen: dict[str, Target] = {}
    for name in names or by_name:
        short = name.removeprefix("sterna.")
        found = [each for each in by_name if f".{short}." in f".{each}."]
        if not found:
            parser.error(f"{name} is none of {', '.join(by_name)}")
        chosen |= {each: by_name[each] for each in found}
    return list(chosen.values())


def _run(targets: Sequence[Target], options: argparse.Namespace) -> int:
    os.chdir(ROOT)
    # The same examples as in continuous integration, and the same order of sets each time.
    os.environ.update({"CI": "1", "PYTHONHASHSEED": "0"})
    listed = equivalents.load()
    results: list[Result] = []
    begun_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="sterna-mutants-") as scratch,
        workers(options.workers) as (pool, stop),
    ):
        limits = _Limits(pool, scratch)
        for target in targets:
            entries = () if options.equivalents else listed.get(target.module, ())
            result = _try(target, entries, limits, pool, stop)
            if result is None:
                print("interrupted; nothing is written")
                return INTERRUPTED
            results.append(result)
    wall_s = time.monotonic() - begun_s
    if options.equivalents:
        return _judge_list(results, listed)
    if options.results is not None or (len(targets) == len(TARGETS) and not options.own):
        print(_write(results, options, wall_s))
    return _judge(results)


def _try(
    target: Target, entries: Sequence[Equivalent], limits: "_Limits", pool: Workers, stop: Stop
) -> Result | None:
    """The result of one module; None after an interrupt."""
    mutants = operators.mutants(target.source)
    result = Result(target.module, len(mutants))
    result.stale = equivalents.unmatched(tuple(entries), mutants)
    tried = [each for each in mutants if not any(entry.names(each) for entry in entries)]
    result.equivalent = len(mutants) - len(tried)
    if stop.is_wanted:
        return None
    progress = _Progress(target.module, len(tried))
    for mutant, verdict in zip(tried, _verdicts(target, tried, limits, pool), strict=True):
        if stop.is_wanted:
            return None
        if verdict.found_by is None:
            result.survivors.append(mutant)
        else:
            result.killed += 1
        progress.show(result)
    progress.end(result)
    return result


def _verdicts(
    target: Target, mutants: Sequence[Mutant], limits: "_Limits", pool: Workers
) -> Iterator[Verdict]:
    source, limits_s = target.source, limits.of(target)
    jobs = [
        Trial(
            target.module,
            operators.mutated(source, each),
            target.stages,
            limits_s,
            limits.scratch,
        )
        for each in mutants
    ]
    yield from pool.map(trials.run, jobs, chunksize=1)


class _Limits:
    """Processor time for the stages of a target, from what the original takes."""

    def __init__(self, pool: Workers, scratch: str) -> None:
        self.scratch = scratch
        self._pool = pool
        self._of_stage: dict[tuple[str, ...], float] = {}

    def of(self, target: Target) -> tuple[float, ...]:
        """In seconds, for each stage.

        Raises:
            BrokenBaselineError: a test fails without a mutant.
        """
        new = [stage for stage in target.stages if stage not in self._of_stage]
        jobs = [
            Trial(target.module, None, (stage,), (BASELINE_LIMIT_S,), self.scratch) for stage in new
        ]
        for stage, verdict in zip(new, self._pool.map(trials.run, jobs, chunksize=1), strict=True):
            if verdict.found_by is not None:
                raise BrokenBaselineError(f"without a mutant, too, fails {verdict.found_by}")
            self._of_stage[stage] = LIMIT_FACTOR * verdict.cpu_s[0] + LIMIT_MORE_S
        return tuple(self._of_stage[stage] for stage in target.stages)


class _Progress:
    """One line for a module, which changes where a terminal shows it."""

    def __init__(self, module: str, num_tried: int) -> None:
        self._module = module
        self._num_tried = num_tried
        self._is_terminal = sys.stdout.isatty()
        self._shown_s = 0.0

    def show(self, result: Result) -> None:
        """Show how far it is, once in a while."""
        now_s = time.monotonic()
        if self._is_terminal and now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            num_done = result.killed + len(result.survivors)
            print(f"\r{self._module}: {num_done} of {self._num_tried}", end="", flush=True)

    def end(self, result: Result) -> None:
        """Say what it came to, and name the survivors."""
        if self._is_terminal:
            print("\r\x1b[K", end="")
        print(
            f"{result.module}: {result.score:.1%} "
            f"({result.planted} planted, {result.killed} killed, {result.equivalent} equivalent, "
            f"{len(result.survivors)} survived)"
        )
        for each in result.survivors:
            print(f"  line {each.line_number}: {said(each)}")
        sys.stdout.flush()


def _write(results: Sequence[Result], options: argparse.Namespace, wall_s: float) -> Path:
    killed = sum(each.killed for each in results)
    survived = sum(len(each.survivors) for each in results)
    return results_io.write(
        "mutants",
        {"workers": options.workers, "goal": GOAL},
        [each.row() for each in results],
        options.results or results_io.RESULTS,
        summary={
            "planted": sum(each.planted for each in results),
            "killed": killed,
            "equivalent": sum(each.equivalent for each in results),
            "survived": survived,
            "score": round(killed / (killed + survived), 3),
            "wall_s": round(wall_s),
        },
    )


def _judge(results: Sequence[Result]) -> int:
    is_good = True
    for result in results:
        if result.score < GOAL:
            print(f"{result.module}: {result.score:.1%} is below {GOAL:.0%}")
            is_good = False
        for each in result.stale:
            print(f"{result.module}: equivalents.toml names what is no mutant: {each}")
            is_good = False
    return 0 if is_good else 1


def _judge_list(results: Sequence[Result], listed: dict[str, tuple[Equivalent, ...]]) -> int:
    """Whether no listed mutant is found by a test."""
    is_good = True
    for result in results:
        survivors = {said(each) for each in result.survivors}
        for entry in listed.get(result.module, ()):
            for change in entry.changes:
                name = f"{entry.function}: {entry.line}: {change}"
                if name not in survivors:
                    print(f"{result.module}: not equivalent, or no mutant: {name}")
                    is_good = False
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
