"""The options of `sterna simulate`, with their defaults; imports nothing that takes time."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sterna.cli.option_values import bounds, count, positive
from sterna.cli.simulate.workload_options import add_workload_options
from sterna.policy.presets import PRESETS

DEFAULT_POLICY = "sterna"
PAPER_POLICY = "llumnix"
DEFAULT_PROFILE = "a10-llama-7b"
DEFAULT_NUM_INSTANCES = 16

FRAGMENTATION_INTERVAL_S = 1.0
"""Sampling changes nothing else; the paper's runs are sampled, too, when one looks at them."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

SETTINGS: Sequence[tuple[str, str, str, str]] = (
    ("--report", "report", "live|step|stale", "what the scheduler knows when it decides: the "
     "state of this moment, or that at the beginning of each instance's step under way, or of its "
     "last one"),
    ("--queue-demand", "policy.queue_demand", "head|all", "which queuing requests have a virtual "
     "usage: the head of the line, or all"),
    ("--victim", "policy.victim", "shortest|longest|last-started", "which request of a source "
     "moves first"),
    ("--source-threshold", "policy.source_freeness_steps", "STEPS", "freeness in decode steps "
     "below which an instance is a migration source"),
    ("--destination-threshold", "policy.destination_freeness_steps", "STEPS", "freeness in "
     "decode steps above which an instance is a migration destination"),
    ("--interval", "policy.round_interval_s", "SECONDS", "time between two pairing rounds"),
    ("--concurrency", "policy.num_concurrent_migrations", "N", "migrations that one instance "
     "takes part in at once, a side"),
    ("--watermark", "engine.watermark", "FRACTION", "of the blocks, those that an admission "
     "leaves free"),
    ("--engine-mode", "engine.step_mode", "prefill-first|chunked", "what one step may hold: "
     "whole prompts or decodes, or decodes and chunks of prompts"),
    ("--scale-low", "scaling.low_freeness_steps", "STEPS", "average freeness below which "
     "instances are added"),
    ("--scale-high", "scaling.high_freeness_steps", "STEPS", "average freeness above which an "
     "instance is terminated"),
    ("--scale-period", "scaling.period_s", "SECONDS", "how long the average must stay outside "
     "before each decision"),
    ("--scale-begin", "scaling_begins_s", "SECONDS", "no instance is added or terminated before"),
    ("--start-delay", "start_delay_s", "SECONDS", "from the decision to add an instance until "
     "it can serve"),
)  # fmt: skip
"""Options that are names for a setting: (option, key, values, help)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_workload_options(
        parser.add_argument_group("workload"),
        longest="what one instance can hold",
        has_several_seeds=True,
    )
    _add_cluster_options(parser.add_argument_group("cluster"))
    settings = parser.add_argument_group("assumptions (defaults: the policy's and the profile's)")
    for option, _, values, text in SETTINGS:
        settings.add_argument(option, metavar=values, help=text)
    settings.add_argument(
        "--bandwidth",
        type=positive,
        metavar="TOKENS/S",
        help="of copies between instances, in tokens of KV cache a second",
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
        help=f"{', '.join(PRESETS)}; a variant as in llumnix:victim=longest,interval=1 "
        f"(default: {DEFAULT_POLICY}; with --paper {PAPER_POLICY})",
    )
    group.add_argument(
        "--instances", type=count, default=DEFAULT_NUM_INSTANCES, metavar="N",
        help=f"at the start (default: {DEFAULT_NUM_INSTANCES})",
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
    group.add_argument("--json", action="store_true", help="print JSON and nothing else")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw latencies and memory; .png, .svg or .pdf"
    )
    group.add_argument(
        "--baseline", metavar="NAME", help="the policy of the ratios (default: the first)"
    )
    group.add_argument(
        "--processes", type=count, metavar="N", help="runs at once (default: one a core)"
    )
    group.add_argument(
        "--list", action="store_true", help="list traces, profiles, policies and settings"
    )
