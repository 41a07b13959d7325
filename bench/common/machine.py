"""Load of other programs on the machine during a measurement, and what servers use of it."""

import contextlib
import time

import psutil


class ForeignLoad:
    """Counts the processor time of other programs from its creation on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._own_s: dict[psutil.Process, float] = {}
        self._children: set[psutil.Process] = set()
        self._begun_s = time.monotonic()
        self._begun_busy_s = self._busy_s()
        self.look()
        self._begun_own_s = sum(self._own_s.values())

    def look(self) -> None:
        """Record the time that this process and its descendants have used so far.

        The use of a descendant between the last look and its end counts as that of others, except
        for a program that this process has started and waited for.
        """
        self._own_s[self._process] = sum(self._process.cpu_times()[:4])
        children = set(self._process.children())
        for process in self._children - children:
            # It is in the time of this process's children now.
            self._own_s.pop(process, None)
        self._children = children
        for process in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._own_s[process] = sum(process.cpu_times()[:2])

    def cores(self) -> float:
        """Return the number of cores that others kept busy since the creation, on average."""
        elapsed_s = time.monotonic() - self._begun_s
        busy_s = self._busy_s() - self._begun_busy_s
        self.look()
        own_s = sum(self._own_s.values()) - self._begun_own_s
        return max(0.0, (busy_s - own_s) / elapsed_s)

    @staticmethod
    def _busy_s() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def tree_cpu_s(root: psutil.Process) -> float:
    """Processor time of a process and of all processes that it and its children have started, so
    far.

    Of those that have ended, only what a process waited for that still runs counts.
    """
    used_s = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s += sum(process.cpu_times()[:4])
    return used_s


def tree_memory_bytes(root: psutil.Process) -> int:
    """Memory of the same processes; pages that several of them share count once (PSS)."""
    num_bytes = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            num_bytes += process_memory_bytes(process)
    return num_bytes


def process_memory_bytes(process: psutil.Process) -> int:
    """Memory of a process; of pages that several share, its part (PSS)."""
    return int(process.memory_full_info().pss)
