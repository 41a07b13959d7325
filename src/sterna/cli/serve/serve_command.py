"""`sterna serve`: vLLM's options and Sterna's, checked before any process is started."""

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

from sterna.cli.serve.cluster_address import cluster_address, internal_host, listen_error
from sterna.cli.serve.door_options import check_tls
from sterna.cli.serve.engine_options import (
    SMALL_MODEL_NAME,
    USERS_BINDING,
    USERS_THREADS,
    checked_engine_config,
    choose_model,
    with_prefix_caches,
    world_size,
)
from sterna.cli.serve.priority_options import settle_classes, with_target_load
from sterna.cli.serve.scaling_options import wants_fork_server
from sterna.cli.serve.serve_options import add_serve_options, cluster_config
from sterna.cli.simulate.simulate_options import DEFAULT_PROFILE
from sterna.config import ClusterConfig
from sterna.engine.vllm.guard import is_cpu_build, vllm_imports
from sterna.errors import ConfigurationError
from sterna.runtime.home.ray_environment import protect_ray, wait_for_gcs
from sterna.runtime.processes.log_filters import (
    VLLM_LOG_LEVEL,
    drop_noise,
    library_environment,
    log_environment,
)


def serve(arguments: Sequence[str]) -> int:
    """Run `sterna serve`; returns the exit status when the server has ended.

    Raises:
        ConfigurationError: an option cannot work; nothing was started.
    """
    environment = engine_environment()
    address = cluster_address(arguments)
    # All processes started from here inherit these; some are read when a process starts.
    os.environ.update(environment)
    os.environ.update(log_environment(os.environ, sys.stderr.isatty()))
    protect_ray(os.environ, is_shared=address is not None)
    wait_for_gcs(os.environ)
    if address is not None:
        os.environ.update(address.environment())
    if any(option.startswith(("-h", "--help")) for option in arguments):
        # Prints the help and raises SystemExit, without starting any process.
        parse(arguments)
    from sterna.runtime.home.launch import Run

    def read() -> tuple[ClusterConfig, Namespace]:
        args = parse(arguments)
        config = replace(cluster_config(args), internal_host=internal_host(args, address))
        _check_port(args.host, args.port)
        check_tls(args)
        engine = checked_engine_config(args)
        config = with_prefix_caches(config, args, engine)
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
        add_more: adds the options of another command that also takes those of `serve`.

    Raises:
        ConfigurationError: an option's value cannot work.
        SystemExit: help was requested and has been printed.
    """
    drop_noise()
    with vllm_imports():
        from sterna.engine.vllm.arguments import make_serve_parser, parse_serve, validate

    parser, serve_parser = make_serve_parser()
    add_serve_options(serve_parser)
    if add_more is not None:
        add_more(serve_parser)
    args = parse_serve(parser, serve_parser, list(arguments), SMALL_MODEL_NAME)
    choose_model(args)
    _refuse_unsupported(args)
    settle_classes(args)
    args.emulated = args.step_time = args.num_threads = None
    args.binds_core = False
    if args.engine != "vllm":
        from sterna.cli.serve.emulated_options import emulated_options, paced_options

        args.profile = getattr(args, "profile", DEFAULT_PROFILE)
        if args.engine == "emulated":
            args.emulated = emulated_options(args)
        else:
            args.step_time = paced_options(args)
    elif "profile" in args:
        raise ConfigurationError("--profile is for --engine emulated and --engine paced")
    validate(args)
    return args


def engine_environment() -> dict[str, str]:
    """Return the environment of processes that run vLLM."""
    environment = {
        # The engine core is stepped in the instance's process; only ranks have their own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # With vLLM's V2 model runner drafts do not move, and little of it has run on a GPU.
        "VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
        # vLLM forks no engine of its own here; ranks of one are spawned.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", VLLM_LOG_LEVEL),
        "VLLM_LOGGING_STREAM": os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
        "VLLM_NO_USAGE_STATS": "1",
        **library_environment(os.environ),
    }
    if is_cpu_build():
        # Of the processes beside the engines, which get theirs by `share_cores`.
        given = os.environ.get("OMP_NUM_THREADS", "")
        environment[USERS_THREADS] = os.environ.get(USERS_THREADS, given)
        environment["OMP_NUM_THREADS"] = "1"
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
        environment[USERS_BINDING] = os.environ.get(USERS_BINDING, bound)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bound or "nobind"
    return environment


def _refuse_unsupported(args: Namespace) -> None:
    """Refuse vLLM options that would have another meaning under Sterna."""
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
    from sterna.engine.vllm.hosted_core import executor_backend

    executor = args.distributed_executor_backend
    if executor not in (None, executor_backend(world_size(args))):
        raise ConfigurationError(
            f"--distributed-executor-backend {executor}: Sterna chooses the one that suits an "
            "instance's ranks; leave it out"
        )
    if args.worker_extension_cls:
        raise ConfigurationError("--worker-extension-cls: Sterna brings its own extension")


def _check_port(host: str | None, port: int) -> None:
    if (reason := listen_error(host or "", port)) is not None:
        raise ConfigurationError(
            f"cannot listen on {host or '*'}:{port} ({reason}); choose another --port"
        )
