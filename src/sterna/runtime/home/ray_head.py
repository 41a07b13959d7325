"""Ray's head processes on the home node: the GCS, which is restarted when it dies, and the raylet.

The state of the GCS, Ray's memory of the whole cluster, is on disk, and a new GCS at the same port
reads it. Until then Ray's other processes and all actors serve on; only calls to Ray itself (the
start of actors, above all) wait.

docs/internals/parts.md compares a server without this.
"""

import logging
import math
import os
from contextlib import ExitStack
from typing import Any

import ray

from sterna.errors import SternaError
from sterna.folders import private_folder
from sterna.runtime.actors.addresses import is_listening
from sterna.runtime.processes.process import ProcessWatch, watch_of_child
from sterna.runtime.processes.restarts import RestartBackoff

STORAGE_VARIABLE = "RAY_gcs_storage"
PATH_VARIABLE = "RAY_gcs_storage_path"

STOPPED_TIMEOUT_S = 5.0
"""A GCS that is stopped for this time is replaced."""

UNREACHABLE_TIMEOUT_S = 30.0
"""A GCS that accepts no connections for this time is replaced: SIGTERM may end its service but not
its process."""

LOOK_INTERVAL_S = 1.0
"""Time between two attempts to connect."""

RESTART_DELAYS_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Times from an end to the next start while each GCS dies soon; the last one repeats."""

SHORT_LIFE_S = 30.0
"""A GCS that lived for longer has not died of the conditions at its start."""

logger = logging.getLogger("sterna.launch")


class Gcs:
    """The GCS of the Ray that this process starts."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._is_own = not (os.environ.get(STORAGE_VARIABLE) or os.environ.get("RAY_REDIS_ADDRESS"))
        self._watch: ProcessWatch | None = None
        self._reached_s: float | None = None
        self._look_at_s = 0.0
        self._is_up = True
        self._backoff = RestartBackoff(SHORT_LIFE_S, RESTART_DELAYS_S)

    def prepare(self) -> None:
        """Choose a folder for its state; to be called before each start of Ray."""
        if self._is_own:
            # With a folder that was used before, a new Ray would go on with the old one's actors.
            folder = self._open.enter_context(private_folder("gcs"))
            os.environ[STORAGE_VARIABLE] = "rocksdb"
            os.environ[PATH_VARIABLE] = folder

    def keep_up(self, now_s: float) -> bool:
        """Start it again if it has died, or is stopped or unreachable for long; returns whether it
        was started.

        A GCS that does not come up, as on a full disk, is started again until the run ends.
        """
        node = ray._private.worker._global_node
        if self._is_up:
            if (reason := self._why_lost(node, now_s)) is None:
                return False
            node.kill_gcs_server(check_alive=False)
            self._is_up = False
            self._on_lost(now_s, reason)
        if not self._backoff.is_due(now_s):
            return False
        self._backoff.on_begun(now_s)
        self._reached_s = now_s
        try:
            node.start_gcs_server()
        except OSError as error:
            self._on_lost(now_s, f"it cannot be started: {error}")
            return False
        self._is_up = True
        return True

    def _why_lost(self, node: Any, now_s: float) -> str | None:
        if self._watch is None:
            process = node.all_processes["gcs_server"][0].process
            self._watch = watch_of_child(process.pid, STOPPED_TIMEOUT_S)
        reason = None if self._watch is None else self._watch.why_halted()
        reason = reason or self._why_unreachable(node, now_s)
        if reason is not None:
            self._watch = None
        return reason

    def _why_unreachable(self, node: Any, now_s: float) -> str | None:
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + LOOK_INTERVAL_S
        if self._reached_s is None or is_listening(node.gcs_address):
            self._reached_s = now_s
        if now_s - self._reached_s < UNREACHABLE_TIMEOUT_S:
            return None
        return f"it has accepted no connections for {now_s - self._reached_s:.0f} s"

    def _on_lost(self, now_s: float, reason: str) -> None:
        logger.error("Ray's GCS lost, %s reason=%s", self._backoff.on_lost(now_s), reason)

    def close(self) -> None:
        """Remove its state; to be called after Ray has ended."""
        if self._is_own:
            os.environ.pop(STORAGE_VARIABLE, None)
            os.environ.pop(PATH_VARIABLE, None)
        self._open.close()


class RayletDiedError(SternaError):
    """The raylet of this node has ended, and the run with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Ray's raylet of this machine has died ({reason}), and with it what ran there; start "
            "the server again"
        )


class Raylet:
    """The raylet that this process has started, by `ray.init`."""

    def __init__(self) -> None:
        self._watch: ProcessWatch | None = None

    def check(self) -> None:
        """Raises RayletDiedError: it has ended."""
        if self._watch is None:
            process = ray._private.worker._global_node.all_processes["raylet"][0].process
            # A stopped raylet may go on. Ray gives up its node after a time, and then it ends.
            self._watch = watch_of_child(process.pid, math.inf)
        if self._watch is not None and (reason := self._watch.why_halted()) is not None:
            raise RayletDiedError(reason)
