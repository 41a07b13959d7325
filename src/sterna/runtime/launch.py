"""Runs a cluster from the command line: Ray up, everything started, everything ended."""

import logging
import os
import pickle
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from types import FrameType

import psutil
import ray

from sterna.config import ClusterConfig
from sterna.errors import ConfigurationError, InstanceStartError, SternaError
from sterna.runtime.actors import configure_logging
from sterna.runtime.cluster import ClusterActor
from sterna.runtime.reaper import Reaper

CLOSE_TIMEOUT_S = 5.0
"""What a server has for ending in good order; then it is killed."""

NUM_RAY_STARTS = 3
"""Ray gives its processes 30 s to come up, which a busy machine may exceed."""

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest object store: no payload goes through it."""

logger = logging.getLogger("sterna.launch")


class RayStartError(SternaError):
    """Ray could not be started; the message has its reason."""


def launch(config: ClusterConfig, args: Namespace, environment: dict[str, str]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Ray's processes share this process's fate: also when it is killed they end.
    """
    configure_logging(config.log_level)
    stop = threading.Event()
    _on_signal(stop)
    reaper = Reaper()
    try:
        return _serve(config, args, environment, stop, reaper)
    finally:
        _ignore_signals()
        reaper.close()


def _serve(
    config: ClusterConfig,
    args: Namespace,
    environment: dict[str, str],
    stop: threading.Event,
    reaper: Reaper,
) -> int:
    _say(f"starting {config.num_instances} instances of {_model_name(args)}")
    start_ray(config, stop, reaper)
    # Ray has put its own handlers in their place.
    _on_signal(stop)
    try:
        if stop.is_set():
            return 0
        cluster = ClusterActor.options(name="sterna-cluster").remote()
        if not _await_start(cluster.start.remote(config, pickle.dumps(args), environment), stop):
            return 0
        _print_ready(config, args)
        stop.wait()
        _say("stopping")
        _close(cluster)
    finally:
        ray.shutdown()
    return 0


def _on_signal(stop: threading.Event) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop.set())


def start_ray(
    config: ClusterConfig,
    stop: threading.Event,
    reaper: Reaper,
    init: Callable[..., object] = ray.init,
) -> None:
    """Start a Ray on this machine, again when its processes came up too slowly.

    Raises:
        RayStartError: it does not start.
        ConfigurationError: the machine has too few GPUs.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would have engines yield to every other process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's own socket is on the loopback interface and ends with this process.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    for attempt in range(1, NUM_RAY_STARTS + 1):
        try:
            init(
                namespace="sterna",
                include_dashboard=False,
                log_to_driver=True,
                logging_level="warning",
                object_store_memory=OBJECT_STORE_BYTES,
                configure_logging=True,
            )
            break
        except Exception as error:
            # Ray has no error class of its own for this.
            ray.shutdown()
            if attempt == NUM_RAY_STARTS or stop.is_set():
                raise RayStartError(
                    f"Ray does not start on this machine, which may be overloaded: {error}"
                ) from error
            logger.warning("Ray came up too slowly, trying again reason=%s", error)
            reaper.reap_now()
    needed = config.num_instances * config.num_gpus_per_instance
    available = ray.cluster_resources().get("GPU", 0) if needed else 0
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


def _print_ready(config: ClusterConfig, args: Namespace) -> None:
    elapsed_s = time.time() - psutil.Process().create_time()
    host = "127.0.0.1" if args.host in (None, "", "0.0.0.0") else args.host
    scheme = "https" if args.ssl_certfile else "http"
    key = ' -H "Authorization: Bearer $API_KEY"' if args.api_key else ""
    print(
        f"ready after {elapsed_s:.0f} s: {config.num_instances} instances, "
        f"try: curl {scheme}://{host}:{args.port}/v1/chat/completions{key} "
        "-H 'Content-Type: application/json' "
        f'-d \'{{"model": "{_model_name(args)}", '
        '"messages": [{"role": "user", "content": "Hello!"}]}\'',
        flush=True,
    )


def _model_name(args: Namespace) -> str:
    return str(args.served_model_name[0] if args.served_model_name else args.model)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
