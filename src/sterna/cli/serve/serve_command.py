"""`sterna serve`: vLLM's options and Sterna's, checked before anything is started."""

import argparse
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sterna.cli.serve.class_files import add_class_options, settle_classes, with_classes
from sterna.cli.serve.cluster_address import (
    add_cluster_options,
    cluster_address,
    internal_host,
    transport_config,
)
from sterna.cli.serve.door_options import add_door_options, door_config
from sterna.cli.serve.engine_options import (
    SMALL_MODEL_NAME,
    checked_engine_config,
    choose_model,
    gpus_of,
    share_memory,
    world_size,
)
from sterna.cli.serve.failure_options import add_failure_options, watch_config
from sterna.cli.serve.scaling_options import (
    add_scaling_options,
    num_instances,
    scaling_config,
    wants_fork_server,
)
from sterna.cli.serve.target_load import with_target_load
from sterna.cli.serve.tls_options import check_tls
from sterna.cli.simulate.simulate_options import DEFAULT_PROFILE
from sterna.config import (
    ClusterConfig,
    FrontendConfig,
    LlumletConfig,
    MigrationConfig,
    OnInstanceFailure,
    TransportConfig,
)
from sterna.engine.vllm.guard import is_cpu_build, vllm_imports
from sterna.errors import ConfigurationError
from sterna.policy.presets import PRESETS, preset
from sterna.runtime.gcs_patience import wait_for_gcs
from sterna.runtime.noise import VLLM_LOG_LEVEL, drop_noise, library_environment, log_environment
from sterna.runtime.protection import protect_ray

_OPTIONS = {
    "bandwidth_share": "--migration-bandwidth-share",
    "cpus-per-instance": "--cpus-per-instance",
    "drain_limit_s": "--drain-timeout",
    "frontends": "--frontends",
    "instances": "--instances",
    "num_concurrent_migrations": "--migration-concurrency",
    "round_interval_s": "--migration-interval",
    "source_freeness_steps": "--migration-threshold",
    "warm-instances": "--warm-instances",
}
"""What users call the values of a cluster's configuration."""


def serve(arguments: Sequence[str]) -> int:
    """Run `sterna serve`; returns the exit status when the server has ended.

    Raises:
        ConfigurationError: an option cannot work; nothing was started.
    """
    environment = engine_environment()
    address = cluster_address(arguments)
    # Whatever is started from here inherits these; some are read when a process starts.
    os.environ.update(environment)
    os.environ.update(log_environment(os.environ, sys.stderr.isatty()))
    protect_ray(os.environ, is_shared=address is not None)
    wait_for_gcs(os.environ)
    if address is not None:
        os.environ.update(address.environment())
    if any(option.startswith(("-h", "--help")) for option in arguments):
        # Prints it and raises SystemExit: nothing needs to be started for that.
        parse(arguments)
    from sterna.runtime.launch import Run

    def read() -> tuple[ClusterConfig, Namespace]:
        args = parse(arguments)
        config = replace(cluster_config(args), internal_host=internal_host(args, address))
        _check_port(args.host, args.port)
        check_tls(args)
        engine = checked_engine_config(args)
        return with_target_load(config, args, engine), args

    host = None if address is None else address.host
    has_fork_server = wants_fork_server(arguments)
    with Run(environment, has_fork_server=has_fork_server, cluster_host=host) as run:
        return run.read_and_serve(read)


