"""The fork server, seen from the process that starts it: it lives as long as the run, and is
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
from sterna.runtime.processes.restarts import RestartBackoff

METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read when prometheus_client is imported: for a fork, by the fork server."""

STOPPED_TIMEOUT_S = 5.0
"""A fork server that is stopped for this time is replaced, since its clients wait for it."""

SHORT_LIFE_S = 60.0
"""A fork server that lived for longer has not died of its imports."""

RETRY_DELAY_S = 60.0
"""Time from the end of a short-lived fork server to the start of the next. Processes that start
meanwhile are no forks, and take longer."""

logger = logging.getLogger("sterna.launch")


class ForkServer:
    """Runs from the entry of its context, where it begins to import vLLM, to the exit.

    Args:
        environment: variables to set for its imports, in addition to those of this process.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: ProcessWatch | None = None
        self._backoff = RestartBackoff(SHORT_LIFE_S, (0.0, RETRY_DELAY_S))

    def __enter__(self) -> Self:
        self._folder = private_folder("fork")
        self._address = Path(self._folder.name) / "socket"
        self._begin(time.monotonic())
        # The processes that Ray starts inherit it.
        os.environ[ADDRESS_VARIABLE] = str(self._address)
        return self

    def __exit__(self, *error: object) -> None:
        os.environ.pop(ADDRESS_VARIABLE, None)
        self._end()
        self._folder.cleanup()

    def keep_up(self, now_s: float) -> bool:
        """Start it again if it has ended, or is stopped for long; returns whether it was started.

        A client of the old one becomes an ordinary process; a client that connects while the next
        one imports waits for it.
        """
        if self._process is not None:
            if self._watch is None:
                self._watch = watch_of_child(self._process.pid, STOPPED_TIMEOUT_S)
            if self._watch is None or (reason := self._watch.why_halted()) is None:
                return False
            self._end()
            self._on_lost(now_s, reason)
        if not self._backoff.is_due(now_s):
            return False
        try:
            self._begin(now_s)
        except OSError as error:
            self._on_lost(now_s, f"it cannot be started: {error}")
            return False
        return True

    def _begin(self, now_s: float) -> None:
        """Raises OSError: no descriptor, process or folder is available."""
        self._backoff.on_begun(now_s)
        self._address.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.fork_server.fork_server", str(self._address)],
            stdin=subprocess.PIPE,
            env={**os.environ, **self._environment},
            # A Ctrl-C in the terminal goes to the whole process group.
            start_new_session=True,
        )

    def _on_lost(self, now_s: float, reason: str) -> None:
        logger.error("fork server lost, %s reason=%s", self._backoff.on_lost(now_s), reason)

    def _end(self) -> None:
        self._watch = None
        if (process := self._process) is None:
            return
        self._process = None
        assert process.stdin is not None
        # While it imports, it does not see that stdin is closed.
        process.kill()
        process.stdin.close()
        process.wait()


def forked_command() -> list[str]:
    """Return a command that runs a Python program, whose path follows, as a fork if there is a fork
    server, and as an ordinary process otherwise."""
    return [sys.executable, "-S", "-E", str(Path(forked_worker.__file__).resolve())]


def forked_runtime_env() -> dict[str, str]:
    """Return Ray's runtime environment for an actor that is run by `forked_command`."""
    return {"py_executable": shlex.join(forked_command())}
