"""`sterna reproduce`: the paper's evaluation, or figures of it."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common.command import ended, positive
from bench.common.results_io import read, write
from bench.common.tables import Row
from bench.paper import compare, page
from bench.paper.catalog import ALL, EXPERIMENTS
from bench.paper.cells import Options
from bench.paper.claims import Claim
from bench.paper.experiment import Experiment
from bench.paper.tables import claim_cells
from sterna.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = _parser().parse_args(arguments)
    return ended(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    console = Console()
    experiments = _chosen(args.names)
    if args.policy is not None:
        is_compared = args.compare is not None or args.rows_only is not None
        if not is_compared or [each.name for each in experiments] != ["figure11"]:
            raise ConfigurationError(
                "--policy is for comparing: sterna reproduce figure11 --compare BASE --policy NAME"
            )
    options = Options(
        num_seeds=args.seeds,
        is_quick=args.quick,
        num_processes=args.processes,
        policy=args.policy,
    )
    if args.rows_only is not None:
        found = {each.name: each.rows(options) for each in experiments}
        args.rows_only.write_text(json.dumps(found))
        return
    if args.compare is not None:
        compare.show(console, experiments, options, args.compare)
        return
    if args.redraw:
        page.write_all(args.results)
        return
    begun_s = time.monotonic()
    refused = [each for each in experiments if not _reproduce(each, console, options, args.results)]
    if not args.quick:
        page.write_all(args.results)
    console.print(f"done in {time.monotonic() - begun_s:.0f} s")
    if args.quick:
        console.print("a quick run: its numbers have no meaning, so none was written")
    if refused:
        names = ", ".join(each.name for each in refused)
        raise ConfigurationError(f"not run: {names} (see above); all else is done")


def _reproduce(experiment: Experiment, console: Console, options: Options, results: Path) -> bool:
    """Run one experiment; False when a file that it needs is missing."""
    try:
        rows = experiment.rows(options)
    except ConfigurationError as error:
        console.print(f"[bold]{experiment.title}[/bold] cannot be run: {error}", soft_wrap=True)
        return False
    if options.is_quick:
        # Without claims: few requests have no preemptions, by whose loss claims would divide.
        _try_out(experiment, rows)
        console.print(f"[bold]{experiment.title}[/bold]")
    else:
        claims = experiment.claims(rows)
        _show(console, experiment, claims, options)
        _write(console, experiment, rows, claims, options, results)
    return True


def _try_out(experiment: Experiment, rows: Sequence[Row]) -> None:
    """Make the tables and the plot, and discard them."""
    experiment.tables(rows)
    if experiment.draw is not None:
        with tempfile.TemporaryDirectory() as folder:
            experiment.draw(rows, Path(folder) / f"{experiment.name}.png")


def _chosen(names: Sequence[str]) -> list[Experiment]:
    wanted = list(ALL) if not names or "all" in names else list(dict.fromkeys(names))
    if "all" in names:
        wanted += [name for name in names if name not in ("all", *ALL)]
    return [EXPERIMENTS[name] for name in wanted]


def _write(
    console: Console,
    experiment: Experiment,
    rows: Sequence[Row],
    claims: Sequence[Claim],
    options: Options,
    folder: Path,
) -> None:
    config = dict(experiment.config)
    if any("seed" in row for row in rows):
        config["seeds"] = [f"{each:#x}" for each in options.seeds]
        if (folder / f"{experiment.name}.json").exists():
            num_before = len(read(experiment.name, folder)["config"].get("seeds", []))
            if num_before > len(options.seeds):
                console.print(
                    f"the result file had {num_before} seeds: --seeds {num_before - 1} makes "
                    "such a one again"
                )
    write(experiment.name, config, rows, folder, claims=[each.as_json() for each in claims])


def _show(
    console: Console, experiment: Experiment, claims: Sequence[Claim], options: Options
) -> None:
    console.print(f"[bold]{experiment.title}[/bold]")
    if not claims:
        return
    table = Table("claim", "paper", "ours", "over seeds", "verdict")
    for claim in claims:
        # The cells are Markdown, and a terminal shows its asterisks.
        text, _, *others = (cell.replace("*", "") for cell in claim_cells(claim, options.num_seeds))
        table.add_row(text, *others)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna reproduce",
        description=(
            "Run the paper's evaluation with the code that serves, and write "
            "bench/results/paper and docs/evaluation.md. Simulated but for figures 4, 10 and 16, "
            "which use measurements. `sterna reproduce policies` compares policies beyond the "
            "paper's, with options of its own."
        ),
    )
    parser.add_argument(
        "names",
        nargs="*",
        # Not choices, among which argparse of Python 3.11 looks for the empty list, too.
        type=_name,
        metavar="FIGURE",
        help=f"all (default), or some of {', '.join(EXPERIMENTS)}; sensitivity is not in all",
    )
    parser.add_argument(
        "--seeds",
        type=_count,
        default=0,
        metavar="N",
        help="N more seeds besides the paper's, for the claims (default 0)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few requests, in a minute, as a check; writes nothing",
    )
    parser.add_argument(
        "--compare",
        metavar="BASE",
        help="run the git revision BASE as well and show ratios at each point; writes nothing",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="with --compare, of figure11: a preset as it ships, with live load reports, in "
        "place of the paper's policies",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="runs at once (default: one a core)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=page.RESULTS,
        metavar="FOLDER",
        help="where the result files are (default bench/results/paper)",
    )
    parser.add_argument(
        "--redraw", action="store_true", help="only write plots and page from the result files"
    )
    parser.add_argument("--rows-only", type=Path, help=argparse.SUPPRESS)
    return parser


def _name(text: str) -> str:
    if text not in ("all", *EXPERIMENTS):
        raise argparse.ArgumentTypeError(
            f"must be all or some of {', '.join(EXPERIMENTS)}, not {text!r}"
        )
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
