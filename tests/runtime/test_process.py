"""A process is known for certain to have ended, and is ended for certain."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sterna.progress import ProcessIdentity, ProcessState
from sterna.runtime.process import end_process, state_of_process

SLEEPS = "import time; time.sleep(1000)"
SPAWNS = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); "
    "print(child.pid, flush=True); child.wait()"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """One that sleeps, and has started another that does."""
    process = subprocess.Popen([sys.executable, "-c", SPAWNS], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def identity(process_id: int) -> ProcessIdentity:
    with open(f"/proc/{process_id}/stat") as stat:
        return ProcessIdentity("here", process_id, int(stat.read().split()[21]))


def child_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_a_process_runs_is_stopped_and_goes_on(process: subprocess.Popen[str]) -> None:
    known = identity(process.pid)
    assert state_of_process(known) is ProcessState.RUNNING
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert state_of_process(known) is ProcessState.STOPPED
    os.kill(process.pid, signal.SIGCONT)
    assert state_of_process(known) is ProcessState.RUNNING


def test_a_process_that_nobody_has_waited_for_is_gone(process: subprocess.Popen[str]) -> None:
    known = identity(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert state_of_process(known) is ProcessState.GONE
    process.wait()
    assert state_of_process(known) is ProcessState.GONE


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    own = identity(os.getpid())
    other = ProcessIdentity(own.node_id, own.process_id, own.started_ticks - 1)
    assert state_of_process(other) is ProcessState.GONE
    asyncio.run(end_process(other))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_ended_process_has_ended_with_all_that_it_started(
    process: subprocess.Popen[str], is_stopped: bool
) -> None:
    """ "Fenced": also one that is stopped, and would go on later."""
    child = identity(child_of(process))
    known = identity(process.pid)
    if is_stopped:
        os.kill(process.pid, signal.SIGSTOP)
    asyncio.run(end_process(known))
    assert state_of_process(known) is ProcessState.GONE
    assert state_of_process(child) is ProcessState.GONE
    assert process.wait() == -signal.SIGKILL


def test_a_process_that_has_ended_by_itself_need_not_be_ended(
    process: subprocess.Popen[str],
) -> None:
    known = identity(process.pid)
    os.kill(child_of(process), signal.SIGKILL)
    process.wait()
    asyncio.run(end_process(known))
