"""A closed door: who is inside finishes, and nobody else comes in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from sterna.frontend.http.shutdown_gate import Gate, Receive, Scope, Send
from tests.frontend.http.opened import opened


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
