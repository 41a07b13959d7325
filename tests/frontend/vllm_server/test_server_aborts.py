"""Aborts by vLLM's routes for them, on a server with several front ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from sterna.messages.actors import AbortNamed, AbortRequests, FrontendMember
from sterna.types import FrontendId
from tests.frontend.scripted import ME, Actor
from tests.frontend.served import Scenario, Served, one_server

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with one_server() as run:
            yield run


@asynccontextmanager
async def another_front_end(served: Served) -> AsyncIterator[Actor]:
    other = Actor(served.mailbox.address)
    addresses = {ME: served.mailbox.address, FrontendId(8): other.mailbox.address}
    members = [FrontendMember(*each) for each in addresses.items()]
    cluster = served.cluster
    cluster.announce(cluster.i0, cluster.i1, frontends=members)
    try:
        while getattr(served.server.membership, "frontends", ()) != tuple(members):
            # Each answer takes a turn of the server's loop.
            await served.http.get("/health")
        yield other
    finally:
        other.close()


async def chats(
    served: Served, *names: str
) -> tuple[list["asyncio.Task[httpx.Response]"], list[str]]:
    """Begin chats that are called so; returns their answers, and their engine requests."""
    answers, request_ids = [], []
    for name in names:
        answers.append(served.chat(request_id=name))
        request_ids.append((await served.cluster.i0.get_request()).request_id)
    return answers, request_ids


async def reasons(answers: Sequence["asyncio.Task[httpx.Response]"]) -> list[str]:
    every = [(await each).json() for each in answers]
    return [choice["finish_reason"] for each in every for choice in each["choices"]]


@pytest.mark.parametrize(
    ("body", "num_aborted", "expected"),
    [
        (
            {"request_ids": ["chatcmpl-tern", "chatcmpl-gull"]},
            2,
            ("chatcmpl-tern", "chatcmpl-gull"),
        ),
        ({"request_ids": ["chatcmpl-tern", 7, "\ud800", "x" * 600]}, 4, ("chatcmpl-tern",)),
        ({}, 1, None),
    ],
    ids=["names", "what no request is called", "all"],
)
def test_an_abort_reaches_all_front_ends(
    run: Callable[[Scenario], None],
    body: dict[str, Any],
    num_aborted: int,
    expected: tuple[str, ...] | None,
) -> None:
    async def test(served: Served) -> None:
        answers, request_ids = await chats(served, "tern")
        async with another_front_end(served) as other:
            # As httpx would not write it: half of a surrogate pair.
            answer = await served.http.post("/abort_requests", content=json.dumps(body))
            assert answer.json() == {"status": "aborted", "aborted": num_aborted}
            message, _ = await other.get(AbortNamed)
        assert message == AbortNamed(expected)
        assert await reasons(answers) == ["abort"]
        aborted, _ = await served.cluster.i0.get(AbortRequests)
        assert list(aborted.request_ids) == request_ids

    run(test)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("chatcmpl-tern", "chatcmpl-skua"), ["abort", "length"]), (None, ["abort", "abort"])],
    ids=["names", "all"],
)
def test_what_another_front_end_was_asked_to_abort_is_aborted_here(
    run: Callable[[Scenario], None], names: tuple[str, ...] | None, expected: list[str]
) -> None:
    async def test(served: Served) -> None:
        answers, request_ids = await chats(served, "tern", "gull")
        async with another_front_end(served) as other:
            other.send(AbortNamed(names))
            aborted, _ = await served.cluster.i0.get(AbortRequests)
        assert list(aborted.request_ids) == request_ids[: expected.count("abort")]
        for request_id in request_ids[expected.count("abort") :]:
            served.cluster.i0.send_tokens(request_id, 0, [17], FinishReason.LENGTH)
        assert await reasons(answers) == expected

    run(test)


def test_a_client_that_leaves_aborts_its_request_at_its_own_front_end_alone(
    run: Callable[[Scenario], None],
) -> None:
    async def test(served: Served) -> None:
        async with another_front_end(served) as other:
            async with served.streamed_chat(request_id="tern") as events:
                request_id = (await served.cluster.i0.get_request()).request_id
                served.cluster.i0.send_tokens(request_id, 0, served.tokens("Hi"))
                await anext(events)
            await served.cluster.i0.get(AbortRequests)
            await served.http.post("/abort_requests", json={"request_ids": ["last"]})
            message, _ = await other.get(AbortNamed)
        assert message == AbortNamed(("last",))

    run(test)
