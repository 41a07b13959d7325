"""`sterna serve`: the environment of all its processes, and the run."""

import os
import sys
from collections.abc import Sequence
from functools import partial

from sterna.cli.serve import read_options
from sterna.cli.serve.cluster_address import cluster_address
from sterna.cli.serve.engine_options import USERS_BINDING, USERS_THREADS
from sterna.cli.serve.scaling_options import wants_fork_server
from sterna.engine.vllm.guard import is_cpu_build
from sterna.runtime.home.ray_environment import protect_ray, set_node_defaults
from sterna.runtime.processes.log_lines import (
    VLLM_LOG_LEVEL,
    library_environment,
    log_environment,
)


def serve(arguments: Sequence[str]) -> int:
    """Run `sterna serve`; returns the exit status when the server has ended.

    Raises:
        ConfigurationError: an option cannot work; no instance was started.
    """
    environment = engine_environment()
    address = cluster_address(arguments)
    # All processes started from here inherit these; some are read when a process starts.
    os.environ.update(environment)
    os.environ.update(log_environment(os.environ, sys.stderr.isatty()))
    protect_ray(os.environ, is_shared=address is not None)
    set_node_defaults(os.environ)
    if address is not None:
        os.environ.update(address.environment())
    if any(option.startswith(("-h", "--help")) for option in arguments):
        # Prints the help and raises SystemExit, without starting any process.
        read_options.parse(arguments)
    from sterna.runtime.home import options_process
    from sterna.runtime.home.launch import Run

    host = None if address is None else address.host
    has_fork_server = wants_fork_server(arguments)
    with Run(environment, has_fork_server=has_fork_server, cluster_host=host) as run:
        return run.read_and_serve(partial(options_process.ask, read_options.__file__, arguments))


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
        # An engine's ranks are on one machine. Gloo asks callers for nothing, and would listen on
        # the address of the machine's name.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **library_environment(os.environ),
    }
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        # The hashes of all prefix caches begin with it, also on other nodes.
        environment["PYTHONHASHSEED"] = seed
    if is_cpu_build():
        # Of the processes beside the engines, which get theirs by `share_cores`.
        given = os.environ.get("OMP_NUM_THREADS", "")
        environment[USERS_THREADS] = os.environ.get(USERS_THREADS, given)
        environment["OMP_NUM_THREADS"] = "1"
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
        environment[USERS_BINDING] = os.environ.get(USERS_BINDING, bound)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bound or "nobind"
    return environment
