"""Ray's GCS, its memory of the whole cluster, kept up: it may die, and goes on where it was.

What it knows is on disk, and a new one at the same port reads it. Ray's other processes, and all
actors, wait for that, and serve meanwhile; only what has to be asked of Ray (new actors, above all)
waits.
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
from sterna.runtime.processes.restarts import Restarts

STORAGE_VARIABLE = "RAY_gcs_storage"
PATH_VARIABLE = "RAY_gcs_storage_path"

STOPPED_TIMEOUT_S = 5.0
"""One that is stopped for so long is replaced."""

DEAF_TIMEOUT_S = 30.0
"""So is one that takes no connections for so long: SIGTERM may end its work, and not itself."""

LOOK_INTERVAL_S = 1.0
"""Time between two looks whether it takes any."""

RESTART_DELAYS_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""From the end of one to the start of the next, where each dies soon; the last one repeats."""

SHORT_LIFE_S = 30.0
"""One that lived longer has not died of what it found at its start."""

logger = logging.getLogger("sterna.launch")


class Gcs:
    """The GCS of the Ray that this process starts."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._is_own = not (os.environ.get(STORAGE_VARIABLE) or os.environ.get("RAY_REDIS_ADDRESS"))
        self._watch: ProcessWatch | None = None
        self._heard_s: float | None = None
        self._look_at_s = 0.0
        self._is_up = True
        self._restarts = Restarts(SHORT_LIFE_S, RESTART_DELAYS_S)

    def prepare(self) -> None:
        """Choose where it keeps what it knows; before Ray starts, each time that it does."""
        if self._is_own:
            # One that was used before would make a new Ray go on with the old one's actors.
            folder = self._open.enter_context(private_folder("gcs"))
            os.environ[STORAGE_VARIABLE] = "rocksdb"
            os.environ[PATH_VARIABLE] = folder

    def keep_up(self, now_s: float) -> bool:
        """Start it again if it has died, or is stopped or deaf for long; returns whether it was
        started.

        One that cannot come up, as on a full disk, is tried again for as long as the run lasts.
        """
        node = ray._private.worker._global_node
        if self._is_up:
            if (reason := self._why_lost(node, now_s)) is None:
                return False
            node.kill_gcs_server(check_alive=False)
            self._is_up = False
            self._put_off(now_s, reason)
        if not self._restarts.is_due(now_s):
            return False
        self._restarts.on_begun(now_s)
        self._heard_s = now_s
        try:
            node.start_gcs_server()
        except OSError as error:
            self._put_off(now_s, f"it cannot be started: {error}")
            return False
        self._is_up = True
        return True

    def _why_lost(self, node: Any, now_s: float) -> str | None:
        if self._watch is None:
            process = node.all_processes["gcs_server"][0].process
            self._watch = watch_of_child(process.pid, STOPPED_TIMEOUT_S)
        reason = None if self._watch is None else self._watch.why_halted()
        reason = reason or self._why_deaf(node, now_s)
        if reason is not None:
            self._watch = None
        return reason

    def _why_deaf(self, node: Any, now_s: float) -> str | None:
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + LOOK_INTERVAL_S
        if self._heard_s is None or is_listening(node.gcs_address):
            self._heard_s = now_s
        if now_s - self._heard_s < DEAF_TIMEOUT_S:
            return None
        return f"it takes no connections for {now_s - self._heard_s:.0f} s"

    def _put_off(self, now_s: float, reason: str) -> None:
        logger.error("Ray's GCS lost, %s reason=%s", self._restarts.on_lost(now_s), reason)

    def close(self) -> None:
        """Forget what it knew; after Ray has ended."""
        if self._is_own:
            os.environ.pop(STORAGE_VARIABLE, None)
            os.environ.pop(PATH_VARIABLE, None)
        self._open.close()


class RayletDiedError(SternaError):
    """The raylet of this node has ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Ray's raylet of this machine has died ({reason}), and with it what ran there; start "
            "the server again"
        )


class Raylet:
    """The one that this process has started, by `ray.init`."""

    def __init__(self) -> None:
        self._watch: ProcessWatch | None = None

    def check(self) -> None:
        """Raises RayletDiedError: it has ended."""
        if self._watch is None:
            process = ray._private.worker._global_node.all_processes["raylet"][0].process
            # One that is stopped may go on. Ray gives its node up after a time, and then it ends.
            self._watch = watch_of_child(process.pid, math.inf)
        if self._watch is not None and (reason := self._watch.why_halted()) is not None:
            raise RayletDiedError(reason)
