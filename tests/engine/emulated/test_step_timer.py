"""Steps end when their time has passed, and not before."""

import asyncio
import os
import time

import pytest

from sterna.engine.emulated.step_timer import StepTimer
from tests.descriptors import descriptors_left
from tests.engine.emulated.test_driver import keep_the_loop_busy
from tests.loops import NewLoop, on_both_loops, run_on


class Calls:
    """A timer of the running loop, and the times of its calls."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._called = asyncio.Event()
        self.timer = StepTimer(asyncio.get_running_loop(), self._on_due)

    async def next(self) -> float:
        await self._called.wait()
        self._called.clear()
        return self.times_s[-1]

    def _on_due(self) -> None:
        assert not self.timer.is_set
        self.times_s.append(time.monotonic())
        self._called.set()


@on_both_loops
def test_it_calls_once_for_each_deadline_and_never_early(new_loop: NewLoop) -> None:
    async def test() -> None:
        calls = Calls()
        for wait_s in (0.0001, 0.001, 0.0123, 0.05):
            deadline_s = time.monotonic() + wait_s
            calls.timer.set(deadline_s)
            assert calls.timer.is_set
            assert await calls.next() >= deadline_s
        assert len(calls.times_s) == 4
        calls.timer.close()

    run_on(new_loop, test)


@on_both_loops
@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 1e-9])
def test_a_deadline_that_has_passed_is_due_at_once(new_loop: NewLoop, deadline_s: float) -> None:
    async def test() -> None:
        calls = Calls()
        for _ in range(3):
            calls.timer.set(deadline_s)
            await calls.next()
        calls.timer.close()

    run_on(new_loop, test)


@on_both_loops
def test_another_deadline_takes_the_place_of_the_first(new_loop: NewLoop) -> None:
    async def test() -> None:
        calls = Calls()
        calls.timer.set(time.monotonic() + 1_000)
        deadline_s = time.monotonic() + 0.01
        calls.timer.set(deadline_s)
        assert await calls.next() >= deadline_s
        # It was due, and the loop has not seen that yet.
        calls.timer.set(time.monotonic() + 0.001)
        keep_the_loop_busy(0.01)
        deadline_s = time.monotonic() + 0.05
        calls.timer.set(deadline_s)
        assert await calls.next() >= deadline_s
        assert len(calls.times_s) == 2
        calls.timer.close()

    run_on(new_loop, test)


@on_both_loops
def test_a_closed_one_does_not_call_and_keeps_no_descriptor(new_loop: NewLoop) -> None:
    async def test() -> None:
        before = os.listdir("/proc/self/fd")
        calls, other = Calls(), Calls()
        calls.timer.set(time.monotonic() + 0.01)
        other.timer.set(time.monotonic() + 0.02)
        calls.timer.close()
        calls.timer.close()
        assert not calls.timer.is_set
        await other.next()
        assert calls.times_s == []
        other.timer.close()
        assert os.listdir("/proc/self/fd") == before

    run_on(new_loop, test)


def test_without_a_descriptor_left_there_is_an_error() -> None:
    async def test() -> None:
        with descriptors_left(0), pytest.raises(OSError, match="Too many open files"):
            StepTimer(asyncio.get_running_loop(), lambda: None)

    run_on(asyncio.new_event_loop, test)
