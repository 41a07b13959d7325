"""The options of `sterna serve`, vLLM's and ours: read and checked before an instance is started.

It is also the program of the process that does so (`runtime/home/options_process.py`).
"""

import argparse
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

from sterna.cli.serve.cluster_address import cluster_address, internal_host, listen_error
from sterna.cli.serve.door_options import check_tls
from sterna.cli.serve.engine_options import (
    SMALL_MODEL_NAME,
    USERS_BINDING,
    checked_engine_config,
    choose_model,
    with_prefix_caches,
)
from sterna.cli.serve.priority_options import settle_classes, with_target_load
from sterna.cli.serve.serve_options import add_serve_options, cluster_config
from sterna.cli.simulate.simulate_options import DEFAULT_PROFILE
from sterna.engine.vllm.guard import vllm_imports
from sterna.errors import ConfigurationError
from sterna.runtime.actors.packed_args import PackedArgs
from sterna.runtime.home.driver_messages import Serve, ServeOptions
from sterna.runtime.processes.log_lines import drop_noise


def read(arguments: Sequence[str]) -> ServeOptions:
    """Read and check the options.

    Raises:
        ConfigurationError: an option cannot work.
    """
    args = parse(arguments)
    address = cluster_address(arguments, is_in_use=True)
    config = replace(cluster_config(args), internal_host=internal_host(args, address))
    _check_port(args.host, args.port)
    check_tls(args)
    engine = checked_engine_config(args)
    config = with_target_load(with_prefix_caches(config, args, engine), args, engine)
    return ServeOptions(
        args.host,
        args.port,
        Serve(config, PackedArgs.of(args), args.emulated, float(args.shutdown_timeout)),
        engine=_engine_name(args),
        compiles=args.emulated is None and not args.enforce_eager,
        example=_example(args),
    )


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
    # None unless it is given: emulated and paced engines have that of their profile.
    default_watermark = serve_parser.get_default("watermark")
    serve_parser.set_defaults(watermark=None)
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
    if args.watermark is None:
        args.watermark = default_watermark
    validate(args)
    return args


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
    from sterna.engine.vllm.arguments import (
        bound_event_endpoints,
        loads_adapters_at_run_time,
        stores_responses,
    )

    if args.frontends > 1 and stores_responses():
        raise ConfigurationError(
            f"--frontends {args.frontends}: with VLLM_ENABLE_RESPONSES_API_STORE there can be one "
            "only, since the others would not find the responses that it stores; leave the "
            "variable out"
        )
    if args.frontends > 1 and loads_adapters_at_run_time():
        raise ConfigurationError(
            f"--frontends {args.frontends}: with VLLM_ALLOW_RUNTIME_LORA_UPDATING there can be one "
            "only, since the others would not know of the adapters that it loads; give adapters "
            "by --lora-modules, or leave the variable out"
        )
    for option in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if args.frontends > 1 and getattr(args, option, None) is not None:
            raise ConfigurationError(
                f"--{option.replace('_', '-')} with --frontends {args.frontends}: each front end "
                "would count its own requests alone; use --max-queued-requests"
            )
    if endpoints := bound_event_endpoints(args):
        raise ConfigurationError(
            f"--kv-events-config: each instance would bind {' and '.join(endpoints)}, which only "
            'one can; give "endpoint" the address of the subscriber (tcp://HOST:PORT), to which '
            'they connect, and leave "replay_endpoint" out'
        )
    for option in ("headless", "grpc"):
        if getattr(args, option, False):
            raise ConfigurationError(f"--{option} is not supported; leave it out")
    if getattr(args, "device_ids", None):
        raise ConfigurationError(
            "--device-ids: Ray gives each instance its devices; choose those of the server by "
            "CUDA_VISIBLE_DEVICES"
        )
    if args.uds:
        raise ConfigurationError("--uds is not supported; use --host and --port")
    if args.scheduler_cls is not None:
        raise ConfigurationError("--scheduler-cls: Sterna brings its own scheduler class")
    from sterna.engine.vllm.hosted_core import executor_backend, world_size

    num_ranks, executor = world_size(args), args.distributed_executor_backend
    if executor not in (None, executor_backend(num_ranks)):
        raise ConfigurationError(
            f"--distributed-executor-backend {executor}: Sterna chooses the one that suits an "
            "instance's ranks; leave it out"
        )
    if args.nnodes > 1:
        raise ConfigurationError(
            f"--nnodes {args.nnodes}: an instance is on one node, and Ray knows the nodes of the "
            "server; leave it out, and join other nodes by sterna join"
        )
    if args.enable_elastic_ep:
        raise ConfigurationError("--enable-elastic-ep is not supported; leave it out")
    if args.numa_bind and (num_ranks == 1 or args.numa_bind_nodes or args.numa_bind_cpus):
        raise ConfigurationError(
            "--numa-bind: vLLM binds ranks that have processes of their own, and a list would bind "
            "all instances of a machine alike; leave --numa-bind-nodes and --numa-bind-cpus out, "
            "and with one rank an instance all three"
        )
    bound = os.environ.get(USERS_BINDING) or "auto"
    if num_ranks == 1 and bound not in ("auto", "nobind"):
        raise ConfigurationError(
            f"VLLM_CPU_OMP_THREADS_BIND={bound}: vLLM binds ranks that have processes of their "
            "own, and an instance has one rank here; set it to nobind, or leave it out"
        )
    if args.worker_extension_cls:
        raise ConfigurationError("--worker-extension-cls: Sterna brings its own extension")


def _check_port(host: str | None, port: int) -> None:
    if port == 0:
        raise ConfigurationError("--port 0: choose a port in [1, 65535]")
    if (reason := listen_error(host or "", port)) is not None:
        raise ConfigurationError(
            f"cannot listen on {host or '*'}:{port} ({reason}); choose another --port or --host"
        )


def _example(args: Namespace) -> str:
    """Return a command that asks the server."""
    host = {None: "127.0.0.1", "": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(
        args.host, args.host
    )
    if ":" in host:
        host = f"[{host}]"
    scheme = "https" if args.ssl_certfile else "http"
    key = ' -H "Authorization: Bearer $API_KEY"' if args.api_key_table else ""
    return (
        f"curl {scheme}://{host}:{args.port}/v1/chat/completions{key} "
        "-H 'Content-Type: application/json' "
        f'-d \'{{"model": "{_model_name(args)}", '
        '"messages": [{"role": "user", "content": "Hello!"}]}\''
    )


def _engine_name(args: Namespace) -> str:
    if args.emulated is None:
        return _model_name(args)
    vocabulary = args.emulated.vocabulary
    return (
        f"an emulated engine ({args.profile}) that answers with the {vocabulary.num_ids} tokens "
        f"of {_model_name(args)} from id {vocabulary.first_id} on"
    )


def _model_name(args: Namespace) -> str:
    return str(args.served_model_name[0] if args.served_model_name else args.model)


if __name__ == "__main__":
    from sterna.runtime.home.options_process import answer

    answer(read)
