"""The process of `sterna serve`: starts Ray and a cluster, and ends everything.

It owns the run's processes on its node (Ray, the fork server, the reaper), and restarts those that
may die: Ray's GCS, the fork server, and the driver, which does all that concerns the cluster. When
this process ends in any way, the whole run ends.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import psutil
import ray

from sterna.config import ClusterConfig
from sterna.errors import ConfigurationError, SternaError
from sterna.folders import RUN_FOLDER_VARIABLE, users_folder, users_path
from sterna.messaging.mailbox import draw_keys
from sterna.runtime.fork_server.launcher import METRICS_FOLDER_VARIABLE, ForkServer
from sterna.runtime.home.driver_messages import NAMESPACE, ServeOptions, say
from sterna.runtime.home.driver_process import DriverProcess
from sterna.runtime.home.held_port import holding_port
from sterna.runtime.home.ray_head import Gcs, Raylet
from sterna.runtime.processes import limits
from sterna.runtime.processes.limits import DiskWatch, NoRoomError, check_room
from sterna.runtime.processes.log_lines import configure_logging
from sterna.runtime.processes.reaper import Reaper

NUM_RAY_STARTS = 3
"""Ray gives its processes 30 s to come up, which a busy machine may exceed."""

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest object store: no payload goes through it."""

NODE_HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "8",
}
"""With these Ray gives up a node 8 s after its end, since connections to it are refused, and 24 s
after it was cut off, since connections time out (measured: 7.8 and 23.4 s). Both are longer than
the lease of an instance: a node that returns before goes on as it was."""

MAX_RAY_FOLDER = 43
"""Characters; behind them, paths of Ray's sockets have 64, and at most 107 in all."""

POLL_INTERVAL_S = 0.2
"""Time between two looks for signals during other waits."""

DESCENDANTS_INTERVAL_S = 5.0
"""Time between two looks at the processes of a run."""

NOTE_INTERVAL_S = 20.0
"""Time between two notes, and until the first one."""

COMPILES = (
    "vLLM compiles the model unless its cache has it, which takes minutes; --enforce-eager does "
    "without, and decodes more slowly"
)

logger = logging.getLogger("sterna.launch")

T = TypeVar("T")


class RayStartError(SternaError):
    """Ray could not be started; the message has its reason."""


