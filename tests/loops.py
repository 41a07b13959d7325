"""Tests of what hangs on an asyncio loop: on asyncio's own, and on uvloop's."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvloop

HANG_S = 60.0
"""Limit of a test's waits; a test that reaches it hangs."""

NewLoop = Callable[[], asyncio.AbstractEventLoop]

on_both_loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run_on(new_loop: NewLoop, test: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run the test on a loop of this kind."""

    async def limited() -> None:
        async with asyncio.timeout(HANG_S):
            await test()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(limited())
