"""The options of `sterna serve` about how many instances there are."""

import argparse
import itertools
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sterna.config import ScalingConfig
from sterna.engine.vllm.guard import is_cpu_build
from sterna.errors import ConfigurationError

DEFAULT_INSTANCES = 2
DEFAULT_COOLDOWN_S = 30.0
DEFAULT_DRAIN_TIMEOUT_S = 120.0

_FIELDS = {
    "min_instances": "min_instances",
    "max_instances": "max_instances",
    "scale_up_freeness": "low_freeness_steps",
    "scale_down_freeness": "high_freeness_steps",
    "scaling_period": "period_s",
    "scaling_cooldown": "cooldown_s",
}
"""Options of auto-scaling, with the fields of its configuration."""


def add_scaling_options(group: Any) -> None:
    """Add the options to a group of the parser of `sterna serve`."""
    default = ScalingConfig()
    group.add_argument(
        "--instances",
        type=int,
        default=argparse.SUPPRESS,
        help="engine instances, with auto-scaling those at the start (default: "
        f"{DEFAULT_INSTANCES}; with auto-scaling --min-instances)",
    )
    group.add_argument(
        "--max-instances",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="add and end instances as the load demands, up to so many",
    )
    group.add_argument(
        "--min-instances",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"never fewer (default: {default.min_instances})",
    )
    for option, metavar, value, text in (
        ("--scale-up-freeness", "STEPS", default.low_freeness_steps, "average freeness in decode "
         "steps below which instances are added"),
        ("--scale-down-freeness", "STEPS", default.high_freeness_steps, "average freeness above "
         "which an instance is ended"),
        ("--scaling-period", "SECONDS", default.period_s, "how long the average must stay "
         "outside before each decision; requests that no instance can take do not wait for it"),
        ("--scaling-cooldown", "SECONDS", DEFAULT_COOLDOWN_S, "after a decision no instance is "
         "ended for so long"),
    ):  # fmt: skip
        group.add_argument(
            option,
            type=float,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=f"{text} (default: {value:g})",
        )
    group.add_argument(
        "--warm-instances",
        type=int,
        metavar="N",
        default=0,
        help="further instances that are up without requests, to serve at once when needed",
    )
    group.add_argument(
        "--fork-server",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="import vLLM once, and fork instances from that process, which starts them sooner "
        "(default: on CPU yes, on CUDA no)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_DRAIN_TIMEOUT_S,
        help="what is still on an instance that has been emptied for so long, because no other has "
        "the memory, goes on elsewhere from its tokens (default: %(default)g)",
    )
    group.add_argument(
        "--cpus-per-instance",
        type=float,
        metavar="CPUS",
        default=0.0,
        help="asked of Ray for each instance, which waits where no node has them; 0: any share",
    )


def wants_fork_server(arguments: Sequence[str]) -> bool:
    """Return whether vLLM is to be imported once for all processes; asked before the options are
    read, which needs that import itself."""
    # As vLLM reads them: what is typed overrules the file.
    options = [*_switches_in_file(arguments), *arguments]
    choices = [each for each in options if each in ("--fork-server", "--no-fork-server")]
    # On CUDA a fork has not been tried: the driver's state must not have been touched before.
    return choices[-1] == "--fork-server" if choices else is_cpu_build()


def _switches_in_file(arguments: Sequence[str]) -> list[str]:
    """Return the switches that the file of `--config` turns on."""
    paths = [path for option, path in itertools.pairwise(arguments) if option == "--config"]
    paths += [each.removeprefix("--config=") for each in arguments if each.startswith("--config=")]
    try:
        content = yaml.safe_load(Path(paths[0]).read_text("utf-8")) if paths else {}
    except (OSError, ValueError, yaml.YAMLError):
        # Whoever reads the options says so.
        return []
    options = content if isinstance(content, dict) else {}
    return [f"--{name}".replace("_", "-") for name, value in options.items() if value is True]


def scaling_config(args: Namespace) -> ScalingConfig | None:
    """Return how the number of instances follows the load; None: it does not.

    Raises:
        ConfigurationError: the options contradict each other.
    """
    given = {name: field for name, field in _FIELDS.items() if name in args}
    if not given:
        return None
    if "max_instances" not in given:
        name = next(iter(given)).replace("_", "-")
        raise ConfigurationError(f"--{name} is for auto-scaling: give --max-instances as well")
    values: dict[str, Any] = {"cooldown_s": DEFAULT_COOLDOWN_S}
    values.update({field: getattr(args, name) for name, field in given.items()})
    try:
        return ScalingConfig(**values)
    except ConfigurationError as error:
        raise ConfigurationError(_in_options(str(error))) from None


def num_instances(args: Namespace, scaling: ScalingConfig | None) -> int:
    """Return how many instances are started at first."""
    default = DEFAULT_INSTANCES if scaling is None else scaling.min_instances
    return int(getattr(args, "instances", default))


def _in_options(message: str) -> str:
    """The message with the names of options in place of those of fields."""
    for name, field in _FIELDS.items():
        message = message.replace(field, f"--{name.replace('_', '-')}")
    return message
