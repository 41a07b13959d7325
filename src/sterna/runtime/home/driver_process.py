"""The driver, seen from its parent: it gets orders, and is replaced when it dies."""

import logging
import subprocess
import sys
import time
from multiprocessing import Pipe

from ray import cloudpickle

from sterna.runtime.home.driver_messages import (
    REPORTED_STATUS,
    Changed,
    Order,
    Resubscribe,
    Serve,
    Stop,
    UseRay,
)
from sterna.runtime.processes.process import ProcessWatch, watch_of_child
from sterna.runtime.processes.restarts import MAX_SHORT_LIVES, RestartLimit

CLOSE_TIMEOUT_S = 13.0
"""Time for a driver to end after an urgent order; then it is killed. The driver kills what has not
ended before that."""

STOPPED_TIMEOUT_S = 5.0
"""A driver that is stopped for this time is replaced."""

RETRY_DELAY_S = 1.0
"""Time between two attempts to start a successor while the system has no room for a process."""

logger = logging.getLogger("sterna.launch")


class DriverProcess:
    """The driver of a run, one process at a time.

    Args:
        environment: environment variables of processes that run vLLM.
        metrics_folder: folder of the front ends' counters.
    """

    def __init__(self, environment: dict[str, str], metrics_folder: str) -> None:
        self._environment = environment
        self._metrics_folder = metrics_folder
        self._ray_address: str | None = None
        self._serve: Serve | None = None
        self._has_served = False
        self._stop: Stop | None = None
        self._urgent_until_s: float | None = None
        self._restart_limit = RestartLimit()
        self._restart_at_s: float | None = None
        self._begin()

    def use_ray(self, address: str) -> None:
        """Order it to connect to this Ray, and to begin slow preparations."""
        self._ray_address = address
        self._send(
            UseRay(address, self._environment, self._metrics_folder, is_resumed=self._has_served)
        )

    def serve(self, serve: Serve) -> None:
        """Order it to serve."""
        self._serve = serve
        self._send(serve)

    def stop(self, *, is_urgent: bool) -> None:
        """Order it to end the server; requests may finish first unless it is urgent."""
        stop = Stop(is_urgent)
        if self._stop is not None and self._stop.is_urgent >= is_urgent:
            return
        self._stop = stop
        if is_urgent:
            self._urgent_until_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._send(stop)

    def resubscribe(self) -> None:
        """Order it to subscribe to the output of actors at Ray's new GCS."""
        self._send(Resubscribe())

    def news(self, timeout_s: float) -> Changed | None:
        """Return its next news; None without any in this time."""
        if self._restart_at_s is not None:
            time.sleep(timeout_s)
            return None
        try:
            if not self._news.poll(timeout_s):
                return None
            news: Changed = self._news.recv()
        except (EOFError, OSError):
            # It has died. The wait keeps the caller's loop from spinning.
            self._process.wait()
            return None
        self._has_served = True
        return news

    def keep_up(self) -> int | None:
        """Replace it if it has died. Returns an exit status if the run is to end: the driver has
        ended on purpose, or cannot be replaced."""
        if self._restart_at_s is not None:
            return self._begin_again()
        self._kill_if_halted()
        status = self._process.poll()
        if status is None:
            return None
        if status == 0:
            return 0
        if status == REPORTED_STATUS:
            return 1
        if self._is_ending() or not self._has_served:
            logger.error("the driver died, and the server with it %s", _end_of(status))
            return 1
        if self._restart_limit.on_death(time.monotonic()):
            logger.error("%d drivers in a row died soon after they began", MAX_SHORT_LIVES)
            return 1
        logger.error("driver lost, another one goes on %s", _end_of(status))
        self._restart_at_s = time.monotonic()
        return self._begin_again()

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._orders.close()
        self._news.close()

    # ---------------------------------------------------------------------------- internals

    def _is_ending(self) -> bool:
        return self._stop is not None and self._stop.is_urgent

    def _begin_again(self) -> int | None:
        """Start a successor as soon as the system has room for it. Returns an exit status if the
        server ends without one."""
        assert self._restart_at_s is not None
        if self._is_ending():
            logger.error("the server ends without a driver")
            return 1
        if time.monotonic() < self._restart_at_s:
            return None
        try:
            self._begin()
        except OSError as error:
            logger.error("driver not replaced, again in %g s reason=%s", RETRY_DELAY_S, error)
            self._restart_at_s = time.monotonic() + RETRY_DELAY_S
            return None
        self._restart_at_s = None
        assert self._ray_address is not None
        assert self._serve is not None
        self.use_ray(self._ray_address)
        self.serve(self._serve)
        if self._stop is not None:
            self._send(self._stop)
        return None

    def _begin(self) -> None:
        """Raises OSError: no descriptor or process is available; nothing has begun."""
        orders, orders_end = Pipe(duplex=False)
        news_end, news = Pipe(duplex=False)
        ends = (orders.fileno(), news.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.home.driver", *map(str, ends)],
            stdin=subprocess.DEVNULL,
            pass_fds=ends,
            # Signals of the terminal are for this process.
            start_new_session=True,
        )
        self._orders, self._news = orders_end, news_end
        orders.close()
        news.close()
        self._restart_limit.on_begun(time.monotonic())
        self._watch: ProcessWatch | None = None

    def _kill_if_halted(self) -> None:
        if self._watch is None and self._process.poll() is None:
            self._watch = watch_of_child(self._process.pid, STOPPED_TIMEOUT_S)
        is_halted = self._watch is not None and self._watch.why_halted() is not None
        is_late = self._urgent_until_s is not None and time.monotonic() > self._urgent_until_s
        if is_halted or is_late:
            # A driver that has ended on purpose keeps its status.
            self._process.kill()
            self._process.wait()

    def _send(self, order: Order) -> None:
        try:
            # Plain pickle refuses some values of a configuration.
            self._orders.send_bytes(cloudpickle.dumps(order))
        except OSError:
            # It has died; its successor gets the orders again.
            return


def _end_of(status: int) -> str:
    return f"signal={-status}" if status < 0 else f"status={status}"
