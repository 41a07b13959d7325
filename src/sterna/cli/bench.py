"""`sterna bench NAME`: runs a benchmark of the source checkout."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sterna.errors import ConfigurationError
from sterna.runtime.protection import protect_ray

BENCHMARKS = {
    "migration": "downtime and cost of migrations between two real instances",
    "fidelity": "how near simulations come to the points of the paper's Figure 11",
    "simulator": "how fast simulations run",
}


def add_commands(commands: Any) -> None:
    """Add `bench` to the parser's subcommands."""
    bench = commands.add_parser(
        "bench",
        help="measure, and write bench/results",
        epilog="; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
    )
    bench.add_argument("name", choices=list(BENCHMARKS), metavar="NAME", help="which one")
    bench.add_argument(
        "options", nargs=argparse.REMAINDER, help="its own options; --help lists them"
    )
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    """Become the benchmark's process.

    Raises:
        ConfigurationError: this is no source checkout.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / f"{args.name}.py").is_file():
        raise ConfigurationError(
            "benchmarks are not installed with sterna: run this from the .venv of a source checkout"
        )
    protect_ray(os.environ)
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, "-m", f"bench.{args.name}", *args.options])
