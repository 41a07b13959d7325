"""Ray's GCS, its memory of the whole cluster, kept up: it may die, and goes on where it was.

What it knows is on disk, and a new one at the same port reads it. Ray's other processes, and all
actors, wait for that for a minute, and serve meanwhile; only what has to be asked of Ray (new
actors, above all) waits.
"""

import logging
import os
from contextlib import ExitStack

import ray

from sterna.folders import private_folder
from sterna.runtime.process import ProcessWatch, watch_of_child

STORAGE_VARIABLE = "RAY_gcs_storage"
PATH_VARIABLE = "RAY_gcs_storage_path"

STOPPED_TIMEOUT_S = 5.0
"""One that is stopped for so long is replaced."""

logger = logging.getLogger("sterna.launch")


class Gcs:
    """The GCS of the Ray that this process starts."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._is_own = not (os.environ.get(STORAGE_VARIABLE) or os.environ.get("RAY_REDIS_ADDRESS"))
        self._watch: ProcessWatch | None = None

    def prepare(self) -> None:
        """Choose where it keeps what it knows; before Ray starts, each time that it does."""
        if self._is_own:
            # One that was used before would make a new Ray go on with the old one's actors.
            folder = self._open.enter_context(private_folder("gcs"))
            os.environ[STORAGE_VARIABLE] = "rocksdb"
            os.environ[PATH_VARIABLE] = folder

    def keep_up(self) -> bool:
        """Start it again if it has died, or is stopped for long; returns whether that was so."""
        node = ray._private.worker._global_node
        if self._watch is None:
            process = node.all_processes["gcs_server"][0].process
            self._watch = watch_of_child(process.pid, STOPPED_TIMEOUT_S)
        if self._watch is None or (reason := self._watch.why_halted()) is None:
            return False
        logger.error("Ray's GCS lost, starting it again reason=%s", reason)
        node.kill_gcs_server(check_alive=False)
        node.start_gcs_server()
        self._watch = None
        return True

    def close(self) -> None:
        """Forget what it knew; after Ray has ended."""
        if self._is_own:
            os.environ.pop(STORAGE_VARIABLE, None)
            os.environ.pop(PATH_VARIABLE, None)
        self._open.close()
