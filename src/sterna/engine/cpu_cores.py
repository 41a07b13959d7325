"""Cores of this machine for engines on CPU: each engine computes on cores of its own.

A thread that computes all the time loses a few percent of it when the scheduler of the operating
system moves it about, or has it share a core with a front end. vLLM binds its threads, too, but by
itself alone: here several engines, and several servers, share a machine. A core is taken by a lock
on a file, which the kernel releases at the end of the process.
"""

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

logger = logging.getLogger(__name__)


def physical_cores() -> list[int]:
    """The processors that this process may use, one of each physical core, in order."""
    found: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        try:
            core = Path(SIBLINGS.format(number)).read_text().strip()
        except OSError:
            core = str(number)
        found.setdefault(core, number)
    return list(found.values())


class HeldCores:
    """Cores that belong to one engine until its process ends.

    Args:
        numbers: the cores.
        locks: the open files whose locks hold them.
    """

    def __init__(self, numbers: frozenset[int], locks: tuple[IO[str], ...]) -> None:
        self.numbers = numbers
        self._all = frozenset(os.sched_getaffinity(0))
        self._locks = locks

    def bind(self) -> None:
        """Bind the calling thread, and those that it starts, to these cores."""
        os.sched_setaffinity(0, self.numbers)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Context in which the calling thread starts threads that are not bound, such as those that
        copy while it computes."""
        os.sched_setaffinity(0, self._all)
        try:
            yield
        finally:
            self.bind()

    def release(self) -> None:
        """Let other engines have the cores."""
        for lock in self._locks:
            lock.close()


def take_cores(num_cores: int, folder: Path | None = None) -> HeldCores | None:
    """Take cores that no other engine of this machine has; None where too few are left.

    Args:
        folder: of the lock files, which all engines of this user share.
    """
    locks: dict[int, IO[str]] = {}
    try:
        folder = folder or Path(tempfile.gettempdir()) / f"sterna-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in physical_cores():
            if len(locks) == num_cores:
                break
            lock = open(folder / str(number), "w")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
            else:
                locks[number] = lock
    except OSError as error:
        logger.warning("engine is not bound to cores error=%s", error)
    held = HeldCores(frozenset(locks), tuple(locks.values()))
    if len(locks) == num_cores:
        return held
    held.release()
    return None