def parse(
    arguments: Sequence[str], add_more: Callable[[argparse.ArgumentParser], None] | None = None
) -> Namespace:
    """Return the options of `sterna serve [MODEL] ...`, vLLM's and ours.

    Args:
        add_more: adds the options of another command that takes those of `serve`.

    Raises:
        ConfigurationError: an option's value cannot work.
        SystemExit: help was asked for, and printed.
    """
    drop_noise()
    with vllm_imports():
        from sterna.engine.vllm.arguments import make_serve_parser, parse_serve, validate

    parser, serve_parser = make_serve_parser()
    _add_options(serve_parser)
    if add_more is not None:
        add_more(serve_parser)
    args = parse_serve(parser, serve_parser, list(arguments), SMALL_MODEL_NAME)
    choose_model(args)
    _refuse_unhonoured(args)
    settle_classes(args)
    args.emulated = None
    if args.engine == "emulated":
        from sterna.cli.serve.emulated_options import emulated_options

        args.profile = getattr(args, "profile", DEFAULT_PROFILE)
        args.emulated = emulated_options(args)
    elif "profile" in args:
        raise ConfigurationError("--profile is for --engine emulated")
    validate(args)
    return args


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sterna", "Instances, scheduling and live migration.")
    group.add_argument(
        "--engine",
        choices=("vllm", "emulated"),
        default="vllm",
        help="what instances run: vLLM, or an engine that computes nothing, takes the time of "
        "one, and answers tokens that a client can check",
    )
    group.add_argument(
        "--profile",
        metavar="NAME|FILE",
        default=argparse.SUPPRESS,
        help="the hardware and model that an emulated engine is as fast as (default: "
        f"{DEFAULT_PROFILE}, the paper's)",
    )
    group.add_argument("--frontends", type=int, default=1, help="API server processes")
    group.add_argument(
        "--policy", choices=sorted(PRESETS), default="sterna", help="scheduling policy"
    )
    group.add_argument(
        "--target-load",
        type=int,
        metavar="TOKENS",
        default=argparse.SUPPRESS,
        help="tokens in the batch of an instance up to which high priority decodes at full speed; "
        "the memory above is its headroom (default: what `sterna profile` measured, else 1600)",
    )
    add_cluster_options(group)
    group.add_argument(
        "--no-migration",
        action="store_true",
        help="do not move requests automatically; `sterna migrate` still does",
    )
    group.add_argument(
        "--migration-threshold",
        type=float,
        metavar="STEPS",
        default=argparse.SUPPRESS,
        help="freeness in decode steps below which an instance gives requests away and above "
        "which it takes them (default: the policy's)",
    )
    group.add_argument(
        "--migration-interval",
        type=float,
        metavar="SECONDS",
        default=argparse.SUPPRESS,
        help="time between two pairing rounds (default: the policy's)",
    )
    group.add_argument(
        "--migration-concurrency",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="migrations out of, and into, one instance at once (default: the policy's)",
    )
    group.add_argument(
        "--migration-bandwidth-share",
        type=float,
        metavar="SHARE",
        default=TransportConfig().bandwidth_share,
        help="fraction of time in which bulk copies may use the memory bus, in (0, 1]",
    )
    add_class_options(group)
    # None until it is known whether the policy has priorities.
    parser.set_defaults(scheduling_policy=None)
    group.add_argument(
        "--sterna-log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        default="INFO",
        help="level of Sterna's own log",
    )
    add_scaling_options(group)
    add_door_options(group)
    group.add_argument(
        "--on-instance-failure",
        choices=[each.value for each in OnInstanceFailure],
        default=FrontendConfig().on_instance_failure.value,
        help="what becomes of the requests of an instance that dies: they go on elsewhere behind "
        "the tokens that their clients have, or they fail, as in the paper (default: %(default)s)",
    )
    add_failure_options(group)


def cluster_config(args: Namespace) -> ClusterConfig:
    """Return what to start.

    Raises:
        ConfigurationError: the values contradict each other or the machine.
    """
    try:
        return _cluster_config(args)
    except ConfigurationError as error:
        name, space, rule = str(error).partition(" ")
        raise ConfigurationError(f"{_OPTIONS.get(name, name)}{space}{rule}") from None


