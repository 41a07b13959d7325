"""Options and results of the benchmarks that compare servers."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.common import results_io
from bench.common.command import positive
from bench.common.pages import write_marked
from bench.common.tables import Row
from sterna.errors import ConfigurationError
from sterna.workload.seeds import MAX_SEED

Item = TypeVar("Item")

QUICK_SERVE = ("--engine", "emulated")
QUICK_FOLDER = results_io.ROOT / ".cache" / "bench" / "quick"

PAGE = results_io.ROOT / "docs" / "benchmarks.md"

SAME = ("cpu", "vectors", "num_cores", "gpu", *results_io.VERSIONED)
"""Fields of the hardware that all rows of a result must share."""


def add_common_options(parser: argparse.ArgumentParser, *, quick: str) -> None:
    """Add the options that all have: servers, requests, and the folder of results.

    Args:
        quick: the measurement with --quick, in words.
    """
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="more options of `sterna serve`"
    )
    parser.add_argument("--seed", type=_seed, default=1, help="of the requests (default: 1)")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; write plot and page again"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="folder of results (default: bench/results, with --quick .cache/bench/quick); the "
        "page is written from bench/results only",
    )


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SEED}")
    return seed


def serve_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options with which all servers are started.

    Raises:
        ConfigurationError: the text cannot be split into options.
    """
    try:
        given = shlex.split(options.serve)
    except ValueError as error:
        raise ConfigurationError(f"--serve cannot be read as options: {error}") from None
    return (*(QUICK_SERVE if options.quick else ()), *given)


def results_folder(options: argparse.Namespace) -> Path:
    """Return the folder of results; those of a quick run are not worth keeping."""
    if options.results is not None:
        return Path(options.results)
    return QUICK_FOLDER if options.quick else results_io.RESULTS


@contextlib.contextmanager
def reporting_kept(parts: str) -> Iterator[None]:
    """Print, when Ctrl-C ends the measurement, that these parts of it have been written."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"sterna: stopped; {parts} that were done are written", file=sys.stderr)
        raise


def add_round_options(parser: argparse.ArgumentParser, *, quick: str) -> None:
    """Add the options of the benchmarks that repeat all runs in rounds, and write after each.

    Args:
        quick: the measurement with --quick, in words.
    """
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="runs of each (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="folder of results (default: bench/results; the page is written from there only)",
    )
    parser.add_argument(
        "--continue",
        dest="is_continued",
        action="store_true",
        help="measure only what the results lack",
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; write the page again"
    )


def rows_in_rounds(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, list[Row], Path], None],
    markdown: Callable[[Sequence[Row]], str],
    page: Path | None = PAGE,
    *,
    is_one_machine: bool = True,
) -> None:
    """Measure as the options of `add_round_options` say, print the report, and write the page.

    Args:
        name: of the file of results, and of the command of `sterna bench`.
        measure: adds the rows that are missing, and writes them to the folder after each run. It
            gets the options, too.
        page: None: the results are on no page.
        is_one_machine: all rows must be of one machine. Otherwise `measure` checks those that are
            compared with each other.

    Raises:
        ConfigurationError: there are no results to go on with, or they are of another machine.
    """
    folder = results_folder(options)
    rows: list[Row] = []
    if options.is_continued or options.report:
        kept = _kept(name, folder)
        rows = kept["rows"]
        if is_one_machine and not options.report:
            check_machine(kept["hardware"])
    if not options.report:
        with reporting_kept("runs"):
            measure(options, rows, folder)
    text = markdown(rows)
    print(text)
    if page is not None and folder == results_io.RESULTS:
        write_marked(page, f"sterna bench {name.replace('_', '-')}", text)


def _kept(name: str, folder: Path) -> dict[str, Any]:
    try:
        return results_io.read(name, folder)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {folder / name}.json yet: leave out --continue and --report"
        ) from None


def check_machine(then: Mapping[str, Any]) -> None:
    """Raises ConfigurationError unless results of this hardware can be continued here."""
    now = results_io.hardware()
    others = [each for each in SAME if then.get(each) != now.get(each)]
    if others:
        differences = ", ".join(f"{each} {then.get(each)}, now {now.get(each)}" for each in others)
        raise ConfigurationError(
            f"the results are of another machine, or of other versions ({differences}): without "
            "--continue they are measured again, and replaced"
        )


def in_turn(items: Sequence[Item], number: int) -> Sequence[Item]:
    """The items of this round: each begins with another one, since a machine that is slower for a
    while must not always slow the same one."""
    shift = number % len(items)
    return (*items[shift:], *items[:shift])


def write_report(
    name: str,
    folder: Path,
    markdown: Callable[[Mapping[str, Any]], str],
    plot: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Print the results of the folder, and write their plot and the page.

    Raises:
        ConfigurationError: the folder has no results.
    """
    try:
        document = results_io.read(name, folder)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {folder / name}.json yet: leave out --report"
        ) from None
    plot(document, folder / f"{name}.svg")
    text = markdown(document)
    print(text)
    if folder.resolve() == results_io.RESULTS:
        write_marked(PAGE, f"sterna bench {name.replace('_', '-')}", text)
