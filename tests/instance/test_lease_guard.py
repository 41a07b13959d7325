"""A process whose lease has ended is gone, whatever it was doing, and does nothing before."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from sterna.instance.lease_guard import LeaseGuard

HANG_S = 60.0
LEASE_S = 5.0
"""A process that is to be answered, or to say something, within its lease has that much time."""

BEGIN = f"""
import subprocess, sys, time
from sterna.instance.lease_guard import LeaseGuard
guard = LeaseGuard("i7", {LEASE_S})
"""


class Guarded:
    """A process with a guard, and what it prints."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        """Return status and output when it has ended."""
        stdout, stderr = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def processes() -> Iterator[list[Guarded]]:
    processes: list[Guarded] = []
    yield processes
    for each in processes:
        each.process.kill()
        each.process.wait()


def begin(processes: list[Guarded], script: str) -> Guarded:
    processes.append(Guarded(script))
    return processes[-1]


@pytest.mark.slow
def test_a_process_that_nobody_answers_ends_with_all_that_it_has_started(
    processes: list[Guarded],
) -> None:
    guarded = begin(
        processes,
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print(child.pid, flush=True)\n"
        # As a loop that hangs.
        "time.sleep(1000)",
    )
    child = psutil.Process(int(guarded.line()))
    status, _, errors = guarded.end()
    assert status == 1
    assert "no supervisor has answered within its lease instance=i7" in errors
    _, alive = psutil.wait_procs([child], HANG_S)
    assert not alive


@pytest.mark.slow
def test_a_process_without_descriptors_ends_with_all_that_it_has_started(
    processes: list[Guarded],
) -> None:
    """Its supervisor, which cannot reach it, has given its requests to others."""
    guarded = begin(
        processes,
        "from tests.descriptors import descriptors_left\n"
        "children = [subprocess.Popen(['sleep', '1000']) for _ in range(2)]\n"
        "print(*[each.pid for each in children], flush=True)\n"
        "with descriptors_left(0):\n"
        "    time.sleep(1000)",
    )
    children = [psutil.Process(int(each)) for each in guarded.line().split()]
    try:
        assert guarded.end()[0] == 1
        _, alive = psutil.wait_procs(children, HANG_S)
        assert not alive
    finally:
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.slow
def test_a_process_that_is_answered_lives_on(processes: list[Guarded]) -> None:
    """For twice its lease; then it says so and ends by itself."""
    guarded = begin(
        processes,
        "for _ in range(20):\n"
        f"    guard.on_answer(guard.now_s()); time.sleep({LEASE_S} / 10); guard.check()\n"
        "print('well'); sys.stdout.flush(); guard.on_answer(guard.now_s())",
    )
    assert guarded.end()[:2] == (0, "well\n")


def numbers(lines: Sequence[str]) -> list[float]:
    return [float(each) for each in lines if each]


@pytest.mark.slow
def test_a_process_that_was_stopped_until_its_lease_had_ended_does_nothing_more(
    processes: list[Guarded],
) -> None:
    """When it goes on, its engine's thread may be quicker than the one that watches the lease."""
    guarded = begin(
        processes,
        "while True:\n"
        "    now_s = guard.now_s(); guard.check(); print(now_s, flush=True); time.sleep(0.005)",
    )
    began_s = float(guarded.line())
    os.kill(guarded.process.pid, signal.SIGSTOP)
    while LeaseGuard.now_s() < began_s + LEASE_S + 0.2:
        time.sleep(0.05)
    os.kill(guarded.process.pid, signal.SIGCONT)
    status, output, _ = guarded.end()
    assert status == 1
    # What it printed was all decided upon before.
    assert all(each < began_s + LEASE_S for each in numbers(output.splitlines()))
