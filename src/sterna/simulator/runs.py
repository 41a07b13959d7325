"""Many simulations, spread over the cores.

A process executes one run at a time, and the results of a run depend on its job alone: they are
those of running the jobs one after the other, bit for bit (except for `wall_s`, the duration of a
run).
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any, TypeVar

from sterna.errors import SternaError
from sterna.metrics.records import ClusterRecord, Records
from sterna.metrics.summary import Summary, summarize
from sterna.simulator.config import SimulationConfig
from sterna.simulator.recorded import Recorded, simulate_recorded
from sterna.simulator.run_progress import simulate_reporting
from sterna.simulator.simulation import simulate
from sterna.types import Priority
from sterna.workload.catalog import Workload, build_trace

T = TypeVar("T")


class WorkerDeathError(SternaError):
    """A process that ran simulations ended by itself; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run to be executed.

    Attributes:
        label: the name of its policy in reports; by default the policy's own name.
    """

    workload: Workload
    config: SimulationConfig
    label: str | None = None

    @property
    def policy(self) -> str:
        """The name of the policy in reports."""
        return self.config.policy.name if self.label is None else self.label


@dataclass(frozen=True, slots=True, eq=False)
class SimulationRun:
    """One finished run."""

    job: Job
    records: Records
    cluster: ClusterRecord

    def summary(self, priority: Priority | None = None) -> Summary:
        """The summary of the run, or of one class of its requests."""
        return summarize(self.records, self.cluster, priority=priority)


def run(
    job: Job,
    *,
    on_progress: Callable[[float], None] | None = None,
    recorded: Recorded | None = None,
) -> SimulationRun:
    """Run one job in this process.

    Args:
        on_progress: called periodically with the fraction of its requests that have ended; the
            results are the same.
        recorded: the recording to write; the results are the same.

    Raises:
        ConfigurationError: the workload cannot be built, an instance cannot serve it, or the
            recording cannot be written.
    """
    trace = build_trace(job.workload)

    def report(num_ended: int) -> None:
        if on_progress is not None:
            on_progress(num_ended / len(trace))

    if recorded is not None:
        return SimulationRun(job, *simulate_recorded(trace, job.config, recorded, report))
    if on_progress is None:
        return SimulationRun(job, *simulate(trace, job.config))
    return SimulationRun(job, *simulate_reporting(trace, job.config, report))


def run_all(
    jobs: Sequence[Job],
    *,
    num_processes: int | None = None,
    on_done: Callable[[int], None] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> list[SimulationRun]:
    """Run all jobs; returns their runs in the order of the jobs. See `map_runs`."""
    return map_runs(
        jobs, _whole, num_processes=num_processes, on_done=on_done, on_progress=on_progress
    )


def map_runs(
    jobs: Sequence[Job],
    reduce: Callable[[SimulationRun], T],
    *,
    num_processes: int | None = None,
    on_done: Callable[[int], None] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> list[T]:
    """Run all jobs; returns the result of `reduce` for each run, in the order of the jobs.

    A script that calls this from its top level must do so under `if __name__ == "__main__":`,
    because other processes import it.

    Args:
        reduce: called in the process that ran the job, so that only its result is sent back; a
            function of a module.
        num_processes: maximum number of processes; by default the number of cores that this
            process may use. With one, or for one job, everything runs in this process.
        on_done: called in this process with the index of each job that is done, in the order of
            their ends.
        on_progress: called periodically, if everything runs in this process, with the fraction of
            the requests that have ended in the run under way.

    Raises:
        ConfigurationError: a job cannot be run; the others are given up.
        WorkerDeathError: a process ended by itself.
    """
    num_cores = len(os.sched_getaffinity(0))
    num_processes = min(len(jobs), num_cores if num_processes is None else num_processes)
    if num_processes > 1:
        return _map_in_processes(jobs, reduce, num_processes, on_done)
    results = []
    for index, job in enumerate(jobs):
        results.append(reduce(run(job, on_progress=on_progress)))
        if on_done is not None:
            on_done(index)
    return results


def _whole(done: SimulationRun) -> SimulationRun:
    return done


# ------------------------------------------------------------------------------------ processes


def _map_in_processes(
    jobs: Sequence[Job],
    reduce: Callable[[SimulationRun], T],
    num_processes: int,
    on_done: Callable[[int], None] | None,
) -> list[T]:
    with _workers(num_processes, reduce) as workers:
        results: dict[int, T] = {}
        busy: dict[Connection, int] = {}
        for index, connection in enumerate(workers):
            _send(connection, jobs[index])
            busy[connection] = index
        num_begun = len(workers)
        while busy:
            ready = wait(list(busy))
            for connection in [each for each in busy if each in ready]:
                index = busy.pop(connection)
                results[index] = _receive(connection)
                if num_begun < len(jobs):
                    _send(connection, jobs[num_begun])
                    busy[connection] = num_begun
                    num_begun += 1
                if on_done is not None:
                    on_done(index)
    return [results[index] for index in range(len(jobs))]


def _send(connection: Connection, job: Job) -> None:
    """Give a worker its next job."""
    with _deaths_named():
        connection.send(job)


def _receive(connection: Connection) -> Any:
    """Return the result of a worker's job, or raise its error."""
    with _deaths_named():
        result, error = connection.recv()
    if error is not None:
        raise error
    return result


