"""Thread that kills the process of an instance when its lease ends (`sterna.supervisor.lease`)."""

import contextlib
import logging
import os
import threading
import time

import psutil

from sterna.supervisor.lease import HeldLease
from sterna.types import InstanceId

CHECK_INTERVAL_S = 0.1

logger = logging.getLogger(__name__)


class LeaseGuard:
    """Guard of one instance's process, which holds a lease from now on.

    Args:
        duration_s: duration of the lease.
    """

    def __init__(self, instance_id: InstanceId, duration_s: float) -> None:
        self._instance_id = instance_id
        self._lease = HeldLease(duration_s, self.now_s())
        # A descriptor in reserve: at the end, /proc is read to find the child processes.
        self._reserve = os.open(os.devnull, os.O_RDONLY)
        # A thread of its own: a loop that hangs could not end the process.
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    @staticmethod
    def now_s() -> float:
        """Return the time of the lease's clock, which goes on while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def on_answer(self, asked_s: float) -> None:
        """The supervisor has answered the heartbeat that was sent at this time."""
        self._lease.on_answer(asked_s)

    def check(self) -> None:
        """End the process if its lease has ended; to be called before it acts on others. A process
        that was stopped for long might otherwise act before the thread has noticed."""
        if self._lease.has_ended(self.now_s()):
            self._end()

    def _watch(self) -> None:
        while (left_s := self._lease.ends_s - self.now_s()) > 0:
            time.sleep(min(left_s, CHECK_INTERVAL_S))
        self._end()

    def _end(self) -> None:
        """Kill this process and its descendants at once."""
        logger.error(
            "instance ends itself, no supervisor has answered within its lease instance=%s",
            self._instance_id,
        )
        try:
            os.close(self._reserve)
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        finally:
            # Even after an error above, the process must no longer act.
            os._exit(1)
