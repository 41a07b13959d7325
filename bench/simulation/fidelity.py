"""`sterna bench fidelity`: accuracy of simulations against the points of the paper's Figure 11.

Runs every point of the figure at the paper's seed, with the paper's parameters
(`sterna.simulator.paper`), and compares latencies with the points read from the figure. All
numbers are simulated; they do not depend on the machine. Writes `bench/results/fidelity.json` and
the tables of docs/internals/fidelity.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.command import ended, positive
from bench.common.pages import write_marked
from bench.common.tables import Row
from bench.paper.cells import NUM_REQUESTS, Options, run_cells
from bench.paper.figures import figure11
from bench.simulation.fidelity_report import markdown, summaries
from sterna.workload.seeds import PAPER_SEED

PAGE = results_io.ROOT / "docs" / "internals" / "fidelity.md"

POLICIES = ("llumnix", "infaas++", "round-robin")
TRACES = (*figure11.GENERATED, *figure11.REAL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit code."""
    options = _parser().parse_args(arguments)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    cells = [
        cell
        for cell in figure11.cells()
        if cell.labels["trace"] in options.trace
        and str(cell.labels["policy"]).lower() in options.policy
    ]
    rows = [
        _row(ours, figure11.paper_point(ours))
        for ours in run_cells("fidelity", cells, Options(num_processes=options.processes))
    ]
    summary = summaries(rows)
    config = {
        "seed": PAPER_SEED,
        "num_requests": NUM_REQUESTS,
        "num_instances": figure11.FIGURE11.config["instances"],
        "report": figure11.FIGURE11.config["report"],
    }
    text = markdown(rows, summary)
    print(text)
    is_whole = set(options.trace) == set(TRACES) and set(options.policy) == set(POLICIES)
    if options.folder is None and not is_whole:
        print("not all points: nothing is written without --folder")
        return
    folder = options.folder or results_io.RESULTS
    results_io.write("fidelity", config, rows, folder, summary=summary)
    if is_whole and folder.resolve() == results_io.RESULTS:
        write_marked(PAGE, "sterna bench fidelity", text)


def _row(ours: Row, paper: Row) -> dict[str, Any]:
    """One point of the figure: our value, the paper's and their ratio for every metric."""
    row: dict[str, Any] = {
        "trace": ours["trace"],
        "rate": ours["request_rate"],
        "policy": ours["policy"].lower(),
        "n": ours["n"],
    }
    for metric in figure11.METRICS:
        row[metric] = {
            "ours": ours[metric],
            "paper": paper[metric],
            "ratio": round(ours[metric] / paper[metric], 4) if paper[metric] else None,
        }
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sterna bench fidelity", description=__doc__)
    parser.add_argument(
        "--trace", nargs="+", choices=TRACES, default=list(TRACES), help="only these traces"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="only these policies"
    )
    parser.add_argument("--processes", type=positive, help="runs at a time; by default one a core")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the results go (default: bench/results, of all points only)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
