"""Calls that come when the engine's steps have passed a fence."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sterna.transport.fences import FenceWaiter
from tests.transport.planes import WAIT_S, Gate

CPU = torch.device("cpu")


def test_calls_come_in_the_order_of_the_fences_each_when_its_own_has_passed() -> None:
    waiter, steps = FenceWaiter(CPU), Gate()
    fence: Any = SimpleNamespace(synchronize=steps.pass_through)
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in ("first", "second"):
        waiter.call_after(fence, lambda name=name: calls.put(name))
    steps.wait_for_arrival()
    waiter.call_after(None, lambda: calls.put("without a fence"))
    assert calls.get_nowait() == "without a fence"
    for name in ("first", "second"):
        assert calls.empty()
        steps.open()
        assert calls.get(timeout=WAIT_S) == name
    waiter.close()
    waiter.thread.join(WAIT_S)
    assert not waiter.thread.is_alive()


def test_a_fence_on_a_gpu_that_has_failed_counts_as_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The copy fails then. A call that never came would keep its migration waiting for ever."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    waiter = FenceWaiter(CPU)
    fence: Any = SimpleNamespace(synchronize=fail)
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(2):
        waiter.call_after(fence, lambda number=number: calls.put(number))
    assert [calls.get(timeout=WAIT_S) for _ in range(2)] == [0, 1]
    assert caplog.text.count("kv fence failed") == 2
    waiter.close()


def test_the_thread_that_waits_uses_the_gpu_of_its_steps_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several ranks it would make a context on the first one, for which no memory is left."""
    calls: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(torch.cuda, "set_device", calls.put)
    device = torch.device("cuda", 3)
    waiter = FenceWaiter(device)
    fence: Any = SimpleNamespace(synchronize=lambda: calls.put("waits"))
    waiter.call_after(fence, lambda: calls.put("called"))
    assert [calls.get(timeout=WAIT_S) for _ in range(3)] == [device, "waits", "called"]
    waiter.close()
