"""Outputs tell of their pace where they belong to a stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from sterna.frontend.http.request_context import (
    AnsweredStream,
    current,
    entered,
    is_taken_over,
    notify_let_in,
)
from sterna.frontend.resumable.paced_outputs import paced

NAME = "cmpl-tern-0"


def answering(
    stream_id: str, *, is_taken_over: bool, on_let_in: Callable[[], None]
) -> AbstractContextManager[None]:
    """What is called within answers a request of this stream."""
    stream = AnsweredStream(stream_id, is_taken_over, on_let_in)
    return entered(replace(current(), stream=stream))


class Notes:
    """A pace that notes what it is told, and paces what it is to."""

    def __init__(self, serial: int | None = 7) -> None:
        self._serial = serial
        self.told: list[tuple[object, ...]] = []

    def expect(self, stream_id: str, name: str, *, is_repeatable: bool) -> int | None:
        self.told.append(("expect", stream_id, name, is_repeatable))
        return self._serial

    def on_asked(self, name: str, serial: int) -> None:
        self.told.append(("asked", name, serial))

    def on_taken(self, name: str, serial: int) -> None:
        self.told.append(("taken", name, serial))

    def on_left(self, name: str, serial: int) -> None:
        self.told.append(("left", name, serial))


async def outputs(closed: list[str]) -> AsyncGenerator[int, None]:
    try:
        yield 1
        yield 2
    finally:
        closed.append("closed")


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_each_output_is_asked_for_and_taken_until_all_are_there(is_repeatable: bool) -> None:
    async def scenario() -> list[int]:
        with answering("tern", is_taken_over=False, on_let_in=lambda: None):
            its = paced(notes, NAME, outputs(closed), is_repeatable=is_repeatable)
        return [each async for each in its]

    notes, closed = Notes(), []
    assert asyncio.run(scenario()) == [1, 2]
    asked, taken, left = (("asked", NAME, 7), ("taken", NAME, 7), ("left", NAME, 7))
    expected = ("expect", "tern", NAME, is_repeatable)
    assert notes.told == [expected, asked, taken, asked, taken, asked, left]
    assert closed == ["closed"]


def test_who_closes_the_outputs_ends_the_engine_request() -> None:
    async def scenario() -> None:
        with answering("tern", is_taken_over=False, on_let_in=lambda: None):
            its = paced(notes, NAME, outputs(closed), is_repeatable=True)
        assert await anext(its) == 1
        await its.aclose()
        assert closed == ["closed"]
        assert notes.told[-1] == ("left", NAME, 7)

    notes: Notes = Notes()
    closed: list[str] = []
    asyncio.run(scenario())


def test_what_belongs_to_no_stream_or_is_not_paced_is_as_it_was() -> None:
    async def scenario() -> None:
        its = outputs([])
        not_paced = Notes(serial=None)
        assert paced(not_paced, NAME, its, is_repeatable=True) is its
        assert not_paced.told == []
        with answering("tern", is_taken_over=False, on_let_in=lambda: None):
            assert paced(not_paced, NAME, its, is_repeatable=True) is its
        assert not_paced.told == [("expect", "tern", NAME, True)]

    asyncio.run(scenario())


def test_who_answers_is_known_within_and_not_behind() -> None:
    let_in: list[str] = []
    assert not is_taken_over()
    notify_let_in()
    with answering("tern", is_taken_over=True, on_let_in=lambda: let_in.append("tern")):
        assert is_taken_over()
        with answering("gull", is_taken_over=False, on_let_in=lambda: let_in.append("gull")):
            assert not is_taken_over()
            notify_let_in()
        assert is_taken_over()
        notify_let_in()
    assert not is_taken_over()
    assert let_in == ["gull", "tern"]