class ShutdownSignals:
    """The signals that end a run; urgent if requests are not to finish first.

    SIGTERM lets requests finish; SIGINT, or a second signal, does not. A signal's handler may
    interrupt another one, so that it must not take a lock, which `threading.Event` would do.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._is_urgent = False

    def on_signal(self, number: int) -> None:
        """A signal has arrived."""
        self._is_urgent = self._has_come or number == signal.SIGINT
        self._has_come = True

    @property
    def has_come(self) -> bool:
        """Whether one has arrived."""
        return self._has_come

    @property
    def is_urgent(self) -> bool:
        """Whether requests are not to finish first."""
        return self._is_urgent


class StartNotes:
    """What to say while the instances of a run start.

    Args:
        begun_s: when the start began.
        compiles: whether the engines compile the model.
    """

    def __init__(self, begun_s: float, *, compiles: bool) -> None:
        self._begun_s = begun_s
        self._due_s = begun_s + NOTE_INTERVAL_S
        self._reason: str | None = COMPILES if compiles else None
        self._is_over = False

    def end(self) -> None:
        """The server is ready: there is nothing more to say."""
        self._is_over = True

    def note(self, now_s: float) -> str | None:
        """The note that is due, if one is; the first has the reason why it may take long."""
        if self._is_over or now_s < self._due_s:
            return None
        self._due_s = now_s + NOTE_INTERVAL_S
        reason, self._reason = self._reason, None
        line = f"still starting after {now_s - self._begun_s:.0f} s"
        return line if reason is None else f"{line}: {reason}"


class Run:
    """One run of `sterna serve`: all its processes have ended when its context is left.

    Ray's processes also end when this process is killed.

    Args:
        environment: environment variables of processes that run vLLM.
        has_fork_server: whether vLLM is imported once for all of them.
        cluster_host: the address at which other nodes reach this one; None without other nodes.
    """

    def __init__(
        self,
        environment: dict[str, str],
        *,
        has_fork_server: bool = False,
        cluster_host: str | None = None,
    ) -> None:
        self._environment = environment
        self._has_fork_server = has_fork_server
        self._fork_server: ForkServer | None = None
        self._cluster_host = cluster_host
        self._open = ExitStack()
        self._signals = ShutdownSignals()
        self._gcs = Gcs()
        self._driver: DriverProcess | None = None

    def __enter__(self) -> Self:
        # First: `__exit__` is not called when `__enter__` raises.
        _check_room()
        configure_logging("INFO")
        limits.raise_limit()
        _on_signal(self._signals.on_signal)
        self._reaper = Reaper()
        if self._has_fork_server:
            metrics = {METRICS_FOLDER_VARIABLE: self._reaper.memory_folder}
            fork_server = ForkServer({**self._environment, **metrics})
            self._fork_server = self._open.enter_context(fork_server)
        return self

    def __exit__(self, *error: object) -> None:
        _on_signal(lambda number: None)
        self._reaper.note_descendants()
        if self._driver is not None:
            self._driver.close()
        ray.shutdown()
        self._open.close()
        self._reaper.close()
        self._gcs.close()

    def read_and_serve(self, read: Callable[[], ServeOptions]) -> int:
        """Serve until SIGINT, SIGTERM or the supervisor's end; returns the exit status.

        Args:
            read: returns the options. It runs in a thread while Ray starts, since both take
                seconds.

        Raises:
            SternaError: `read` has raised it, or something did not start.
        """
        reading = _in_background(read)
        self._start_ray()
        if (options := self._wait(reading)) is None:
            return 0
        self._open.enter_context(holding_port(options.host, options.port))
        config = replace(options.serve.config, mailbox_keys=draw_keys())
        logging.getLogger("sterna").setLevel(config.log_level)
        _check_resources(config)
        say(f"starting {config.num_instances} instances of {options.engine}")
        assert self._driver is not None
        self._driver.serve(replace(options.serve, config=config))
        notes = StartNotes(time.monotonic(), compiles=options.compiles)
        return self._keep_up(self._driver, notes, lambda: _print_ready(options))

    def _keep_up(
        self, driver: DriverProcess, notes: StartNotes, on_ready: Callable[[], None]
    ) -> int:
        """Restart processes that die, until the driver ends; returns its exit status.

        Raises:
            RayletDiedError: the raylet has died, which cannot be restarted.
        """
        raylet = Raylet()
        session_folder = ray._private.worker._global_node.get_session_dir_path()
        disks = DiskWatch((session_folder, os.environ[RUN_FOLDER_VARIABLE]))
        note_descendants_s = 0.0
        while True:
            disks.look(time.monotonic())
            raylet.check()
            if self._signals.has_come:
                driver.stop(is_urgent=self._signals.is_urgent)
            if (news := driver.news(POLL_INTERVAL_S)) is not None:
                self._reaper.note_descendants()
                if news.is_ready:
                    notes.end()
                    on_ready()
            now_s = time.monotonic()
            if not self._signals.has_come and (note := notes.note(now_s)) is not None:
                say(note)
            if now_s >= note_descendants_s:
                # Should this process be killed, the reaper must find later instances as well.
                self._reaper.note_descendants()
                note_descendants_s = now_s + DESCENDANTS_INTERVAL_S
            if self._gcs.keep_up(now_s):
                driver.resubscribe()
            if self._fork_server is not None and self._fork_server.keep_up(now_s):
                self._reaper.note_descendants()
            if (status := driver.keep_up()) is not None:
                return status

    def _start_ray(self) -> None:
        """Start the driver and Ray. A signal interrupts Ray's start, which takes no order to
        end."""
        # The driver does its imports meanwhile.
        self._driver = DriverProcess(self._environment, self._reaper.memory_folder)
        _on_signal(self._break_off)
        try:
            start_ray(self._signals, self._reaper, self._gcs, self._cluster_host)
        except (KeyboardInterrupt, SystemExit):
            # Ray installs a handler of its own for SIGTERM before it has started.
            self._signals.on_signal(signal.SIGTERM)
        finally:
            _on_signal(self._signals.on_signal)
        self._reaper.note_descendants()
        if not self._signals.has_come:
            address = ray.get_runtime_context().gcs_address
            if self._cluster_host is not None:
                say(f"nodes join with: sterna join {address}")
            self._driver.use_ray(address)

    def _break_off(self, number: int) -> None:
        self._signals.on_signal(number)
        raise KeyboardInterrupt

    def _wait(self, future: "Future[T]") -> T | None:
        """Return the future's result; None if a signal comes first."""
        while not self._signals.has_come:
            wait([future], timeout=POLL_INTERVAL_S)
            if future.done():
                return future.result()
        return None


