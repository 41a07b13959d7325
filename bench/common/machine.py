"""Load of other programs on the machine during a measurement."""

import time

import psutil


class ForeignLoad:
    """Counts the processor time of other programs from its creation on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._own_s: dict[psutil.Process, float] = {}
        self._begun_s = time.monotonic()
        self._begun_busy_s = self._busy_s()
        self.look()
        self._begun_own_s = sum(self._own_s.values())

    def look(self) -> None:
        """Record the time that this process and its descendants have used so far.

        The use of a descendant between the last look and its end counts as that of others.
        """
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._own_s[process] = times.user + times.system

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
