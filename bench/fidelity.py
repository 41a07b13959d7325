"""`sterna bench fidelity`: how near simulations come to the points of the paper's Figure 11.

Runs every point of the figure at the paper's seed, with the paper's parameters
(`sterna.simulator.paper`), and compares latencies with the points read from the figure. All
numbers are simulated; they do not depend on the machine. Writes `bench/results/fidelity.json` and
the tables of docs/fidelity.md.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import results_io
from bench.command import ended, positive
from bench.fidelity_report import markdown, summaries
from bench.marked_text import write_marked
from bench.paper.points import paper_points
from sterna.simulator.paper import PAPER_SEED, paper_config
from sterna.simulator.runs import Job, Run, map_runs
from sterna.workload.catalog import Workload

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fidelity.md"

POLICIES = ("llumnix", "infaas++", "round-robin")
TRACES = ("S-S", "M-M", "L-L", "S-L", "L-S", "ShareGPT", "BurstGPT")

COLUMNS = (
    "request_mean_s",
    "request_p99_s",
    "prefill_mean_s",
    "prefill_p99_s",
    "decode_mean_s",
    "decode_p99_s",
    "preemption_loss_s",
)
"""What the figure shows of each point."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit code."""
    options = _parser().parse_args(arguments)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    points = [
        point
        for point in paper_points("figure11")
        if point["trace"] in options.trace and point["policy"].lower() in options.policy
    ]
    num_done = 0

    def count(_: int) -> None:
        nonlocal num_done
        num_done += 1
        print(f"\r{num_done} of {len(points)} points", end="", file=sys.stderr, flush=True)

    jobs = [_job(point) for point in points]
    measured = map_runs(jobs, measure, num_processes=options.processes, on_done=count)
    print(file=sys.stderr)
    rows = [_row(point, ours) for point, ours in zip(points, measured, strict=True)]
    summary = summaries(rows)
    config = {"seed": PAPER_SEED, "num_requests": 10_000, "num_instances": 16, "report": "stale"}
    results_io.write("fidelity", config, rows, options.folder, summary=summary)
    text = markdown(rows, summary)
    print(text)
    is_whole = set(options.trace) == set(TRACES) and set(options.policy) == set(POLICIES)
    if is_whole and options.folder.resolve() == results_io.RESULTS:
        write_marked(PAGE, "sterna bench fidelity", text)


def measure(run: Run) -> dict[str, float]:
    """The figure's numbers of a run."""
    summary = run.summary()
    assert summary.request_s is not None
    assert summary.ttft_s is not None
    assert summary.tpot_s is not None
    assert summary.preemption_loss_s is not None
    return {
        "request_mean_s": summary.request_s.mean,
        "request_p99_s": summary.request_s.p99,
        "prefill_mean_s": summary.ttft_s.mean,
        "prefill_p99_s": summary.ttft_s.p99,
        "decode_mean_s": summary.tpot_s.mean,
        "decode_p99_s": summary.tpot_s.p99,
        "preemption_loss_s": summary.preemption_loss_s.mean,
    }


def _job(point: Mapping[str, Any]) -> Job:
    trace = point["trace"]
    return Job(
        Workload(trace=trace, rate=point["request_rate"], seed=PAPER_SEED),
        paper_config(point["policy"].lower(), trace),
    )


def _row(point: Mapping[str, Any], ours: Mapping[str, float]) -> dict[str, Any]:
    """One point of the figure: of every column ours, the paper's, and the ratio of the two."""
    row: dict[str, Any] = {
        "trace": point["trace"],
        "rate": point["request_rate"],
        "policy": point["policy"].lower(),
        "n": 10_000,
    }
    for column in COLUMNS:
        paper = point[column]
        row[column] = {
            "ours": float(f"{ours[column]:.5g}"),
            "paper": paper,
            "ratio": round(ours[column] / paper, 4) if paper else None,
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
        default=results_io.RESULTS,
        help="where to write; docs/fidelity.md is written only with the default and all points",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
