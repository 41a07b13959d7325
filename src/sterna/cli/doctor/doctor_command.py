"""Options of `sterna doctor`; what it does is imported only when it runs."""

import argparse
from typing import Any

DEFAULT_INSTANCES = 2
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


def add_commands(commands: Any) -> None:
    """Add `doctor` to the parser's subcommands."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, and say how to fix what is wrong",
        description="Checks Python, vLLM, GPUs, memory, files, the port and the model for a "
        "server with these options. Exit status 1 where something keeps `sterna serve` from "
        "working.",
    )
    doctor.add_argument(
        "model", nargs="?", metavar="MODEL", help="the model to serve (default: the small model)"
    )
    doctor.add_argument(
        "--instances",
        type=_positive,
        default=DEFAULT_INSTANCES,
        metavar="N",
        help="as for `sterna serve` (default: %(default)s)",
    )
    doctor.add_argument(
        "--gpus-per-instance",
        type=_positive,
        default=1,
        metavar="N",
        help="product of tensor and pipeline parallelism (default: %(default)s)",
    )
    doctor.add_argument("--host", default=DEFAULT_HOST, help="default: %(default)s")
    doctor.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--repair",
        action="store_true",
        help="first remove packages that break the import of vLLM's CPU build, as a plain "
        "`pip install` may bring them",
    )
    doctor.set_defaults(run=_doctor)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _doctor(args: argparse.Namespace) -> int:
    from sterna.cli.doctor.doctor_report import run

    return run(args)
