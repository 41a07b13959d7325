"""Runs a cluster from the command line: Ray up, everything started, everything ended."""

import logging
import os
import pickle
import signal
import sys
import threading
import time
from argparse import Namespace
from types import FrameType

import ray

from sterna.config import ClusterConfig
from sterna.errors import ConfigurationError, InstanceStartError, SternaError
from sterna.runtime.actors import configure_logging
from sterna.runtime.cluster import ClusterActor
from sterna.runtime.reaper import Reaper

CLOSE_TIMEOUT_S = 6.0
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest object store: no payload goes through it."""

logger = logging.getLogger("sterna.launch")


def launch(config: ClusterConfig, args: Namespace, environment: dict[str, str]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Ray's processes share this process's fate: also when it is killed they end.
    """
    configure_logging(config.log_level)
    stop = threading.Event()
    _on_signal(stop)
    started_s = time.monotonic()
    reaper = Reaper()
    try:
        return _serve(config, args, environment, stop, started_s)
    finally:
        _ignore_signals()
        reaper.close()


def _serve(
    config: ClusterConfig,
    args: Namespace,
    environment: dict[str, str],
    stop: threading.Event,
    started_s: float,
) -> int:
    _start_ray(config)
    # Ray has put its own handlers in their place.
    _on_signal(stop)
    try:
        cluster = ClusterActor.options(name="sterna-cluster").remote()
        try:
            if not _await_start(
                cluster.start.remote(config, pickle.dumps(args), environment), stop
            ):
                return 0
            _print_ready(config, args, time.monotonic() - started_s)
            stop.wait()
            print("stopping", file=sys.stderr, flush=True)
        finally:
            _close(cluster)
    finally:
        ray.shutdown()
    return 0


def _on_signal(stop: threading.Event) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop.set())


def _start_ray(config: ClusterConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would have engines yield to every other process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's own socket is on the loopback interface and ends with this process.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        namespace="sterna",
        include_dashboard=False,
        log_to_driver=True,
        logging_level="warning",
        object_store_memory=OBJECT_STORE_BYTES,
        configure_logging=True,
    )
    needed = config.num_instances * config.num_gpus_per_instance
    available = ray.cluster_resources().get("GPU", 0)
    if needed > available:
        ray.shutdown()
        raise ConfigurationError(
            f"{config.num_instances} instances of {config.num_gpus_per_instance} GPUs need "
            f"{needed} GPUs, and there are {available:.0f}; lower --instances"
        )


def _await_start(start: ray.ObjectRef, stop: threading.Event) -> bool:
    """Wait until everything is up; False when a signal came first."""
    while not stop.is_set():
        done, _ = ray.wait([start], timeout=0.2)
        if done:
            break
    else:
        return False
    try:
        ray.get(start)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SternaError):
            raise cause from None
        raise InstanceStartError(str(cause)) from error
    return True


def _print_ready(config: ClusterConfig, args: Namespace, elapsed_s: float) -> None:
    name = args.served_model_name[0] if args.served_model_name else args.model
    host = "127.0.0.1" if args.host in (None, "", "0.0.0.0") else args.host
    key = ' -H "Authorization: Bearer $API_KEY"' if args.api_key else ""
    print(
        f"ready after {elapsed_s:.0f} s: {config.num_instances} instances, "
        f"try: curl http://{host}:{args.port}/v1/chat/completions{key} "
        "-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'',
        flush=True,
    )


def _close(cluster: ray.actor.ActorHandle) -> None:
    """Ask everything to end; what does not is killed with Ray."""
    try:
        ray.get(cluster.close.remote(), timeout=CLOSE_TIMEOUT_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("not everything ended by itself reason=%s", type(error).__name__)


def _ignore_signals() -> None:
    def ignore(signal_number: int, frame: FrameType | None) -> None:
        return

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, ignore)
