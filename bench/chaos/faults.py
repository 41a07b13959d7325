"""Faults on the processes of a server: kill, stop, cut connections."""

import contextlib
import ctypes
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from sterna.types import RequestId

MARKS = {
    "front-end": "ray::_FrontendActor",
    "scheduler": "ray::_SchedulerActor",
    "supervisor": "ray::_SupervisorActor",
    "driver": "sterna.runtime.home.driver",
    "gcs": "gcs/gcs_server",
}
"""Parts of the processes' command lines; Ray writes an actor's class there, and its current
call."""

INSTANCE = "instance"
COMPONENTS = (INSTANCE, *MARKS)
KILL, STOP, CUT = "kill", "stop", "cut"
FAULTS = tuple(f"{deed}-{component}" for component in COMPONENTS for deed in (KILL, STOP, CUT))
"""Every fault can hit every component."""

DEADLY = (f"{KILL}-{INSTANCE}", f"{STOP}-{INSTANCE}")
"""Faults that an instance does not survive: the supervisor ends a stopped one."""

HOLDS_STREAMS = (INSTANCE, "front-end")
"""Components whose failure stops streams. The others only manage."""

IN_RESERVE = ".stand_by"
"""The call of an actor that waits to take the place of an active one."""

UNREADY = (".__init__", ".prepare", IN_RESERVE, ".start", ".take_over")
"""Calls of an actor that is not active yet: it is starting, or in reserve."""

STOPPED_S = 5.0
"""A stopped process that still exists is continued after this time, and must do no harm then."""

_PIDFD_GETFD = 438
"""A system call without a name in Python: it copies a file descriptor of another process."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault that was carried out.

    Attributes:
        kind: one of `FAULTS`.
        victim: an instance's id, or the name of the component.
        at_s: by the clock of the clients.
        noticed_s: time until the server no longer counted on the victim, an instance; None where
            it always did.
        back_s: time until the server was whole again: two instances serve, and the process that
            was hit, or its successor where it was killed, is active and not in reserve. None
            where this did not happen.
        affected: the engine requests on the victim, an instance.
    """

    kind: str
    victim: str
    at_s: float
    back_s: float | None
    affected: tuple[RequestId, ...] = ()
    noticed_s: float | None = None


class Processes:
    """The processes of the server that this program has started."""

    def __init__(self) -> None:
        self._own = psutil.Process()

    def of_instance(self, instance_id: str, pids: Mapping[str, int]) -> psutil.Process | None:
        """The process of an instance, from the server's log."""
        with contextlib.suppress(KeyError, psutil.NoSuchProcess):
            return psutil.Process(pids[instance_id])
        return None

    def marked(self, mark: str) -> list[psutil.Process]:
        """Processes with this text in their command line; of actors, only active ones. The oldest
        is first: while a reserve is starting, its title is that of an active one."""
        return self._titled(mark, lambda title: not title.endswith(UNREADY))

    def in_reserve(self, mark: str) -> list[psutil.Process]:
        """The processes of actors with this text in their title that wait in reserve."""
        return self._titled(mark, lambda title: title.endswith(IN_RESERVE))

    def _titled(self, mark: str, is_meant: Callable[[str], bool]) -> list[psutil.Process]:
        found = []
        for process in self._own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if mark in command and is_meant(command.split()[0]):
                    found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found)]


def kill(process: psutil.Process) -> None:
    """Kill the process."""
    process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Stop the process for the duration of the context; its connections stay open."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signal.SIGCONT)


def cut(process: psutil.Process) -> int:
    """Break the process's TCP connections to other processes of this machine, in the middle of
    their data; returns their number.

    Raises:
        OSError: the system does not permit it.
    """
    pidfd = os.pidfd_open(process.pid)
    libc = ctypes.CDLL(None, use_errno=True)
    num_cut = 0
    try:
        for connection in process.net_connections("tcp"):
            if connection.status != psutil.CONN_ESTABLISHED or connection.fd < 0:
                continue
            fd = libc.syscall(_PIDFD_GETFD, pidfd, connection.fd, 0)
            if fd < 0:
                number = ctypes.get_errno()
                if number == errno.EBADF:
                    # The connection was closed meanwhile.
                    continue
                raise OSError(number, os.strerror(number))
            with socket.socket(fileno=fd) as theirs, contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)
                num_cut += 1
    finally:
        os.close(pidfd)
    return num_cut
