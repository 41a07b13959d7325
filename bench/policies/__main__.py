"""`sterna reproduce policies`: Sterna's policy against Llumnix and the rules of other systems."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.common.command import ended, positive
from bench.common.pages import write_marked
from bench.common.results_io import RESULTS, ROOT, measured_commit, read, write
from bench.common.tables import Row
from bench.policies import report
from bench.policies.contenders import LLUMNIX, STERNA, contenders
from bench.policies.families import FAMILIES, NUM_DECIDING_SEEDS, NUM_SEEDS, PREFIXES, decides
from bench.policies.goals import goals
from bench.policies.plots import draw
from bench.policies.runs import rows_of
from bench.policies.search import SEEDS as SEARCH_SEEDS
from bench.policies.search import searched, tuned
from sterna.errors import ConfigurationError

PAGE = ROOT / "docs" / "policies.md"
COMMAND = "sterna reproduce policies"
SEARCH = "policies_search"
NAME = "policies"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = _parser().parse_args(arguments)
    return ended(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    console = Console()
    begun_s = time.monotonic()
    if args.search:
        rows = searched(PREFIXES, is_quick=args.quick, num_processes=args.processes)
        if not args.quick:
            config = {"points": [each.name for each in PREFIXES.points if each.chooses]}
            write(SEARCH, {**config, "seeds": list(SEARCH_SEEDS)}, rows, args.results)
        for rule, variant in tuned(rows).items():
            console.print(f"{rule}: {variant}")
    elif args.redraw:
        _show(read(NAME, args.results)["rows"], args.results)
    else:
        _compare(args, console)
    console.print(f"done in {time.monotonic() - begun_s:.0f} s")
    if args.quick:
        console.print("a quick run: its numbers have no meaning, so none was written")


def _compare(args: argparse.Namespace, console: Console) -> None:
    seeds = range(1, args.seeds + 1)
    commit = measured_commit()
    rows = _known(args.results)
    chosen = _tuned(args.results)
    for name in args.families:
        family = FAMILIES[name]
        for point in family.points:
            names = contenders(name, chosen, has_parts=point.has_parts)
            known = [row for row in rows if (row["family"], row["point"]) == (name, point.name)]
            kept = known if args.only_missing else []
            if args.is_continued:
                kept = [row for row in known if row.get("commit") == commit]
            further = range(args.seeds + 1, args.deciding_seeds + 1) if decides(name, point) else ()
            plan = [
                (missing, of_plan)
                for policies, of_plan in ((names, seeds), ((STERNA, LLUMNIX), further))
                if (missing := [each for each in policies if not _has_all(kept, each, of_plan)])
            ]
            if not plan:
                continue
            found = []
            for policies, of_plan in plan:
                found += rows_of(
                    *(name, point, policies, of_plan),
                    is_quick=args.quick,
                    num_processes=args.processes,
                )
                again = {(each, seed) for each in policies for seed in of_plan}
                kept = [row for row in kept if (row["policy"], row["seed"]) not in again]
            rows = [row for row in rows if row not in known] + kept
            rows += [{**row, "commit": commit} for row in found]
            rows.sort(key=_place)
            if not args.quick:
                found_goals = [asdict(each) for each in goals(rows)]
                config = {"seeds": args.seeds, "deciding_seeds": args.deciding_seeds}
                write(NAME, config, rows, args.results, summary=found_goals)
    for goal in goals(rows):
        console.print(f"{goal.name}: {goal.found} (goal: {goal.bound})", soft_wrap=True)
    if not args.quick:
        _show(rows, args.results)


def _has_all(rows: Sequence[Row], policy: str, seeds: Iterable[int]) -> bool:
    """Whether a policy has run with all seeds."""
    return {row["seed"] for row in rows if row["policy"] == policy} >= set(seeds)


def _place(row: Row) -> tuple[int, int]:
    """Rows stand in the order of families and points; those of a point stay as they are."""
    names = [each.name for each in FAMILIES[row["family"]].points]
    return list(FAMILIES).index(row["family"]), names.index(row["point"])


def _known(results: Path) -> list[Row]:
    """The rows so far, of points that there still are."""
    try:
        rows: list[Row] = read(NAME, results)["rows"]
    except FileNotFoundError:
        return []
    points = {(name, each.name) for name, family in FAMILIES.items() for each in family.points}
    return [row for row in rows if (row["family"], row["point"]) in points]


def _tuned(results: Path) -> dict[str, str]:
    try:
        return dict(tuned(read(SEARCH, results)["rows"]))
    except FileNotFoundError:
        raise ConfigurationError(
            f"there are no chosen parameters yet: {COMMAND} --search"
        ) from None


def _show(rows: Sequence[Row], results: Path) -> None:
    """Draw the plot, and write the page from the results of the repository."""
    found = goals(rows)
    draw(rows, found, results, NAME)
    text = report.markdown(rows, [asdict(each) for each in found])
    if results.resolve() == RESULTS:
        write_marked(PAGE, COMMAND, text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=(
            "Simulate Sterna's policy, its parts, and the rules of other systems, and write "
            f"bench/results/{NAME}.json and docs/policies.md."
        ),
    )
    parser.add_argument(
        "families",
        nargs="*",
        type=_family,
        default=list(FAMILIES),
        metavar="FAMILY",
        help=f"some of {', '.join(FAMILIES)} (default: all); the others keep their rows",
    )
    parser.add_argument(
        "--continue",
        dest="is_continued",
        action="store_true",
        help="leave out what has run at this commit: a run may be interrupted",
    )
    parser.add_argument(
        "--only-missing",
        action="store_true",
        help="leave out what has run at any commit: rules that the comparison did not have yet",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        default=NUM_SEEDS,
        metavar="N",
        help="seeds 1 to N (default: %(default)s)",
    )
    parser.add_argument(
        "--deciding-seeds",
        type=positive,
        default=NUM_DECIDING_SEEDS,
        metavar="N",
        help="seeds 1 to N of Sterna's policy and Llumnix's where goals compare the two "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help=f"choose the parameters of all rules again, into {SEARCH}.json, and end",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few requests, as a check; writes nothing"
    )
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="runs at once (default: one a core)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where the result files are (default: bench/results)",
    )
    parser.add_argument(
        "--redraw", action="store_true", help="only write plot and page from the result file"
    )
    return parser


def _family(text: str) -> str:
    if text not in FAMILIES:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(FAMILIES)}, not {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
