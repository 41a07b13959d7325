"""The options of `sterna serve` about instances that fail."""

from argparse import Namespace
from typing import Any

from sterna.config import WatchConfig


def add_failure_options(group: Any) -> None:
    """Add the options to a group of the parser of `sterna serve`."""
    default = WatchConfig()
    group.add_argument(
        "--instance-timeout",
        type=float,
        metavar="SECONDS",
        default=default.instance_timeout_s,
        help="an instance of which nothing is heard for so long is killed and replaced, although "
        "its process runs; one whose process died or is stopped is noticed at once (default: "
        "%(default)g)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        default=default.step_timeout_s,
        help="an instance whose engine has work, and ends no step for so long, is killed and "
        "replaced; must be longer than your longest step (default: %(default)g)",
    )
    group.add_argument(
        "--instance-lease",
        type=float,
        metavar="SECONDS",
        default=default.lease_s,
        help="an instance on another node that has not heard from the supervisor for so long ends "
        "itself; its requests go on elsewhere then. Must be longer than a supervisor's successor "
        "takes (default: %(default)g)",
    )


def watch_config(args: Namespace) -> WatchConfig:
    """Return when an instance is given up.

    Raises:
        ConfigurationError: a value is too small.
    """
    return WatchConfig(
        instance_timeout_s=args.instance_timeout,
        step_timeout_s=args.step_timeout,
        lease_s=args.instance_lease,
    )
