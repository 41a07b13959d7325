"""Measures what the scheduler costs: a decision, a load report, a round of pairing, and how long a
front end waits for its answer, with 16 to 1,024 instances.

A row has the processor time of the scheduler's core alone, for prompts with shared prefixes that
are looked up among the prefix caches; the wait at 500 requests a second between three processes,
from the front end's question to the moment at which it has sent the request on; the share of a core
that the reports of all instances take, and how many of those arrived that were due; and, of up to
64, the processor time of a process that gets a report for each prompt, and of one that asks all
instances in place of it. `round-robin` decides without a look at anything: its wait is that of two
messages.

    sterna bench dispatch [--instances 16 64 ...] [--rounds 5] [--continue]

`bench/results/dispatch.json` is written after every row.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.machine import ForeignLoad
from bench.common.tables import Row
from bench.scheduling import report
from bench.scheduling.actor_processes import asks_row, cache_reports_row, reports_row, waits_row
from bench.scheduling.core_costs import core_row
from bench.scheduling.made_cluster import RATE
from bench.serving.comparing import add_round_options, rows_in_rounds
from bench.serving.measured import Notes
from sterna.runtime.processes.process import collect_garbage_seldom

NAME = "dispatch"

PAGE = results_io.ROOT / "docs" / "performance.md"

INSTANCES = (16, 64, 256, 1_024)

NUM_DECISIONS, WAIT_S, REPORTS_S = 2_000, 6.0, 6.0
MOST_ASKED = 64
"""With more, one question to all of them takes longer than the time between two requests."""

QUICK_DECISIONS, QUICK_S = 120, 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    # As the scheduler's process does.
    collect_garbage_seldom()
    return ended(lambda: rows_in_rounds(NAME, options, _measure, report.markdown, PAGE))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    notes = Notes()
    num_decisions = QUICK_DECISIONS if options.quick else NUM_DECISIONS
    wait_s, reports_s = (QUICK_S, QUICK_S) if options.quick else (WAIT_S, REPORTS_S)
    known = {(row["policy"], row["instances"], row["seed"]) for row in rows}
    for seed in range(1, options.rounds + 1):
        for policy in report.POLICIES:
            for num_instances in options.instances:
                if (policy, num_instances, seed) in known:
                    continue
                others = ForeignLoad()
                is_asked = policy == report.DEFAULT and num_instances <= MOST_ASKED
                row = {
                    **core_row(policy, num_instances, num_decisions, seed),
                    **waits_row(policy, num_instances, round(RATE * wait_s), seed),
                    **reports_row(policy, num_instances, reports_s, seed),
                    **(_known_caches(policy, num_instances, reports_s, seed) if is_asked else {}),
                    "foreign_cores": round(others.cores(), 2),
                    "commit": results_io.measured_commit(),
                }
                notes.say(
                    f"round {seed} of {options.rounds}: {policy}, {num_instances} instances: "
                    f"{row['decisions_per_s_per_core']:,.0f} decisions/s, "
                    f"wait {row['p50_ms']:.2f} ms, P99 {row['p99_ms']:.2f} ms"
                )
                rows.append(row)
                config = {"rate": RATE, "decisions": num_decisions, "rounds": options.rounds}
                results_io.write(NAME, config, rows, folder, summary=report.summary(rows))


def _known_caches(policy: str, num_instances: int, duration_s: float, seed: int) -> Row:
    """The cost of either way to know what prefix caches have."""
    return {
        **cache_reports_row(policy, num_instances, duration_s, seed),
        **asks_row(num_instances, duration_s, seed),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="Measure the scheduler's decisions, reports and rounds, with few and with many "
        "instances.",
        epilog="docs/performance.md explains what is measured.",
    )
    parser.add_argument(
        "--instances",
        type=positive,
        nargs="+",
        default=list(INSTANCES),
        metavar="N",
        help="their numbers (default: 16 64 256 1024)",
    )
    add_round_options(parser, quick="few decisions, as a check")
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
