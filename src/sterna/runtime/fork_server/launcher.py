"""The fork server, seen from the process that starts it: it lives and ends with the run, and is
started again when it dies."""

import logging
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from sterna.folders import private_folder
from sterna.runtime.fork_server import forked_worker
from sterna.runtime.fork_server.forked_worker import ADDRESS_VARIABLE
from sterna.runtime.processes.process import ProcessWatch, watch_of_child
from sterna.runtime.processes.restarts import Restarts

METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read when prometheus_client is imported: for a fork, by the fork server."""

STOPPED_TIMEOUT_S = 5.0
"""One that is stopped for so long is replaced: whoever asks it waits meanwhile."""

SHORT_LIFE_S = 60.0
"""One that lived longer has not died of its imports."""

RETRY_DELAY_S = 60.0
"""From the end of one that lived shorter to the start of the next. Until then, whatever starts is
no fork: it takes longer, and is there."""

logger = logging.getLogger("sterna.launch")


class ForkServer:
    """Imports vLLM from when its context is entered; ended when it is left.

    Args:
        environment: what variables are to be set while it imports, beside those of this process.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: ProcessWatch | None = None
        self._restarts = Restarts(SHORT_LIFE_S, (0.0, RETRY_DELAY_S))

    def __enter__(self) -> Self:
        self._folder = private_folder("fork")
        self._address = Path(self._folder.name) / "socket"
        self._begin(time.monotonic())
        # Ray hands it on to whatever it starts.
        os.environ[ADDRESS_VARIABLE] = str(self._address)
        return self

    def __exit__(self, *error: object) -> None:
        os.environ.pop(ADDRESS_VARIABLE, None)
        self._end()
        self._folder.cleanup()

    def keep_up(self, now_s: float) -> bool:
        """Start it again if it has ended, or is stopped for long; returns whether it was started.

        Whoever has asked one that ends becomes an ordinary process; whoever asks while the next
        one imports waits for it.
        """
        if self._process is not None:
            if self._watch is None:
                self._watch = watch_of_child(self._process.pid, STOPPED_TIMEOUT_S)
            if self._watch is None or (reason := self._watch.why_halted()) is None:
                return False
            self._end()
            self._put_off(now_s, reason)
        if not self._restarts.is_due(now_s):
            return False
        try:
            self._begin(now_s)
        except OSError as error:
            self._put_off(now_s, f"it cannot be started: {error}")
            return False
        return True

    def _begin(self, now_s: float) -> None:
        """Raises OSError: there is no descriptor, process or folder to be had."""
        self._restarts.on_begun(now_s)
        self._address.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.fork_server.fork_server", str(self._address)],
            stdin=subprocess.PIPE,
            env={**os.environ, **self._environment},
            # A Ctrl-C in the terminal goes to the whole process group.
            start_new_session=True,
        )

    def _put_off(self, now_s: float, reason: str) -> None:
        logger.error("fork server lost, %s reason=%s", self._restarts.on_lost(now_s), reason)

    def _end(self) -> None:
        self._watch = None
        if (process := self._process) is None:
            return
        self._process = None
        assert process.stdin is not None
        # It may still import, and then hears of nothing else.
        process.kill()
        process.stdin.close()
        process.wait()


def forked_runtime_env() -> dict[str, str]:
    """Return the runtime environment of Ray with which an actor is a fork, where there is a fork
    server, and else an ordinary worker."""
    command = (sys.executable, "-S", "-E", str(Path(forked_worker.__file__).resolve()))
    return {"py_executable": shlex.join(command)}
