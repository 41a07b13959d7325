"""Event loops with a clock that the test turns on: time-outs pass, and no test waits for them."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose time is that of a clock, plus what the test has skipped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.skipped_s = 0.0
        self._clock = clock
        super().__init__()

    def time(self) -> float:
        return self._clock() + self.skipped_s


def run_skipping(
    test: Callable[[SkippingLoop], Coroutine[Any, Any, T]],
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Run what a test does on such a loop."""
    with asyncio.Runner(loop_factory=lambda: SkippingLoop(clock)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        return runner.run(test(loop))


def stands() -> float:
    """A clock on which nothing passes but what the test skips."""
    return 0.0
