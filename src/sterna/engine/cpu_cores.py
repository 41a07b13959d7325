"""Cores of this machine for engines on CPU: an engine with one thread computes on one of its own.

A thread that computes all the time loses a few percent of it when the scheduler of the operating
system moves it about, or has it share a core with a front end. vLLM binds its threads, too, but
knows of one engine alone: here several engines, and several servers of a user, share a machine. A
core is taken by a lock on a file, which the kernel releases at the end of the process. Containers
do not see each other's locks: in one no core is taken, unless it has cores of its own.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

from sterna.folders import lock_file, users_folder

QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files with a container's share of the processors, by the version of control groups: microseconds
in each period, and the period."""

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

PID_NAMESPACE, FIRST_NAMESPACE = "/proc/self/ns/pid", 0xEFFF_FFFC
"""A file whose number is this one outside of containers."""

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


def num_usable_cores() -> int:
    """The number of physical cores that this process may keep busy, also by its container."""
    num_cores = len(physical_cores())
    for paths in QUOTAS:
        try:
            quota, period = " ".join(Path(path).read_text() for path in paths).split()
        except (OSError, ValueError):
            continue
        # Without a limit "max", or -1.
        if quota.isdecimal() and int(period) > 0:
            num_cores = min(num_cores, math.ceil(int(quota) / int(period)))
    return num_cores


class HeldCore:
    """A core that belongs to one engine until its process ends.

    Args:
        number: the core.
        lock: descriptor of the file whose lock holds it.
    """

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self._all = frozenset(os.sched_getaffinity(0))
        self._lock: int | None = lock

    def bind(self) -> None:
        """Bind the calling thread, and those that it starts, to this core."""
        os.sched_setaffinity(0, {self.number})

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
        """Let another engine have the core."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_core(parent: Path | None = None) -> HeldCore | None:
    """Take a core that no other engine of this user has; None where none is left, or where engines
    of other containers may have it.

    Args:
        parent: of the folder of the lock files; by default the temporary folder.
    """
    try:
        if _shares_all_cores():
            logger.info("engine is not bound to a core reason=the container may use all of them")
            return None
        folder = users_folder("cores", parent)
        for number in physical_cores():
            if (lock := lock_file(folder / str(number))) is not None:
                return HeldCore(number, lock)
    except OSError as error:
        logger.warning("engine is not bound to a core error=%s", error)
    return None


def _shares_all_cores() -> bool:
    """Whether this is a container that may use all processors, as others on the machine may."""
    is_container = os.stat(PID_NAMESPACE).st_ino != FIRST_NAMESPACE
    return is_container and len(os.sched_getaffinity(0)) == os.cpu_count()
