"""The driver's side of the fork server: it lives and ends with the run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Self

from sterna.folders import private_folder
from sterna.runtime import forked
from sterna.runtime.forked import ADDRESS_VARIABLE

METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read when prometheus_client is imported: for a fork, by the fork server."""


class ForkServer:
    """Imports vLLM from when its context is entered; ended when it is left.

    Args:
        environment: what variables are to be set while it imports, beside those of this process.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __enter__(self) -> Self:
        self._folder = private_folder("fork")
        address = str(Path(self._folder.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.fork_server", address],
            stdin=subprocess.PIPE,
            env={**os.environ, **self._environment},
            # A Ctrl-C in the terminal goes to the whole process group.
            start_new_session=True,
        )
        # Ray hands it on to whatever it starts.
        os.environ[ADDRESS_VARIABLE] = address
        return self

    def __exit__(self, *error: object) -> None:
        os.environ.pop(ADDRESS_VARIABLE, None)
        assert self._process.stdin is not None
        # It may still import, and then hears of nothing else.
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def forked_runtime_env() -> dict[str, str]:
    """Return the runtime environment of Ray with which an actor is a fork, where there is a fork
    server, and else an ordinary worker."""
    command = (sys.executable, "-S", "-E", str(Path(forked.__file__).resolve()))
    return {"py_executable": shlex.join(command)}
