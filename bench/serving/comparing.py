"""What the benchmarks that compare servers do alike with their command line and their results."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.pages import write_marked
from sterna.errors import ConfigurationError
from sterna.workload.randomness import MAX_SEED

QUICK_SERVE = ("--engine", "emulated")
QUICK_FOLDER = results_io.ROOT / ".cache" / "bench" / "quick"

PAGE = results_io.ROOT / "docs" / "benchmarks.md"


def add_common_options(parser: argparse.ArgumentParser, *, quick: str) -> None:
    """Add what all have: servers, requests, and where results go.

    Args:
        quick: what is measured with --quick.
    """
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="more options of `sterna serve`"
    )
    parser.add_argument("--seed", type=_seed, default=1, help="of the requests (default: 1)")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: write plot and page again"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where results go (default: bench/results, with --quick .cache/bench/quick); the "
        "page is written from bench/results only",
    )


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SEED}")
    return seed


def serve_options(options: argparse.Namespace) -> tuple[str, ...]:
    """What all servers are started with.

    Raises:
        ConfigurationError: nobody can tell where one option ends and the next begins.
    """
    try:
        given = shlex.split(options.serve)
    except ValueError as error:
        raise ConfigurationError(f"--serve cannot be read as options: {error}") from None
    return (*(QUICK_SERVE if options.quick else ()), *given)


def results_folder(options: argparse.Namespace) -> Path:
    """Where results go: those of a quick run say nothing that should be kept."""
    if options.results is not None:
        return Path(options.results)
    return QUICK_FOLDER if options.quick else results_io.RESULTS


@contextlib.contextmanager
def saying_what_is_kept(parts: str) -> Iterator[None]:
    """Say, when Ctrl-C ends what is measured here, that these parts of it are not lost."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"sterna: stopped; {parts} that were done are written", file=sys.stderr)
        raise


def write_report(
    name: str,
    folder: Path,
    markdown: Callable[[Mapping[str, Any]], str],
    plot: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Print the results that are in the folder, and write their plot and the page.

    Raises:
        ConfigurationError: there are none.
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
        write_marked(PAGE, f"sterna bench {name}", text)
