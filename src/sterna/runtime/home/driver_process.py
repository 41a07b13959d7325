"""The driver, seen from the process that starts it: told what to do, and replaced when it dies."""

import logging
import subprocess
import sys
import time
from multiprocessing import Pipe

from ray import cloudpickle

from sterna.runtime.home.driver_messages import (
    TOLD_STATUS,
    Changed,
    ListenAgain,
    Order,
    Serve,
    Stop,
    UseRay,
)
from sterna.runtime.processes.process import ProcessWatch, watch_of_child
from sterna.runtime.processes.restarts import MAX_SHORT_LIVES, RestartLimit

CLOSE_TIMEOUT_S = 8.0
"""What a driver has for ending in a hurry; then it is killed."""

STOPPED_TIMEOUT_S = 5.0
"""One that is stopped for so long is replaced."""

RETRY_DELAY_S = 1.0
"""From one attempt to begin a successor to the next, while there is no room for a process."""

logger = logging.getLogger("sterna.launch")


class DriverProcess:
    """One driver at a time.

    Args:
        environment: environment variables of processes that run vLLM.
        metrics_folder: where front ends keep their counters.
    """

    def __init__(self, environment: dict[str, str], metrics_folder: str) -> None:
        self._environment = environment
        self._metrics_folder = metrics_folder
        self._ray_address: str | None = None
        self._serve: Serve | None = None
        self._has_served = False
        self._stop: Stop | None = None
        self._urgent_until_s: float | None = None
        self._succession = RestartLimit()
        self._again_s: float | None = None
        self._begin()

    def use_ray(self, address: str) -> None:
        """Have it connect to this Ray, and begin what takes time."""
        self._ray_address = address
        self._send(
            UseRay(address, self._environment, self._metrics_folder, is_resumed=self._has_served)
        )

    def serve(self, serve: Serve) -> None:
        """Have it serve this."""
        self._serve = serve
        self._send(serve)

    def stop(self, *, is_urgent: bool) -> None:
        """Have it end what it serves; requests may finish first unless it is urgent."""
        stop = Stop(is_urgent)
        if self._stop is not None and self._stop.is_urgent >= is_urgent:
            return
        self._stop = stop
        if is_urgent:
            self._urgent_until_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._send(stop)

    def listen_again(self) -> None:
        """Have it go on to show what actors print: Ray's GCS is another one."""
        self._send(ListenAgain())

    def news(self, timeout_s: float) -> list[Changed]:
        """Return what it has told, after so long at the latest."""
        if self._again_s is not None:
            time.sleep(timeout_s)
            return []
        try:
            if not self._news.poll(timeout_s):
                return []
            news: Changed = self._news.recv()
        except (EOFError, OSError):
            # It has died; whoever asks must not do so without a pause.
            self._process.wait()
            return []
        self._has_served = True
        return [news]

    def keep_up(self) -> int | None:
        """Replace it if it has died. Returns an exit status when the run is to end: it has ended on
        purpose, or died where it cannot be replaced."""
        if self._again_s is not None:
            return self._begin_again()
        self._kill_if_halted()
        status = self._process.poll()
        if status is None:
            return None
        if status == 0:
            return 0
        if status == TOLD_STATUS:
            return 1
        if self._is_ending() or not self._has_served:
            logger.error("the driver died, and the server with it %s", _end_of(status))
            return 1
        if self._succession.is_hopeless(time.monotonic()):
            logger.error("%d drivers in a row died soon after they began", MAX_SHORT_LIVES)
            return 1
        logger.error("driver lost, another one goes on %s", _end_of(status))
        self._again_s = time.monotonic()
        return self._begin_again()

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._orders.close()
        self._news.close()

    # ---------------------------------------------------------------------------- internals

    def _is_ending(self) -> bool:
        return self._stop is not None and self._stop.is_urgent

    def _begin_again(self) -> int | None:
        """Have another one go on as soon as there is room for it. Returns an exit status when the
        server ends without."""
        assert self._again_s is not None
        if self._is_ending():
            logger.error("the server ends without a driver")
            return 1
        if time.monotonic() < self._again_s:
            return None
        try:
            self._begin()
        except OSError as error:
            logger.error("driver not replaced, again in %g s reason=%s", RETRY_DELAY_S, error)
            self._again_s = time.monotonic() + RETRY_DELAY_S
            return None
        self._again_s = None
        assert self._ray_address is not None
        assert self._serve is not None
        self.use_ray(self._ray_address)
        self.serve(self._serve)
        if self._stop is not None:
            self._send(self._stop)
        return None

    def _begin(self) -> None:
        """Raises OSError: there is no descriptor or no process to be had, and nothing has begun."""
        orders, orders_end = Pipe(duplex=False)
        news_end, news = Pipe(duplex=False)
        ends = (orders.fileno(), news.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.home.driver", *map(str, ends)],
            stdin=subprocess.DEVNULL,
            pass_fds=ends,
            # Signals of the terminal are for the process that has started it.
            start_new_session=True,
        )
        self._orders, self._news = orders_end, news_end
        orders.close()
        news.close()
        self._succession.on_begun(time.monotonic())
        self._watch: ProcessWatch | None = None

    def _kill_if_halted(self) -> None:
        if self._watch is None and self._process.poll() is None:
            self._watch = watch_of_child(self._process.pid, STOPPED_TIMEOUT_S)
        is_halted = self._watch is not None and self._watch.why_halted() is not None
        is_late = self._urgent_until_s is not None and time.monotonic() > self._urgent_until_s
        if is_halted or is_late:
            # One that has ended on purpose keeps its status.
            self._process.kill()
            self._process.wait()

    def _send(self, order: Order) -> None:
        try:
            # As Ray packs it: a configuration has what pickle by itself refuses.
            self._orders.send_bytes(cloudpickle.dumps(order))
        except OSError:
            # It has died; its successor is told anew.
            return


def _end_of(status: int) -> str:
    return f"signal={-status}" if status < 0 else f"status={status}"
