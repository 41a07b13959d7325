"""Servers that are all up, and of which one runs at a time.

On a machine that others share, the speed changes within minutes. Servers that are compared run one
right after the other, load by load, and not each with all loads. Meanwhile the processes of the
others are stopped (SIGSTOP): they use no processor, and what they have in memory stays.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import psutil

FIRST_STOPPED = "ray::_SupervisorActor"
"""The command line of the processes that watch the others, which must not be seen stopped."""

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)

POLL_INTERVAL_S = 0.01

SETTLE_S = 3.0

Started = TypeVar("Started")


class Turns:
    """Servers by their names; a context manager that ends them all.

    Args:
        settle_s: time for a server that goes on to make up for what it has missed.
    """

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._roots: dict[str, psutil.Process] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, name: str, server: AbstractContextManager[Started]) -> Started:
        """Start a server, while no other one runs, and stop it; returns what `server` yields.

        Args:
            server: becomes one child of this process when it is entered.
        """
        before = set(psutil.Process().children())
        started = self._stack.enter_context(server)
        (self._roots[name],) = set(psutil.Process().children()) - before
        # A process that is stopped would not end.
        self._stack.callback(self._go_on, name)
        self._stop(name)
        return started

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[psutil.Process]:
        """Let this server run alone; yields its first process."""
        self._go_on(name)
        time.sleep(self._settle_s)
        try:
            yield self._roots[name]
        finally:
            self._stop(name)

    def _stop(self, name: str) -> None:
        processes = self._processes(name)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                while process.status() not in STOPPED:
                    time.sleep(POLL_INTERVAL_S)

    def _go_on(self, name: str) -> None:
        for process in reversed(self._processes(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def _processes(self, name: str) -> list[psutil.Process]:
        """All processes of the server, those first that watch others."""
        root = self._roots[name]
        return sorted([root, *root.children(recursive=True)], key=_watches_none)


def _watches_none(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return FIRST_STOPPED not in " ".join(process.cmdline())
    return True
