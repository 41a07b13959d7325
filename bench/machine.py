"""How much of the machine others used while something was measured here."""

import time

import psutil


class ForeignLoad:
    """Counts, from its making on, the processor time of processes that are not this one's."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._begun_s = time.monotonic()
        self._begun_busy_s = self._busy_s()
        self._begun_own_s = self._own_s()

    def cores(self) -> float:
        """How many cores others kept busy since then, on average.

        Of this process's descendants, those that began or ended meanwhile are counted wrongly.
        """
        elapsed_s = time.monotonic() - self._begun_s
        busy_s = self._busy_s() - self._begun_busy_s
        own_s = self._own_s() - self._begun_own_s
        return max(0.0, (busy_s - own_s) / elapsed_s)

    @staticmethod
    def _busy_s() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))

    def _own_s(self) -> float:
        total_s = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total_s += times.user + times.system
        return total_s
