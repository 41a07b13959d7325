"""`sterna reproduce`: the paper's evaluation, or figures of it."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.paper import compare, page
from bench.paper.cells import Options
from bench.paper.claims import Claim
from bench.paper.experiment import Experiment
from bench.paper.figures import ALL, EXPERIMENTS
from bench.paper.points import Row
from bench.paper.tables import claim_cells
from bench.results_io import write
from sterna.errors import SternaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = _parser().parse_args(arguments)
    try:
        _run(args)
    except SternaError as error:
        print(f"sterna: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    console = Console()
    experiments = _chosen(args.names)
    options = Options(num_seeds=args.seeds, is_quick=args.quick, num_processes=args.processes)
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
    for experiment in experiments:
        rows = experiment.rows(options)
        claims = experiment.claims(rows) if not args.quick else []
        _show(console, experiment, claims)
        if not args.quick:
            _write(experiment, rows, claims, options, args.results)
    if not args.quick:
        page.write_all(args.results)
    console.print(f"done in {time.monotonic() - begun_s:.0f} s")
    if args.quick:
        console.print("a quick run: its numbers say nothing, so that none was written")


def _chosen(names: Sequence[str]) -> list[Experiment]:
    wanted = list(ALL) if not names or "all" in names else list(dict.fromkeys(names))
    if "all" in names:
        wanted += [name for name in names if name not in ("all", *ALL)]
    return [EXPERIMENTS[name] for name in wanted]


def _write(
    experiment: Experiment,
    rows: Sequence[Row],
    claims: Sequence[Claim],
    options: Options,
    folder: Path,
) -> None:
    config = {**experiment.config, "seeds": [f"{each:#x}" for each in options.seeds]}
    write(
        experiment.name,
        config,
        rows,
        folder,
        claims=[each.as_json() for each in claims],
    )


def _show(console: Console, experiment: Experiment, claims: Sequence[Claim]) -> None:
    console.print(f"[bold]{experiment.title}[/bold]")
    if not claims:
        return
    table = Table("claim", "paper", "ours", "over seeds", "verdict")
    for claim in claims:
        text, _, *numbers, verdict = claim_cells(claim)
        table.add_row(text, *numbers, verdict.replace("*", ""))
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna reproduce",
        description=(
            "Run the paper's evaluation with the code that serves, and write "
            "bench/results/paper and docs/evaluation.md. Simulated but for figures 4, 10 and 16, "
            "which use measurements."
        ),
    )
    parser.add_argument(
        "names",
        nargs="*",
        choices=["all", *EXPERIMENTS],
        metavar="FIGURE",
        help=f"all (default), or some of {', '.join(EXPERIMENTS)}; sensitivity is not in all",
    )
    parser.add_argument(
        "--seeds",
        type=_count,
        default=0,
        metavar="N",
        help="N more seeds beside the paper's, for the claims (default 0)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few requests and few points, in seconds, to see that it works; writes nothing",
    )
    parser.add_argument(
        "--compare",
        metavar="BASE",
        help="run the git revision BASE as well and show ratios at each point; writes nothing",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="runs at once (default: one a core)"
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


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
