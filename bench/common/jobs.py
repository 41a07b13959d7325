"""Worker processes for many small jobs, with an orderly end on Ctrl-C.

Ctrl-C goes to all processes of the terminal's group, and SIGTERM often does. The workers ignore
both signals from their start. The main process stops submitting jobs, waits for the running ones,
and can still report the results of the finished ones.
"""

import contextlib
import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sterna.errors import SternaError

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C has ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_GARBAGE_THRESHOLDS = (20_000, 20, 50)
"""Simulations make many objects and few reference cycles: collecting these less often than by
default saves a tenth of the time."""


class Workers(Protocol):
    """The worker processes: the part of `ProcessPoolExecutor` that is used here."""

    def map(
        self, do: Callable[[Job], Outcome], jobs: Iterable[Job], /, *, chunksize: int = 1
    ) -> Iterator[Outcome]:
        """Yield the outcomes, in order."""


class WorkerDiedError(SternaError):
    """One of the processes has ended in the middle of its jobs."""


@dataclass(slots=True)
class Stop:
    """Whether an end was requested, by Ctrl-C or SIGTERM."""

    is_wanted: bool = False


@contextlib.contextmanager
def workers(num_workers: int) -> Iterator[tuple[Workers, Stop]]:
    """Processes for jobs; they end with the block, after their current jobs. Only for the main
    thread.

    Raises:
        WorkerDiedError: one of them was killed.
    """
    stop = Stop()
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    # Child processes inherit ignored signals.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=gc.set_threshold,
        initargs=_GARBAGE_THRESHOLDS,
    )
    for _ in range(num_workers):
        # The pool starts a process for each job, up to its maximum.
        pool.submit(gc.get_threshold)

    def want_stop(*_: object) -> None:
        stop.is_wanted = True

    for each in _SIGNALS:
        signal.signal(each, want_stop)
    try:
        yield pool, stop
    except BrokenProcessPool as error:
        # The pool sends the others a signal that they ignore, and waits for their ends.
        for process in multiprocessing.active_children():
            process.kill()
        raise WorkerDiedError(
            "a worker process was killed, perhaps because the machine has no memory left; "
            "run it again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        for each, handler in before.items():
            signal.signal(each, handler)
