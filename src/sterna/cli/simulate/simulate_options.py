"""The options of `sterna simulate`, with their defaults; imports nothing that takes time."""

import argparse
from pathlib import Path
from typing import Any

from sterna.cli.options.option_tables import Option, OptionTable, add_options
from sterna.cli.options.option_values import bounds, count, positive
from sterna.cli.simulate.workload_options import add_workload_options
from sterna.policy.presets import PRESETS

DEFAULT_POLICY = "sterna"
PAPER_POLICY = "llumnix"
DEFAULT_PROFILE = "a10-llama-7b"
DEFAULT_NUM_INSTANCES = 16

FRAGMENTATION_INTERVAL_S = 1.0
"""Sampling changes no other result; the paper's runs are sampled with it as well."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

SETTINGS = OptionTable(
    None,
    (
        Option(
            "--report",
            "state that the scheduler knows when it decides: the current one, or that at the "
            "beginning of each instance's current step, or of its last step",
            field="report",
            metavar="live|step|stale",
        ),
        Option(
            "--queue-demand",
            "queuing requests that have a virtual usage: the head of the line, or all",
            field="policy.queue_demand",
            metavar="head|all",
        ),
        Option(
            "--victim",
            "request of a source that moves first",
            field="policy.victim",
            metavar="shortest|longest|last-started|freeing",
        ),
        Option(
            "--source-threshold",
            "freeness in decode steps below which an instance is a migration source",
            field="policy.source_freeness_steps",
            metavar="STEPS",
        ),
        Option(
            "--destination-threshold",
            "freeness in decode steps above which an instance is a migration destination",
            field="policy.destination_freeness_steps",
            metavar="STEPS",
        ),
        Option(
            "--interval",
            "time between two pairing rounds",
            field="policy.round_interval_s",
            metavar="SECONDS",
        ),
        Option(
            "--concurrency",
            "number of migrations out of an instance, and into it, at the same time",
            field="policy.num_concurrent_migrations",
            metavar="N",
        ),
        Option(
            "--watermark",
            "fraction of the blocks that an admission leaves free",
            field="engine.watermark",
            metavar="FRACTION",
        ),
        Option(
            "--engine-mode",
            "content of one step: whole prompts or decodes, or decodes and chunks of prompts",
            field="engine.step_mode",
            metavar="prefill-first|chunked",
        ),
        Option(
            "--scale-low",
            "average freeness below which instances are added",
            field="scaling.low_freeness_steps",
            metavar="STEPS",
        ),
        Option(
            "--scale-high",
            "average freeness above which an instance is terminated",
            field="scaling.high_freeness_steps",
            metavar="STEPS",
        ),
        Option(
            "--scale-period",
            "time for which the average must stay outside before each decision",
            field="scaling.period_s",
            metavar="SECONDS",
        ),
        Option(
            "--scale-begin",
            "time before which no instance is added or terminated",
            field="scaling_begins_s",
            metavar="SECONDS",
        ),
        Option(
            "--start-delay",
            "time from the decision to add an instance until it can serve",
            field="start_delay_s",
            metavar="SECONDS",
        ),
    ),
)
"""Options that are names for a setting; `field` is its name for `--set`."""


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_workload_options(
        parser.add_argument_group("workload"),
        longest="what one instance can hold",
        has_several_seeds=True,
    )
    _add_cluster_options(parser.add_argument_group("cluster"))
    settings = parser.add_argument_group("assumptions (defaults: the policy's and the profile's)")
    add_options(settings, SETTINGS)
    settings.add_argument(
        "--bandwidth",
        type=positive,
        metavar="TOKENS/S",
        help="bandwidth of copies between instances, in tokens of KV cache per second",
    )
    settings.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="any other field of the configuration; --list shows them; may be repeated",
    )
    _add_output_options(parser.add_argument_group("output"))


def _add_cluster_options(group: Any) -> None:
    group.add_argument(
        "--policy",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(PRESETS)}; FILE.py:CLASS for one of your own; a variant as in "
        "llumnix:victim=longest,interval=1 "
        f"(default: {DEFAULT_POLICY}; with --paper {PAPER_POLICY})",
    )
    group.add_argument(
        "--instances", type=count, default=DEFAULT_NUM_INSTANCES, metavar="N",
        help=f"number of instances at the start (default: {DEFAULT_NUM_INSTANCES})",
    )  # fmt: skip
    group.add_argument(
        "--profile", metavar="NAME",
        help=f"engine and hardware: a name (--list) or a file (default: {DEFAULT_PROFILE})",
    )  # fmt: skip
    group.add_argument(
        "--auto-scaling", type=bounds, metavar="MIN:MAX",
        help="add and terminate instances within these bounds",
    )  # fmt: skip
    group.add_argument(
        "--paper",
        action="store_true",
        help="the rules and parameters of the paper's own runs, in place of the defaults",
    )


def _add_output_options(group: Any) -> None:
    group.add_argument("--json", action="store_true", help="print only JSON")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw latencies and memory; .png, .svg or .pdf"
    )
    group.add_argument(
        "--record", type=Path, metavar="FILE", help="record one run, for `sterna replay`"
    )
    group.add_argument(
        "--record-interval",
        type=positive,
        default=1.0,
        metavar="SECONDS",
        help="simulated time between two frames of the recording (default: %(default)g)",
    )
    group.add_argument(
        "--baseline", metavar="NAME", help="policy to which ratios refer (default: the first)"
    )
    group.add_argument(
        "--processes",
        type=count,
        metavar="N",
        help="number of runs at the same time (default: one per core)",
    )
    group.add_argument(
        "--list", action="store_true", help="list traces, profiles, policies and settings"
    )
