"""Ranks with a process of their own end with their instance."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from sterna.runtime.processes.process import identity_of, state_of_process
from sterna.supervisor.failure_detector import ProcessIdentity, ProcessState

pytest.importorskip("vllm")

from sterna.engine.vllm.worker import end_with_parent

WAIT_S = 60.0

_context = multiprocessing.get_context("fork")


def _rank(pipe: Connection, instance: int) -> None:
    end_with_parent(instance)
    pipe.send(os.getpid())
    signal.pause()


def _late_rank(pipe: Connection, instance: int) -> None:
    pipe.send(os.getpid())
    while os.getppid() == instance:
        time.sleep(0.005)
    end_with_parent(instance)
    signal.pause()


def _instance(pipe: Connection, rank: Callable[[Connection, int], None]) -> None:
    _context.Process(target=rank, args=(pipe, os.getpid())).start()
    signal.pause()


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[tuple[BaseProcess, ProcessIdentity]]:
    """An instance and its rank."""
    ours, theirs = _context.Pipe()
    instance = _context.Process(target=_instance, args=(theirs, request.param))
    instance.start()
    assert ours.poll(WAIT_S)
    rank = identity_of(ours.recv())
    assert rank is not None
    yield instance, rank
    instance.kill()
    instance.join()
    if state_of_process(rank) is not ProcessState.GONE:
        os.kill(rank.process_id, signal.SIGKILL)


@pytest.mark.parametrize("processes", [_rank], indirect=True)
def test_a_rank_that_stands_still_ends_with_its_instance(
    processes: tuple[BaseProcess, ProcessIdentity],
) -> None:
    """It hears of nothing itself, and would keep its GPU."""
    instance, rank = processes
    os.kill(rank.process_id, signal.SIGSTOP)
    _until(rank, ProcessState.STOPPED)
    instance.kill()
    _until(rank, ProcessState.GONE)


@pytest.mark.parametrize("processes", [_late_rank], indirect=True)
def test_a_rank_ends_whose_instance_has_ended_before(
    processes: tuple[BaseProcess, ProcessIdentity],
) -> None:
    instance, rank = processes
    instance.kill()
    instance.join()
    _until(rank, ProcessState.GONE)


def _until(process: ProcessIdentity, state: ProcessState) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while state_of_process(process) is not state:
        assert time.monotonic() < deadline_s, f"it is {state_of_process(process)}"
        time.sleep(0.005)