def _in_background(function: Callable[[], T]) -> "Future[T]":
    """Run the function in a daemon thread, for which the end of the process does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="read-options", daemon=True).start()
    return future


def _on_signal(act: Callable[[int], None]) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda number, _: act(number))


def start_ray(signals: ShutdownSignals, reaper: Reaper, gcs: Gcs, host: str | None = None) -> None:
    """Start Ray on this machine, again if its processes come up too slowly.

    Args:
        host: the `cluster_host` of `Run`.

    Raises:
        RayStartError: it does not start.
    """
    # With this Ray looks for new files of actors' output twice a second, and not ten times.
    os.environ.setdefault("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0")
    for option, value in NODE_HEALTH.items():
        os.environ.setdefault(option, value)
    # The driver and the fork server, which were started before, do not depend on this attempt.
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    folder = _ray_folder()
    for attempt in range(1, NUM_RAY_STARTS + 1):
        gcs.prepare()
        try:
            with reaper.noting(), _nameless():
                ray.init(
                    # A Ray of its own, even if another one runs on this machine.
                    address="local",
                    _temp_dir=folder,
                    _node_ip_address=host,
                    namespace=NAMESPACE,
                    include_dashboard=False,
                    # The driver shows what actors print.
                    log_to_driver=False,
                    logging_level="warning",
                    object_store_memory=OBJECT_STORE_BYTES,
                    configure_logging=True,
                )
            break
        except Exception as error:
            # Ray has no error class for this.
            ray.shutdown()
            if attempt == NUM_RAY_STARTS or signals.has_come:
                raise RayStartError(
                    f"Ray does not start on this machine, which may be overloaded: {error}"
                ) from error
            logger.warning("Ray came up too slowly, trying again reason=%s", error)
            reaper.reap_now(spared=before)


@contextmanager
def _nameless() -> Iterator[None]:
    """Keep Ray from telling this process's command line, with the keys on it, to every node as the
    name of its job, and from writing it to the GCS's files."""
    of_command_line = ray._private.utils.get_entrypoint_name
    ray._private.utils.get_entrypoint_name = lambda: "sterna serve"
    try:
        yield
    finally:
        ray._private.utils.get_entrypoint_name = of_command_line


def _ray_folder() -> str | None:
    """Return the folder of Ray's files: in one that no other user may enter, since Ray opens its
    own one to all of them. None: Ray's choice, which `RAY_TMPDIR` decides.

    Raises:
        RayStartError: another user has made that folder.
    """
    if "RAY_TMPDIR" in os.environ:
        return None
    parent = _ray_parent()
    try:
        folder = str(users_folder("ray", parent) / "ray")
    except OSError as error:
        raise RayStartError(
            f"there is no folder for Ray's files: {error}; remove it, or name another one by "
            "RAY_TMPDIR"
        ) from error
    if parent != Path(tempfile.gettempdir()):
        logger.warning("TMPDIR is too long for Ray's sockets folder=%s", folder)
    return folder


def _ray_parent() -> Path:
    """Return where the folder of `_ray_folder` is: in the temporary folder, or in /tmp where the
    paths of Ray's sockets would be too long in that one."""
    own = Path(tempfile.gettempdir())
    return own if len(str(users_path("ray", own) / "ray")) <= MAX_RAY_FOLDER else Path("/tmp")


def _check_room() -> None:
    """Raises NoRoomError: a disk has no room for the files of this run, or of its Ray."""
    try:
        own = tempfile.gettempdir()
    except FileNotFoundError as error:
        # None of the usual folders can be written to.
        raise NoRoomError(f"{error.strerror}: make room in one") from error
    check_room((os.environ.get("RAY_TMPDIR") or str(_ray_parent()), own))


def _check_resources(config: ClusterConfig) -> None:
    cpus = config.num_instances * config.cpus_per_instance
    present = ray.cluster_resources().get("CPU", 0)
    if present == 0:
        raise ConfigurationError(
            "there is no whole CPU: the container's limit is below one; give it one for each "
            "instance"
        )
    if cpus > present:
        raise ConfigurationError(
            f"{config.num_instances} instances of {config.cpus_per_instance:g} CPUs need {cpus:g} "
            f"CPUs, and there are {present:g}; lower --instances or --cpus-per-instance"
        )
    needed = config.num_instances * config.num_gpus_per_instance
    available = ray.cluster_resources().get("GPU", 0) if needed else 0
    if needed > available:
        raise ConfigurationError(
            f"{config.num_instances} instances of {config.num_gpus_per_instance} GPUs need "
            f"{needed} GPUs, and there are {available:.0f}; lower --instances"
        )


def _print_ready(options: ServeOptions) -> None:
    elapsed_s = time.time() - psutil.Process().create_time()
    num_instances = options.serve.config.num_instances
    say(
        f"ready after {elapsed_s:.0f} s: {num_instances} instances, try: {options.example}",
        sys.stdout,
    )
