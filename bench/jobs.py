"""Many small jobs in several processes, and an end by Ctrl-C that leaves nothing behind.

Ctrl-C goes to all processes of the terminal's group. Those that do the jobs ignore it, from before
they begin: whoever has begun them stops giving out jobs, ends them, and can still say what came of
those that are done.
"""

import contextlib
import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C has ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_GARBAGE_THRESHOLDS = (20_000, 20, 50)
"""Simulations make many objects and keep few in circles: looking for these less often than by
default saves a tenth of the time."""


class Workers(Protocol):
    """The processes; of `multiprocessing.pool.Pool` what is used here."""

    def map(
        self, do: Callable[[Job], Outcome], jobs: Iterable[Job], chunksize: int | None = None
    ) -> list[Outcome]:
        """Return all outcomes, in order."""

    def imap(
        self, do: Callable[[Job], Outcome], jobs: Iterable[Job], chunksize: int = 1
    ) -> Iterator[Outcome]:
        """Yield the outcomes, in order."""


@dataclass(slots=True)
class Stop:
    """Whether somebody wants an end, by Ctrl-C or SIGTERM."""

    is_wanted: bool = False


@contextlib.contextmanager
def workers(num_workers: int) -> Iterator[tuple[Workers, Stop]]:
    """Processes for jobs; they end with the block, whatever they are at. To be used by the main
    thread."""
    stop = Stop()
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    # A process inherits that a signal is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = multiprocessing.get_context("spawn").Pool(
        num_workers, initializer=gc.set_threshold, initargs=_GARBAGE_THRESHOLDS
    )

    def want_stop(*_: object) -> None:
        stop.is_wanted = True

    for each in _SIGNALS:
        signal.signal(each, want_stop)
    try:
        yield pool, stop
    finally:
        # Not to be cut short: the pool's semaphores would stay.
        pool.terminate()
        pool.join()
        for each, handler in before.items():
            signal.signal(each, handler)
