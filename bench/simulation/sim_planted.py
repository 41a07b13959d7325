"""Search for planted mistakes: the number of seeds after which the fault simulation finds each.

    python -m bench.simulation.sim_soak --planted

`bench/results/sim_planted.json` has a row for each mistake: `found_after_seeds`, and the
`violation` that showed it; the table of docs/internals/fault_simulation.md is made from it. A
mistake that is not found in `MAX_SEEDS_A_MISTAKE` seeds is a gap in the simulator.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.jobs import INTERRUPTED, Stop, Workers, workers
from bench.common.pages import write_marked
from fault_simulation.adversary.faults import FaultPlan
from fault_simulation.planted import MISTAKES, Mistake
from fault_simulation.run import Result, run_seed

MAX_SEEDS_A_MISTAKE = 3000
SEEDS_AT_ONCE = 8
MAX_SHOWN = 80
"""Characters of a violation in the table; the JSON has them all."""

COMMAND = "python -m bench.simulation.sim_soak --planted"
PAGE = results_io.ROOT / "docs" / "internals" / "fault_simulation.md"


def search(overlap: bool, num_workers: int, results: Path | None) -> int:
    """Search for all mistakes; returns the exit code.

    Args:
        overlap: whether components may die while another is down; nothing is written then.
        results: folder of the JSON; None: the default folder, and the table goes into the page.
    """
    rows: list[dict[str, Any]] = []
    with workers(num_workers) as (pool, stop):
        for mistake in MISTAKES:
            plan = replace(mistake.plan, overlap=overlap)
            row = _row(mistake, plan, pool, stop)
            if stop.is_wanted:
                print("interrupted; nothing is written")
                return INTERRUPTED
            rows.append(row)
            print(_line(row), flush=True)
    num_found = sum(each["found_after_seeds"] is not None for each in rows)
    if not overlap:
        path = results_io.write(
            "sim_planted",
            {"workers": num_workers, "max_seeds_a_mistake": MAX_SEEDS_A_MISTAKE},
            rows,
            results or results_io.RESULTS,
            summary={"planted": len(rows), "found": num_found},
        )
        print(path)
        if results is None:
            write_marked(PAGE, COMMAND, markdown(results_io.read("sim_planted")))
    return 0 if num_found == len(rows) else 1


def markdown(document: dict[str, Any]) -> str:
    """The table of the page, from the result file."""
    found = document["summary"]["found"]
    lines = [
        f"On {document['date'][:10]} at commit {document['commit']}, {found} of "
        f"{document['summary']['planted']} were found.",
        "",
        "| planted | found after seeds | by what |",
        "| --- | ---: | --- |",
    ]
    for row in document["rows"]:
        number = row["found_after_seeds"]
        after = f"not in {document['config']['max_seeds_a_mistake']}" if number is None else number
        what = textwrap.shorten(row["violation"] or "", MAX_SHOWN, placeholder=" ...")
        lines.append(f"| {row['planted']} | {after} | {what} |")
    return "\n".join(lines)


def _row(mistake: Mistake, plan: FaultPlan, pool: Workers, stop: Stop) -> dict[str, Any]:
    for number, result in enumerate(_in_order(pool, plan, mistake, stop), start=1):
        if result.violation is not None:
            return {
                "planted": mistake.name,
                "found_after_seeds": number,
                "violation": result.violation,
            }
    return {"planted": mistake.name, "found_after_seeds": None, "violation": None}


def _in_order(pool: Workers, plan: FaultPlan, mistake: Mistake, stop: Stop) -> Iterator[Result]:
    """The results of the first seeds with this mistake; few seeds are started in advance."""
    run = partial(run_seed, plan=plan, cores=mistake.cores)
    for first in range(0, MAX_SEEDS_A_MISTAKE, SEEDS_AT_ONCE):
        if stop.is_wanted:
            return
        seeds: Sequence[int] = range(first, min(first + SEEDS_AT_ONCE, MAX_SEEDS_A_MISTAKE))
        yield from pool.map(run, seeds, chunksize=1)


def _line(row: dict[str, Any]) -> str:
    number = row["found_after_seeds"]
    if number is None:
        return f"{row['planted']}: NOT found in {MAX_SEEDS_A_MISTAKE} seeds"
    return f"{row['planted']}: found after {number} seeds: {row['violation']}"
