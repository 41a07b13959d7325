"""A process is known for certain to have ended, and is ended for certain."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from sterna.runtime.home.driver_process import DriverProcess
from sterna.runtime.home.ray_head import Gcs
from sterna.runtime.processes.process import ProcessWatch, end_process, state_of_process
from sterna.supervisor.failure_detector import ProcessIdentity, ProcessState
from tests.descriptors import descriptors_left

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


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_gone(
    process: subprocess.Popen[str],
) -> None:
    known = identity(process.pid)
    with descriptors_left(0):
        assert state_of_process(known) is ProcessState.UNSEEN
    assert state_of_process(known) is ProcessState.RUNNING


def test_who_looks_without_descriptors_says_so_once_and_gives_nobody_up(
    process: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    watch = ProcessWatch(identity(process.pid), stopped_timeout_s=1.0)
    with descriptors_left(0):
        assert [watch.why_halted() for _ in range(3)] == [None, None, None]
    assert caplog.text.count("process cannot be looked at") == 1
    process.kill()
    process.wait()
    assert watch.why_halted() == "its process has ended"


def test_without_descriptors_a_process_is_ended_when_there_are_some_again(
    process: subprocess.Popen[str],
) -> None:
    """Nothing is concluded from an error: who may still act has not ended."""
    child = identity(child_of(process))
    known = identity(process.pid)

    async def test() -> None:
        with descriptors_left(0):
            ending = asyncio.create_task(end_process(known))
            await asyncio.wait((ending,), timeout=0.05)
            assert not ending.done()
        await ending

    asyncio.run(test())
    assert state_of_process(known) is ProcessState.GONE
    assert state_of_process(child) is ProcessState.GONE


def test_the_gcs_is_not_started_again_because_it_cannot_be_looked_at(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the first look nor later."""
    node = SimpleNamespace(all_processes={"gcs_server": [SimpleNamespace(process=process)]})
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    gcs = Gcs()
    with descriptors_left(0):
        assert not gcs.keep_up(0.0)
    assert not gcs.keep_up(0.0)
    with descriptors_left(0):
        assert not gcs.keep_up(0.0)


@pytest.mark.slow
def test_the_driver_is_not_replaced_because_it_cannot_be_looked_at() -> None:
    driver = DriverProcess({}, "")
    try:
        with descriptors_left(0):
            assert driver.keep_up() is None
        assert driver.keep_up() is None
        with descriptors_left(0):
            assert driver.keep_up() is None
    finally:
        driver.close()
