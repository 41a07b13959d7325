"""A closed door: who is inside finishes, and nobody else comes in."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest

from sterna.frontend.http.shutdown_gate import FETCH_S, Gate, Receive, Scope, Send
from tests.clocks import SkippingLoop, run_skipping, stands
from tests.frontend.http.opened import opened

NUM_TURNS = 10
"""Turns of the loop in which all that is due happens."""


class Kitchen:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1"):
            self.has_begun.set()
            await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def visitor(gate: Gate, root_path: str = "") -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(opened(gate, (), root_path)), base_url="http://sterna"
    ) as client:
        yield client


def test_whoever_is_inside_when_the_gate_closes_may_finish() -> None:
    async def scenario() -> None:
        kitchen = Kitchen()
        gate = Gate(kitchen)
        async with visitor(gate) as client:
            answer = asyncio.create_task(client.post("/v1/completions"))
            await kitchen.has_begun.wait()
            gate.close()
            refused = await client.post("/v1/completions")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["message"] == "the server is shutting down"
            kitchen.may_end.set()
            assert (await answer).text == "done"
            assert await gate.emptied(60.0)

    asyncio.run(scenario())


def test_after_the_time_the_gate_tells_how_many_are_still_inside() -> None:
    async def scenario() -> None:
        kitchen = Kitchen()
        gate = Gate(kitchen)
        async with visitor(gate) as client:
            answer = asyncio.create_task(client.post("/v1/completions"))
            await kitchen.has_begun.wait()
            gate.close()
            assert not await gate.emptied(0.001)
            assert gate.num_inside == 1
            kitchen.may_end.set()
            await answer

    asyncio.run(scenario())


async def turns() -> None:
    """Let happen what is due."""
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


class Background:
    """Responses in the background, as vLLM's server keeps their tasks."""

    def __init__(self, *response_ids: str) -> None:
        self.may_end = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        for each in response_ids:
            self.tasks[each] = task = asyncio.ensure_future(self._make())
            task.add_done_callback(partial(self._forget, each))

    async def _make(self) -> None:
        await self.may_end.wait()

    def _forget(self, response_id: str, _: asyncio.Task[None]) -> None:
        del self.tasks[response_id]


async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_response_in_the_background_is_finished_and_fetched() -> None:
    """Its request was answered when it was queued."""

    async def scenario(loop: SkippingLoop) -> None:
        background = Background("resp_1", "resp_2")
        gate = Gate(answer_at_once, background.tasks)
        async with visitor(gate) as client:
            assert (await client.post("/v1/responses")).status_code == 200
            gate.close()
            emptied = asyncio.create_task(gate.emptied(25.0))
            assert (await client.post("/v1/responses")).status_code == 503
            assert (await client.post("/v1/responses/resp_2/cancel")).status_code == 200
            assert (await client.get("/v1/responses/resp_1")).status_code == 200
            assert gate.num_inside == 2
            background.may_end.set()
            # Its client asks again some time after its end.
            await turns()
            assert not background.tasks
            assert (await client.get("/v1/responses/resp_1")).status_code == 200
            assert not emptied.done()
            loop.skipped_s += FETCH_S
            assert await emptied

    run_skipping(scenario, stands)


def test_a_response_that_ends_before_the_last_request_can_be_fetched() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        kitchen, background = Kitchen(), Background("resp_1")
        gate = Gate(kitchen, background.tasks)
        async with visitor(gate) as client:
            answer = asyncio.create_task(client.post("/v1/completions"))
            await kitchen.has_begun.wait()
            gate.close()
            emptied = asyncio.create_task(gate.emptied(25.0))
            await turns()
            background.may_end.set()
            await turns()
            loop.skipped_s += FETCH_S / 2
            kitchen.may_end.set()
            assert (await answer).text == "done"
            await turns()
            assert gate.num_inside == 0
            assert not emptied.done()
            loop.skipped_s += FETCH_S / 2
            assert await emptied

    run_skipping(scenario, stands)


