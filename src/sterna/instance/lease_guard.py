"""Ends an instance whose lease has ended, whatever its loop and its engine are doing (`lease`)."""

import contextlib
import logging
import os
import threading
import time

import psutil

from sterna.supervisor.lease import HeldLease
from sterna.types import InstanceId

LOOK_INTERVAL_S = 0.1

logger = logging.getLogger(__name__)


class LeaseGuard:
    """Guards the process of one instance, which holds a lease from now on.

    Args:
        duration_s: of the lease.
    """

    def __init__(self, instance_id: InstanceId, duration_s: float) -> None:
        self._instance_id = instance_id
        self._lease = HeldLease(duration_s, self.now_s())
        # Kept for the end, at which /proc is read to find what this process has started.
        self._reserve = os.open(os.devnull, os.O_RDONLY)
        # A thread of its own: a loop that hangs would not end anything.
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    @staticmethod
    def now_s() -> float:
        """Return the time of the clock by which the lease counts: it runs on while the machine is
        asleep."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def on_answer(self, asked_s: float) -> None:
        """The supervisor has answered what was asked then."""
        self._lease.on_answer(asked_s)

    def check(self) -> None:
        """End the process if its lease has ended; to be called before it acts on others: when it
        has been stopped for long, it might else act before the thread has noticed."""
        if self._lease.has_ended(self.now_s()):
            self._end()

    def _watch(self) -> None:
        while (left_s := self._lease.ends_s - self.now_s()) > 0:
            time.sleep(min(left_s, LOOK_INTERVAL_S))
        self._end()

    def _end(self) -> None:
        """End this process and all that it has started, at once."""
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
            # Whatever has failed: it must not act any more.
            os._exit(1)
