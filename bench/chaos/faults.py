"""What is done to the processes of a server: killed, stopped, cut off."""

import contextlib
import ctypes
import errno
import os
import signal
import socket
from collections.abc import Iterator, Mapping
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
"""What stands in the command line of a process; Ray writes an actor's class there, and the call
that it has in hand."""

INSTANCE = "instance"
COMPONENTS = (INSTANCE, *MARKS)
KILL, STOP, CUT = "kill", "stop", "cut"
FAULTS = tuple(f"{deed}-{component}" for component in COMPONENTS for deed in (KILL, STOP, CUT))
"""Everything is done to every component."""

DEADLY = (f"{KILL}-{INSTANCE}", f"{STOP}-{INSTANCE}")
"""What an instance does not survive: the supervisor ends one that is stopped."""

HOLDS_STREAMS = (INSTANCE, "front-end")
"""Components with which streams stand still. The others only manage."""

UNREADY = (".__init__", ".prepare", ".stand_by", ".start", ".take_over")
"""Calls of an actor that does not do its work yet: it begins to, or is in reserve for who does."""

STOPPED_S = 5.0
"""A stopped process is let go on after so long, if it is still there: it must do no harm then."""

_PIDFD_GETFD = 438
"""A system call that Python has no name for: another process's open file, as one of our own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that was done.

    Attributes:
        kind: one of `FAULTS`.
        victim: an instance's id, or what the process is.
        at_s: by the clock of the clients.
        noticed_s: after how long the server no longer counted on the victim, an instance; None
            where it did all the time.
        back_s: after how long the server was whole again: two instances serve, and the process that
            was hit is there and not in reserve, or another one where it was killed. None where
            that never was.
        affected: the engine requests that were on the victim, an instance.
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
        """An instance's, by what the server said of it."""
        with contextlib.suppress(KeyError, psutil.NoSuchProcess):
            return psutil.Process(pids[instance_id])
        return None

    def marked(self, mark: str) -> list[psutil.Process]:
        """Those with this in their command line; of actors, those that do their work. The oldest
        is first: until one that is to be in reserve stands by, its title does not tell it from the
        other."""
        found = []
        for process in self._own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if mark in command and not command.split()[0].endswith(UNREADY):
                    found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found)]


def kill(process: psutil.Process) -> None:
    """End it at once, whatever it is doing."""
    process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """It does nothing for as long as the context lasts, and its connections stay open."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signal.SIGCONT)


def cut(process: psutil.Process) -> int:
    """Break the process's TCP connections to other processes of this machine, in the middle of
    whatever they carry; returns how many.

    Raises:
        OSError: the system does not let us.
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
                    # It was closed meanwhile.
                    continue
                raise OSError(number, os.strerror(number))
            with socket.socket(fileno=fd) as theirs, contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)
                num_cut += 1
    finally:
        os.close(pidfd)
    return num_cut
