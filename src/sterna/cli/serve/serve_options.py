"""The options of `sterna serve`, and the cluster that they describe."""

import argparse
from argparse import Namespace
from dataclasses import replace

from sterna.cli.options.option_tables import Option, OptionTable, add_options, given, naming
from sterna.cli.serve.cluster_address import TRANSPORT, transport_config
from sterna.cli.serve.door_options import DOOR, door_config
from sterna.cli.serve.engine_options import gpus_of, share_cores, share_memory
from sterna.cli.serve.priority_options import PRIORITIES, with_classes
from sterna.cli.serve.scaling_options import INSTANCES, SCALING, num_instances, scaling_config
from sterna.cli.simulate.simulate_options import DEFAULT_PROFILE
from sterna.config import (
    ClusterConfig,
    FrontendConfig,
    LlumletConfig,
    OnInstanceFailure,
    PolicyConfig,
    WatchConfig,
)
from sterna.policy.presets import PRESETS, STERNA
from sterna.policy_file import policy_named

ENGINE = OptionTable(
    None,
    (
        Option(
            "--engine",
            "engine of the instances: vLLM, or an emulated engine, which computes nothing, takes "
            "the time of measured hardware, and answers with tokens that a client can check; for "
            "experiments also vLLM with steps that last as long as on measured hardware",
            choices=("vllm", "emulated", "paced"),
            default="vllm",
        ),
        Option(
            "--profile",
            "hardware and model whose speed is taken",
            metavar="NAME|FILE",
            unless_given=f"{DEFAULT_PROFILE}, the paper's",
        ),
    ),
)

SERVERS = OptionTable(
    ClusterConfig,
    (
        Option(
            "--frontends",
            "number of API server processes",
            field="num_frontends",
            type=int,
            metavar="N",
        ),
        Option(
            "--sterna-log-level",
            "level of Sterna's own log",
            field="log_level",
            choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        ),
    ),
)

POLICY = OptionTable(
    PolicyConfig,
    (
        Option(
            "--policy",
            f"scheduling policy: {', '.join(PRESETS)}, or FILE.py:CLASS for one of your own",
            metavar="NAME",
            default="sterna",
        ),
        Option(
            "--late-binding",
            "hold requests at the scheduler until an instance has memory for them, small ones "
            "before large ones that came a little earlier",
            field="binds_late",
            action=argparse.BooleanOptionalAction,
            unless_given="the policy's",
        ),
        Option(
            "--no-migration",
            "do not move requests automatically; `sterna migrate` still does",
            action="store_true",
            default=False,
        ),
        Option(
            "--migration-threshold",
            "freeness, in decode steps, below which an instance gives requests away and above "
            "which it takes them",
            field="source_freeness_steps",
            type=float,
            metavar="STEPS",
            unless_given="the policy's",
        ),
        Option(
            "--migration-interval",
            "time between two pairing rounds",
            field="round_interval_s",
            type=float,
            metavar="SECONDS",
            unless_given="the policy's",
        ),
        Option(
            "--migration-concurrency",
            "number of migrations out of an instance, and into it, at the same time",
            field="num_concurrent_migrations",
            type=int,
            metavar="N",
            unless_given="the policy's",
        ),
    ),
)

LLUMLET = OptionTable(
    LlumletConfig,
    (
        Option(
            "--drain-timeout",
            "after this time, requests that are still on a terminating instance, because no other "
            "has the memory for them, continue elsewhere: their KV cache is computed again",
            field="drain_limit_s",
            type=float,
            metavar="SECONDS",
            default=120.0,
        ),
    ),
)

FAILURES = OptionTable(
    WatchConfig,
    (
        Option(
            "--on-instance-failure",
            "what happens to the requests of an instance that dies: they continue elsewhere after "
            "the tokens that their clients have, or they fail, as in the paper",
            choices=tuple(each.value for each in OnInstanceFailure),
            default=FrontendConfig().on_instance_failure.value,
        ),
        Option(
            "--instance-timeout",
            "kill and replace an instance that is silent for this time although its process runs; "
            "one whose process died or is stopped is noticed at once",
            field="instance_timeout_s",
            type=float,
            metavar="SECONDS",
        ),
        Option(
            "--step-timeout",
            "kill and replace an instance whose engine has work and completes no step in this "
            "time, which must be longer than your longest step",
            field="step_timeout_s",
            type=float,
            metavar="SECONDS",
        ),
        Option(
            "--instance-lease",
            "an instance on another node that does not reach the supervisor for this time ends "
            "itself, and its requests continue elsewhere; must be longer than a new supervisor "
            "needs to take over",
            field="lease_s",
            type=float,
            metavar="SECONDS",
        ),
    ),
)

TABLES = (
    *(ENGINE, SERVERS, INSTANCES, SCALING, POLICY, PRIORITIES),
    *(TRANSPORT, LLUMLET, DOOR, FAILURES),
)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add Sterna's options to the parser of `vllm serve`."""
    group = parser.add_argument_group("Sterna", "Instances, scheduling and live migration.")
    for table in TABLES:
        add_options(group, table)
    # None until `settle_classes` knows whether the policy has priorities.
    parser.set_defaults(scheduling_policy=None)


def cluster_config(args: Namespace) -> ClusterConfig:
    """Return the configuration of the cluster to start.

    Raises:
        ConfigurationError: the values contradict each other or the machine.
    """
    with naming(*TABLES):
        config = _cluster_config(args)
    if config.num_gpus_per_instance == 0 and args.emulated is None:
        scaling = config.scaling
        most = config.num_instances if scaling is None else scaling.max_instances
        options = "--instances" if scaling is None else "--max-instances"
        if config.num_warm_instances:
            options += ", --warm-instances"
        share_memory(args, most + config.num_warm_instances, options)
        share_cores(args, most + config.num_warm_instances)
    return config


def _cluster_config(args: Namespace) -> ClusterConfig:
    scaling = scaling_config(args)
    on_failure = OnInstanceFailure(args.on_instance_failure)
    instances = {**given(INSTANCES, args), "num_instances": num_instances(args, scaling)}
    return ClusterConfig(
        llumlet=LlumletConfig(
            policy=_policy_config(args),
            hands_back=on_failure is OnInstanceFailure.CONTINUE,
            **given(LLUMLET, args),
        ),
        transport=transport_config(args),
        frontend=FrontendConfig(door=door_config(args), on_instance_failure=on_failure),
        num_gpus_per_instance=0 if args.emulated is not None else gpus_of(args),
        scaling=scaling,
        watch=WatchConfig(**given(FAILURES, args)),
        **given(SERVERS, args),
        **instances,
    )


def _policy_config(args: Namespace) -> PolicyConfig:
    changes = given(POLICY, args)
    if "source_freeness_steps" in changes:
        # One threshold separates sources from destinations.
        changes["destination_freeness_steps"] = changes["source_freeness_steps"]
    if args.no_migration:
        changes["migrates"] = False
    policy = policy_named(args.policy)
    if changes.get("binds_late") and policy.reserves_after_s is None:
        # Without a limit, smaller requests could go before a large one for ever.
        changes["reserves_after_s"] = STERNA.reserves_after_s
    return with_classes(replace(policy, **changes), args.classes)
