"""The frames of a front end's watchers: asked for while there are any, and shared."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sterna.errors import UnansweredError
from sterna.frontend.operators.watchers import MAX_UNREAD_FRAMES, Watch
from sterna.priority_classes import DEFAULT_CLASSES
from sterna.types import InstanceId

I0, I1 = InstanceId("i0"), InstanceId("i1")


def instance(name: str, running: int = 1) -> dict[str, Any]:
    load = {"total_tokens": 1000, "used_tokens": 160, "freeness": 5.0}
    return {"id": name, "state": "running", **load, "running": running, "queuing": 0, "note": None}


def request(name: str, status: str = "running") -> dict[str, Any]:
    return {"id": name, "class": "high", "used_tokens": 160, "status": status}


class ScriptedOperators:
    """Answers as told, and counts the frames that are asked for."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.instances: list[dict[str, Any]] | Exception = [instance(I0)]
        self.requests = {I0: [request("r1")]}

    async def list_instances(self) -> list[dict[str, Any]]:
        self.num_asked += 1
        if isinstance(self.instances, Exception):
            raise self.instances
        return self.instances

    async def requests_by_instance(self, timeout_s: float) -> dict[InstanceId, Any]:
        return self.requests

    async def recent(self, last_s: float, timeout_s: float) -> dict[str, Any]:
        moved = {"time_s": 5.0, "request": "r1", "event": "preempted", "instance": "i0"}
        return {"decisions": [moved], "ttft_s": [0.25], "tpot_s": [], "waiting": 3}


@pytest.fixture
def operators() -> ScriptedOperators:
    return ScriptedOperators()


def watch_of(operators: ScriptedOperators) -> Watch:
    return Watch(operators, "tern-7b", DEFAULT_CLASSES)  # type: ignore[arg-type]


def parsed(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    found: dict[str, Any] = json.loads(event[6:])
    return found


def test_a_stream_is_a_header_and_frames(operators: ScriptedOperators) -> None:
    async def run() -> None:
        events = watch_of(operators).events()
        header = parsed(await anext(events))
        assert header["title"] == "tern-7b"
        assert header["classes"][0] == ["normal", 0]
        frame = parsed(await anext(events))
        (shown,) = frame["instances"]
        index = [name for name, _ in header["classes"]].index("high")
        assert (shown["id"], shown["requests"]) == ("i0", [[1, 160, 2 * index]])
        assert (frame["held"], frame["ttft"], frame["error"]) == (3, [0.25, 0.25], None)
        assert frame["decisions"] == [[5.0, "r1", "preempted", "preempted on i0"]]
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_other_actors_are_asked_while_there_are_watchers(operators: ScriptedOperators) -> None:
    async def run() -> None:
        watch = watch_of(operators)
        await asyncio.sleep(0)
        assert operators.num_asked == 0
        first, second = watch.events(), watch.events()
        await asyncio.gather(anext(first), anext(second))
        assert parsed(await anext(first)) == parsed(await anext(second))
        assert operators.num_asked == 1, "one frame for all watchers"
        for each in (first, second):
            await each.aclose()  # type: ignore[attr-defined]
        assert watch.num_watchers == 0
        await asyncio.sleep(0)
        assert [each for each in asyncio.all_tasks() if each is not asyncio.current_task()] == []

    asyncio.run(run())


def test_a_scheduler_that_does_not_answer_is_shown_over_what_it_said_last(
    operators: ScriptedOperators,
) -> None:
    async def run() -> None:
        watch = watch_of(operators)
        await watch.frame()
        operators.instances = UnansweredError("there is no scheduler at this moment; try again")
        frame = await watch.frame()
        assert [each["id"] for each in frame["instances"]] == ["i0"]
        assert frame["error"] == "there is no scheduler at this moment; try again"

    asyncio.run(run())


def test_an_instance_that_does_not_answer_keeps_the_requests_that_it_had(
    operators: ScriptedOperators,
) -> None:
    async def run() -> None:
        watch = watch_of(operators)
        operators.instances = [instance(I0), instance(I1)]
        operators.requests = {I0: [request("r1")], I1: [request("r2", "queuing")]}
        await watch.frame()
        operators.requests = {I0: []}
        frame = await watch.frame()
        assert [len(each["requests"]) for each in frame["instances"]] == [0, 1]
        assert frame["instances"][1]["requests"][0][2] & 1 == 1

    asyncio.run(run())


def test_a_watcher_that_does_not_read_is_cut_off(operators: ScriptedOperators) -> None:
    async def run() -> None:
        watch = watch_of(operators)
        slow = watch.events()
        await anext(slow)
        frame = parsed(await anext(slow))
        assert frame["t"] > 0
        for _ in range(MAX_UNREAD_FRAMES + 3):
            watch.send(b"data: {}\n\n")
        left = [each async for each in slow]
        assert len(left) <= MAX_UNREAD_FRAMES + 1
        assert watch.num_watchers == 0

    asyncio.run(run())


def test_after_an_error_the_next_watcher_begins_anew(operators: ScriptedOperators) -> None:
    async def run() -> None:
        watch = watch_of(operators)
        operators.instances = RuntimeError("a bug")
        first = watch.events()
        await anext(first)
        assert [each async for each in first] == []
        operators.instances = [instance(I0)]
        second = watch.events()
        await anext(second)
        assert parsed(await anext(second))["instances"]
        await second.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_streams_end_when_the_server_does(operators: ScriptedOperators) -> None:
    async def run() -> None:
        watch = watch_of(operators)
        events: AsyncIterator[bytes] = watch.events()
        await anext(events)
        watch.close()
        left = [each async for each in events]
        assert len(left) <= 1
        assert watch.num_watchers == 0
        assert [each async for each in watch.events()] == [], "there is no other one"

    asyncio.run(run())
