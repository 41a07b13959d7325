"""The options of `sterna serve` about what it takes from its clients."""

import argparse
import math
from argparse import Namespace
from typing import Any

from sterna.config import DoorConfig
from sterna.errors import ConfigurationError

MIB = 1 << 20


def add_door_options(group: Any) -> None:
    """Add the options to a group of the parser of `sterna serve`."""
    default = DoorConfig()
    group.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        default=default.max_queued_requests,
        help="while so many requests (each prompt, and each choice of n, is one) wait for their "
        "first token, further ones are answered 429, those above the normal class a tenth later; "
        "0: any number may wait (default: %(default)s)",
    )
    group.add_argument(
        "--max-body-mib",
        type=float,
        metavar="MIB",
        default=default.max_body_bytes / MIB,
        help="a request of more is answered 413 (default: %(default)g)",
    )
    group.add_argument(
        "--max-waiting-body-mib",
        type=float,
        default=argparse.SUPPRESS,
        metavar="MIB",
        help="while requests whose answers have not begun have so much together at one front end, "
        f"further ones are answered 429 (default: {default.max_waiting_body_bytes / MIB:g}, or "
        "--max-body-mib, where that is more)",
    )
    group.add_argument(
        "--reader-timeout",
        type=float,
        metavar="SECONDS",
        default=default.reader_timeout_s,
        help="a client that takes less than 48 KiB of what is there for it in so long is cut off "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--resumable-streams",
        action="store_true",
        help="clients whose connection broke may read their streams on, by X-Request-Id and "
        "Last-Event-ID, at any front end; with several, also when the one that had the stream died",
    )
    group.add_argument(
        "--resume-window",
        type=float,
        metavar="SECONDS",
        default=60.0,
        help="how long streams are kept for clients to come back (default: %(default)g)",
    )


def door_config(args: Namespace) -> DoorConfig:
    """Return what front ends take from their clients.

    Raises:
        ConfigurationError: a value cannot work.
    """
    if args.max_queued_requests < 0:
        raise ConfigurationError(
            f"--max-queued-requests must be at least 0, not {args.max_queued_requests}"
        )
    if not 0 < args.max_body_mib < math.inf:
        raise ConfigurationError(f"--max-body-mib must be positive, not {args.max_body_mib:g}")
    max_body_bytes = math.ceil(args.max_body_mib * MIB)
    max_waiting_bytes = max(max_body_bytes, DoorConfig().max_waiting_body_bytes)
    if (waiting_mib := getattr(args, "max_waiting_body_mib", None)) is not None:
        if not args.max_body_mib <= waiting_mib < math.inf:
            raise ConfigurationError(
                "--max-waiting-body-mib must be at least --max-body-mib "
                f"({args.max_body_mib:g}), not {waiting_mib:g}"
            )
        max_waiting_bytes = math.ceil(waiting_mib * MIB)
    if not args.reader_timeout > 0:
        raise ConfigurationError(f"--reader-timeout must be positive, not {args.reader_timeout:g}")
    if not args.resume_window > 0:
        raise ConfigurationError(f"--resume-window must be positive, not {args.resume_window:g}")
    return DoorConfig(
        max_queued_requests=args.max_queued_requests or None,
        max_body_bytes=max_body_bytes,
        max_waiting_body_bytes=max_waiting_bytes,
        reader_timeout_s=args.reader_timeout,
        resume_window_s=args.resume_window if args.resumable_streams else None,
    )
