"""The options of `sterna serve` for the number of instances."""

import argparse
import itertools
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import yaml

from sterna.cli.options.option_tables import Option, OptionTable, given, naming
from sterna.config import ClusterConfig, ScalingConfig
from sterna.engine.vllm.guard import is_cpu_build
from sterna.errors import ConfigurationError

DEFAULT_INSTANCES = 2
DEFAULT_COOLDOWN_S = 30.0

INSTANCES = OptionTable(
    ClusterConfig,
    (
        Option(
            "--instances",
            "number of engine instances; with auto-scaling, the number at the start",
            field="num_instances",
            type=int,
            metavar="N",
            unless_given=f"{DEFAULT_INSTANCES}; with auto-scaling --min-instances",
        ),
        Option(
            "--warm-instances",
            "number of further instances that are started without requests, to serve at once when "
            "one is needed",
            field="num_warm_instances",
            type=int,
            metavar="N",
        ),
        Option(
            "--cpus-per-instance",
            "CPUs that Ray reserves for each instance, which waits for a node that has them; 0: "
            "none are reserved",
            field="cpus_per_instance",
            type=float,
            metavar="CPUS",
        ),
        Option(
            "--fork-server",
            "import vLLM once, in a process from which instances are forked: they start sooner",
            action=argparse.BooleanOptionalAction,
            unless_given="on CPU yes, on CUDA no",
        ),
    ),
)

_SCALING = ScalingConfig()

SCALING = OptionTable(
    ScalingConfig,
    (
        Option(
            "--max-instances",
            "add and terminate instances as the load demands, up to this number",
            field="max_instances",
            type=int,
            metavar="N",
            unless_given="no auto-scaling",
        ),
        Option(
            "--min-instances",
            "smallest number of instances with auto-scaling",
            field="min_instances",
            type=int,
            metavar="N",
            unless_given=f"{_SCALING.min_instances}",
        ),
        Option(
            "--scale-up-freeness",
            "average freeness, in decode steps, below which instances are added",
            field="low_freeness_steps",
            type=float,
            metavar="STEPS",
            unless_given=f"{_SCALING.low_freeness_steps:g}",
        ),
        Option(
            "--scale-down-freeness",
            "average freeness, in decode steps, above which an instance is terminated",
            field="high_freeness_steps",
            type=float,
            metavar="STEPS",
            unless_given=f"{_SCALING.high_freeness_steps:g}",
        ),
        Option(
            "--scaling-period",
            "how long the average must stay outside these bounds before each decision; requests "
            "that no instance can take do not wait for it",
            field="period_s",
            type=float,
            metavar="SECONDS",
            unless_given=f"{_SCALING.period_s:g}",
        ),
        Option(
            "--scaling-cooldown",
            "time without terminations after a decision and after the last start that it caused",
            field="cooldown_s",
            type=float,
            metavar="SECONDS",
            unless_given=f"{DEFAULT_COOLDOWN_S:g}",
        ),
    ),
)
"""The namespace has only the options that were given: --max-instances turns auto-scaling on."""


def wants_fork_server(arguments: Sequence[str]) -> bool:
    """Return whether vLLM is to be imported once for all processes. Called before the options are
    parsed, since the parser itself needs that import."""
    # As in vLLM, the command line overrides the file.
    options = [each.replace("_", "-") for each in (*_switches_in_file(arguments), *arguments)]
    choices = [each for each in options if each in ("--fork-server", "--no-fork-server")]
    # Forks have not been tested on CUDA, whose driver must not be initialized before a fork.
    return choices[-1] == "--fork-server" if choices else is_cpu_build()


def _switches_in_file(arguments: Sequence[str]) -> list[str]:
    """Return the switches that the file of `--config` turns on or off."""
    paths = [path for option, path in itertools.pairwise(arguments) if option == "--config"]
    paths += [each.removeprefix("--config=") for each in arguments if each.startswith("--config=")]
    try:
        content = yaml.safe_load(Path(paths[0]).read_text("utf-8")) if paths else {}
    except (OSError, ValueError, yaml.YAMLError):
        # The parser of the options reports it.
        return []
    options = content if isinstance(content, dict) else {}
    return [
        f"--{name}" if value else f"--no-{name}"
        for name, value in options.items()
        if isinstance(value, bool)
    ]


def scaling_config(args: Namespace) -> ScalingConfig | None:
    """Return the configuration of auto-scaling; None without auto-scaling.

    Raises:
        ConfigurationError: the options contradict each other.
    """
    values = given(SCALING, args)
    if not values:
        return None
    if "max_instances" not in values:
        name = next(each.name for each in SCALING.options if each.dest in args)
        raise ConfigurationError(f"{name} is for auto-scaling: give --max-instances as well")
    with naming(SCALING):
        return ScalingConfig(**{"cooldown_s": DEFAULT_COOLDOWN_S, **values})


def num_instances(args: Namespace, scaling: ScalingConfig | None) -> int:
    """Return the number of instances at the start."""
    default = DEFAULT_INSTANCES if scaling is None else scaling.min_instances
    return int(getattr(args, "instances", default))