def test_a_response_that_ended_just_before_the_gate_closes_can_be_fetched() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        background = Background("resp_1")
        gate = Gate(answer_at_once, background.tasks)
        async with visitor(gate) as client:
            assert (await client.post("/v1/responses")).status_code == 200
            background.may_end.set()
            await turns()
            assert gate.num_inside == 0
            gate.close()
            emptied = asyncio.create_task(gate.emptied(25.0))
            await turns()
            assert not emptied.done()
            loop.skipped_s += FETCH_S
            assert await emptied

    run_skipping(scenario, stands)


def test_a_response_in_the_background_is_cut_after_the_time() -> None:
    async def scenario() -> None:
        gate = Gate(answer_at_once, Background("resp_1").tasks)
        gate.close()
        assert not await gate.emptied(0.001)
        assert gate.num_inside == 1

    asyncio.run(scenario())


def test_the_time_to_fetch_a_response_is_part_of_that_to_finish_it() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        background = Background("resp_1")
        gate = Gate(answer_at_once, background.tasks)
        gate.close()
        emptied = asyncio.create_task(gate.emptied(FETCH_S / 2))
        background.may_end.set()
        await turns()
        assert gate.num_inside == 0
        loop.skipped_s += FETCH_S / 2
        assert await emptied

    run_skipping(scenario, stands)


@pytest.mark.parametrize("root_path", ["", "/behind/proxy"])
def test_a_closed_server_is_not_healthy_and_its_operators_can_look(root_path: str) -> None:
    async def scenario() -> None:
        gate = Gate(Kitchen())
        async with visitor(gate, root_path) as client:
            assert (await client.get(f"{root_path}/health")).status_code == 200
            gate.close()
            assert (await client.get(f"{root_path}/health")).status_code == 503
            assert (await client.get(f"{root_path}/admin/instances")).status_code == 200
            assert (await client.get(f"{root_path}/metrics")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(scenario())


def test_a_request_that_fails_has_left() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a plate fell")

    async def scenario() -> None:
        gate = Gate(fail)
        async with visitor(gate) as client:
            with suppress(RuntimeError):
                await client.post("/v1/completions")
            assert await gate.emptied(60.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "num_inside"),
    [
        ("/v1/models", 1),
        ("/tokenize", 1),
        ("/healthy", 1),
        ("/health", 0),
        ("/ping", 0),
        ("/load", 0),
        ("/version", 0),
        ("/metrics", 0),
        ("/admin/drain", 0),
    ],
)
def test_probes_scrapers_and_operators_are_no_work_that_is_to_be_finished(
    path: str, num_inside: int
) -> None:
    seen: list[int] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(gate.num_inside)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def scenario() -> None:
        async with visitor(gate) as client:
            await client.get(path)

    gate = Gate(answer)
    asyncio.run(scenario())
    assert seen == [num_inside]
    assert gate.num_inside == 0


def test_it_is_empty_when_the_last_has_left_and_not_when_the_first_has() -> None:
    async def scenario() -> None:
        kitchens = {"/v1/a": Kitchen(), "/v1/b": Kitchen()}

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await kitchens[scope["path"]](scope, receive, send)

        gate = Gate(answer)
        async with visitor(gate) as client:
            answers = {path: asyncio.create_task(client.get(path)) for path in kitchens}
            for path, num_left in (("/v1/a", 1), ("/v1/b", 0)):
                await kitchens[path].has_begun.wait()
                assert not await gate.emptied(0.0)
                kitchens[path].may_end.set()
                await answers[path]
                assert gate.num_inside == num_left
            assert await gate.emptied(60.0)

    asyncio.run(scenario())


def test_a_closed_gate_refuses_a_websocket_and_lets_the_server_shut_down() -> None:
    async def scenario() -> None:
        passed: list[str] = []
        said: list[MutableMapping[str, Any]] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            passed.append(scope["type"])

        async def receive() -> MutableMapping[str, Any]:
            raise AssertionError("something was read")

        async def send(message: MutableMapping[str, Any]) -> None:
            said.append(message)

        gate = Gate(application)
        gate.close()
        door = opened(gate)
        await door({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
        await door({"type": "lifespan"}, receive, send)
        assert passed == ["lifespan"]
        assert said == [{"type": "websocket.close", "code": 1012}]

    asyncio.run(scenario())


def test_a_gate_that_nobody_has_come_to_is_empty() -> None:
    async def scenario() -> bool:
        return await Gate(Kitchen()).emptied(0.0)

    assert asyncio.run(scenario())