@contextmanager
def _deaths_named() -> Iterator[None]:
    """Say what to do where a worker has ended by itself."""
    try:
        yield
    # A connection is reset where a worker has left what it was sent unread.
    except (EOFError, ConnectionError):
        raise WorkerDeathError(
            "a process that ran simulations ended by itself. If it was killed, perhaps for want of "
            "memory, run fewer at once; if it could not import the script that started it, the "
            'script must begin its work under `if __name__ == "__main__":`'
        ) from None


@contextmanager
def _workers(
    num_processes: int, reduce: Callable[[SimulationRun], Any]
) -> Iterator[list[Connection]]:
    """Processes that wait for jobs; they are killed at the end of the context."""
    # Forked processes would inherit locks that threads of a progress display hold.
    context = multiprocessing.get_context("spawn")
    # If it were started together with the first worker, it would unblock interrupts.
    resource_tracker.ensure_running()
    started: list[tuple[SpawnProcess, Connection]] = []
    try:
        with _interrupts_blocked():
            for _ in range(num_processes):
                started.append(_start(context, reduce))
        yield [connection for _, connection in started]
    finally:
        for process, connection in started:
            process.kill()
            connection.close()
        for process, _ in started:
            process.join()


def _start(
    context: SpawnContext, reduce: Callable[[SimulationRun], Any]
) -> tuple[SpawnProcess, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, reduce), daemon=True)
    process.start()
    # Else the connection of a worker that dies would stay open in this process.
    theirs.close()
    return process, ours


def _work(connection: Connection, reduce: Callable[[SimulationRun], Any]) -> None:
    """Main function of a worker: run jobs until it is killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The other end is closed only when no more results are needed.
    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(_outcome(connection.recv(), reduce))


def _outcome(job: Job, reduce: Callable[[SimulationRun], T]) -> tuple[T | None, Exception | None]:
    try:
        return reduce(run(job)), None
    except SternaError as error:
        return None, error
    except Exception as error:
        # The traceback does not travel with the error.
        error.add_note(traceback.format_exc())
        return None, error


def _end_with_parent() -> None:
    """End this process with its parent: a long simulation would otherwise go on after it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, which a terminal sends to all processes, in the processes started meanwhile.

    They inherit the mask; the parent ends them if it is interrupted.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _interrupts_postponed():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts_postponed() -> Iterator[None]:
    """Handle an interrupt only at the end of the context.

    The mask is that of one thread. Another thread, such as a progress display's, may receive the
    signal, whose handler then runs in the main thread nevertheless.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            signal.raise_signal(signal.SIGINT)


def _view(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


# Configurations hold read-only views of mappings, which processes cannot send by themselves.
ForkingPickler.register(MappingProxyType, lambda view: (_view, (dict(view),)))