def _cluster_config(args: Namespace) -> ClusterConfig:
    """Raises ConfigurationError, which may name a value as the configuration does."""
    scaling = scaling_config(args)
    policy = preset(args.policy)
    changes: dict[str, Any] = {}
    if args.no_migration:
        changes["migrates"] = False
    if "migration_threshold" in args:
        changes["source_freeness_steps"] = args.migration_threshold
        changes["destination_freeness_steps"] = args.migration_threshold
    if "migration_interval" in args:
        changes["round_interval_s"] = args.migration_interval
    if "migration_concurrency" in args:
        changes["num_concurrent_migrations"] = args.migration_concurrency
    policy = with_classes(replace(policy, **changes), args.classes)
    num_gpus = 0 if args.emulated is not None else gpus_of(args)
    on_failure = OnInstanceFailure(args.on_instance_failure)
    config = ClusterConfig(
        llumlet=LlumletConfig(
            policy=policy,
            migration=MigrationConfig(),
            drain_limit_s=args.drain_timeout,
            hands_back=on_failure is OnInstanceFailure.CONTINUE,
        ),
        transport=transport_config(args),
        frontend=FrontendConfig(
            door=door_config(args),
            on_instance_failure=on_failure,
        ),
        num_instances=num_instances(args, scaling),
        num_frontends=args.frontends,
        num_gpus_per_instance=num_gpus,
        cpus_per_instance=args.cpus_per_instance,
        num_warm_instances=args.warm_instances,
        scaling=scaling,
        watch=watch_config(args),
        log_level=args.sterna_log_level,
    )
    if num_gpus == 0 and args.emulated is None:
        most = config.num_instances if scaling is None else scaling.max_instances
        options = "--instances" if scaling is None else "--max-instances"
        if config.num_warm_instances:
            options += ", --warm-instances"
        share_memory(args, most + config.num_warm_instances, options)
    return config


def engine_environment() -> dict[str, str]:
    """Return the environment of processes that run vLLM."""
    environment = {
        # The engine core is stepped in the instance's process; only ranks have their own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The worker extension knows the per-request state of vLLM's V1 model runner only.
        "VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
        # vLLM forks no engine of its own here; ranks of one are spawned.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", VLLM_LOG_LEVEL),
        "VLLM_LOGGING_STREAM": os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
        "VLLM_NO_USAGE_STATS": "1",
        **library_environment(os.environ),
    }
    if is_cpu_build():
        # Instances share the machine's cores; more threads than that only get in their way.
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )
    return environment


def _refuse_unhonoured(args: Namespace) -> None:
    """Refuse vLLM options that would mean something else under Sterna."""
    if args.data_parallel_size != 1:
        raise ConfigurationError(
            f"--data-parallel-size {args.data_parallel_size}: Sterna runs the replicas itself; "
            f"use --instances {args.data_parallel_size}"
        )
    if args.api_server_count not in (None, 1):
        raise ConfigurationError(
            f"--api-server-count {args.api_server_count}: use --frontends {args.api_server_count}"
        )
    from sterna.engine.vllm.arguments import loads_adapters_at_run_time

    if args.frontends > 1 and loads_adapters_at_run_time():
        raise ConfigurationError(
            f"--frontends {args.frontends}: with VLLM_ALLOW_RUNTIME_LORA_UPDATING there can be one "
            "only, since the others would not know of the adapters that it loads; give adapters "
            "by --lora-modules, or leave the variable out"
        )
    for option in ("headless", "grpc"):
        if getattr(args, option, False):
            raise ConfigurationError(f"--{option} is not supported; leave it out")
    if args.uds:
        raise ConfigurationError("--uds is not supported; use --host and --port")
    if args.scheduler_cls is not None:
        raise ConfigurationError("--scheduler-cls: Sterna brings its own scheduler class")
    from sterna.engine.vllm.core import executor_backend

    executor = args.distributed_executor_backend
    if executor not in (None, executor_backend(world_size(args))):
        raise ConfigurationError(
            f"--distributed-executor-backend {executor}: Sterna chooses the one that suits an "
            "instance's ranks; leave it out"
        )
    if args.worker_extension_cls:
        raise ConfigurationError("--worker-extension-cls: Sterna brings its own extension")


def _check_port(host: str | None, port: int) -> None:
    # As vLLM chooses: an address with a colon is of IPv6.
    family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigurationError(
                f"cannot listen on {host or '*'}:{port} ({reason}); choose another --port"
            ) from error
