"""Compares `sterna serve` as it is with servers from which one part is removed, under faults.

Each part is removed from a copy of the source (`removals`). Both servers get the same requests and
the same faults: processes are killed, clients hold connections, /dev/shm is full. The engines are
emulated, so that a step takes no processor time and a machine of two cores can carry all of it.

    python -m bench.parts                         all
    python -m bench.parts --only supervisor gcs   these parts; the others' rows are kept
    python -m bench.parts --report                measure nothing; write the page again

`bench/results/parts.json` has a row for each fault and side (`with`, `without` the part): the
number of `streams` and of those that were `cut`, of `short` requests and of those that were
`refused`, times in seconds, and what was `seen` each time. Read counts and seconds: milliseconds
depend on the machine.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.pages import write_marked
from bench.parts.crashes import settle
from bench.parts.removals import copy_source
from bench.parts.report import WITH, WITHOUT, markdown, row_of, seconds_of
from bench.parts.trials import TRIALS, Fault, Trial, certified
from bench.parts.watching import Load, Observation, Scene, watch
from bench.serving.measured import LOGS
from bench.serving.served import served
from bench.serving.target import find_target
from sterna.errors import ConfigurationError

NAME = "parts"
COMMAND = f"python -m bench.{NAME}"
PAGE = results_io.ROOT / "docs" / "internals" / "parts.md"

NUM_INSTANCES = 2
SETTLE_TIMEOUT_S = 60.0
LOAD = Load(num_streams=8)
SHARED_OPTIONS = ("--shutdown-timeout", "0")

Row = dict[str, Any]
Schedule = list[tuple[Trial, Fault]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    names = [each.name for each in TRIALS]
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="parts")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    parser.add_argument(
        "--results", type=Path, default=results_io.RESULTS, help="folder of the result file"
    )
    options = parser.parse_args(argv)
    end_like_ctrl_c()
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if not options.report:
        chosen = [each for each in TRIALS if each.name in options.only]
        for side, schedule in schedules(chosen):
            path = _write(_measure(side, schedule), options.results)
        say(f"wrote {path}")
    try:
        document = results_io.read(NAME, options.results)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {options.results / NAME}.json yet: leave out --report"
        ) from None
    text = markdown(document, results_io.read("instance_start"))
    print(text)
    if options.results.resolve() == results_io.RESULTS:
        write_marked(PAGE, COMMAND, text)


def _write(rows: Sequence[Row], folder: Path) -> Path:
    """Write these rows, and keep those of other faults and sides."""

    def cell(row: Row) -> tuple[str, str, str]:
        return row["trial"], row["fault"], row["side"]

    measured = {cell(row) for row in rows}
    earlier = results_io.read(NAME, folder)["rows"] if (folder / f"{NAME}.json").exists() else []
    kept = [row for row in earlier if cell(row) not in measured]
    names = [each.name for each in TRIALS]
    together = sorted([*kept, *rows], key=lambda row: names.index(row["trial"]))
    config = {
        "streams": LOAD.num_streams,
        "trials": {
            each.name: {
                "options": " ".join(each.options),
                "removed": [
                    {"file": change.file, "old": change.old, "new": change.new}
                    for change in each.removal.changes
                ],
                "settings": [change.new.strip() for change in each.settings],
            }
            for each in TRIALS
        },
    }
    return results_io.write(NAME, config, together, folder)


def schedules(trials: Sequence[Trial]) -> Iterator[tuple[str, Schedule]]:
    """The faults for each server, in order: first those of the servers as they are, where trials of
    equal servers share one, then those of each part's removal."""
    shared: dict[tuple[Any, ...], Schedule] = {}
    for trial in trials:
        setup = (trial.options, trial.within, trial.settings, trial.has_tls)
        shared.setdefault(setup, []).extend(_repeated(trial))
    yield from ((WITH, each) for each in shared.values())
    yield from ((WITHOUT, _repeated(trial)) for trial in trials)


def _repeated(trial: Trial) -> Schedule:
    return [(trial, fault) for fault in trial.faults for _ in range(fault.repeats)]


def _measure(side: str, schedule: Schedule) -> list[Row]:
    """Carry out all faults of a schedule. A server that has ended is started again for the next
    fault; it would end of the same one again."""
    left = [*schedule]
    seen: dict[tuple[Trial, Fault], list[Observation]] = {each: [] for each in schedule}
    while left:
        first, _ = left[0]
        log = LOGS / NAME / f"{first.name}_{side}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"{first.removal.part}, {side} it: starting a server")
        with _server(first, side, log) as scene:
            ended_s: float | None = None
            while left and ended_s is None:
                trial, fault = left.pop(0)
                found = asyncio.run(_strike(scene, trial, fault, side))
                seen[trial, fault].append(found)
                say(f"  {fault.name}: {seconds_of(found)}")
                ended_s = found.ended_s
        if ended_s is not None:
            left = [each for each in left if each != (trial, fault)]
    return [row_of(trial, fault, side, found) for (trial, fault), found in seen.items()]


async def _strike(scene: Scene, trial: Trial, fault: Fault, side: str) -> Observation:
    reserves = trial.reserves if side == WITH else ()
    if not await settle(scene, NUM_INSTANCES, reserves, SETTLE_TIMEOUT_S):
        say("  the server is not whole before the fault")
    scene.lost.clear()
    return await watch(scene, LOAD, fault.strike, fault.watch_s)


@contextmanager
def _server(trial: Trial, side: str, log: Path) -> Iterator[Scene]:
    """A server from a copy of the source, which is removed afterwards."""
    changes = [*trial.settings, *(trial.removal.changes if side != WITH else ())]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parts-"))
        environment = copy_source(Path(folder), changes)
        tls = stack.enter_context(certified()) if trial.has_tls else None
        begun_s = time.monotonic()
        url = stack.enter_context(
            served(
                [*trial.options, *SHARED_OPTIONS, *(() if tls is None else tls.options)],
                log=log,
                within=trial.within,
                environment=environment,
                tls=None if tls is None else tls.context,
            )
        )
        start_s = time.monotonic() - begun_s
        target = asyncio.run(find_target(url, tls=None if tls is None else tls.context))
        yield Scene(target, log, start_s)


def say(line: str) -> None:
    """Print one line on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
