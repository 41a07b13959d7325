"""What a full queue refuses, in front of an application that answers whatever it is asked."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from hashlib import sha256

import httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from sterna.frontend.http.overload import (
    UNREAD_BYTES,
    FullLog,
    OverloadMiddleware,
    OverloadUnread,
    counted,
    reserved,
)
from sterna.frontend.http.queue_limit import QueueLimit, Ticket
from sterna.frontend.http.request_context import AnsweredStream, current, entered
from sterna.frontend.http.service_tier import TierMiddleware
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey
from tests.frontend.http.opened import opened


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


def status(path: str, method: str = "POST") -> int:
    """Return the answer's status while the only place of the queue is taken."""
    limit = QueueLimit(1, 0.0)
    limit.enter(0.0, is_urgent=False)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    client = TestClient(opened(OverloadMiddleware(app, limit, DEFAULT_CLASSES)))
    return client.request(method, path).status_code


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v2/rerank",
        "/inference/v1/generate",
        "/cohere/v2/chat",
        "/invocations",
    ],
)
def test_inference_is_refused(path: str) -> None:
    assert status(path) == 429


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/responses/resp_1/cancel", "POST"),
        ("/inference/v1/abort_requests", "POST"),
        ("/v1/messages/count_tokens", "POST"),
        ("/v1/chat/completions/render", "POST"),
        ("/v1/completions/derender", "POST"),
        ("/v1/load_lora_adapter", "POST"),
        ("/v1/unload_lora_adapter", "POST"),
        ("/tokenize", "POST"),
        ("/v1/models", "GET"),
        ("/v1/responses/resp_1", "GET"),
    ],
)
def test_what_brings_the_engines_no_request_is_answered(path: str, method: str) -> None:
    assert status(path, method) == 200


def test_a_request_is_refused_by_what_it_asks_of_the_engines_whatever_the_application_says() -> (
    None
):
    limit = QueueLimit(10, 0.0)
    limit.enter(0.0, is_urgent=False)

    async def ask(request: Request) -> PlainTextResponse:
        while reserved(limit, 3) is None:
            pass
        return PlainTextResponse("an error", 503)

    app = Starlette(routes=[Route("/v1/completions", ask, methods=["POST"])])
    client = TestClient(opened(OverloadMiddleware(app, limit, DEFAULT_CLASSES)))
    answer = client.post("/v1/completions")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
    assert answer.json()["error"] == {
        "message": "too many requests wait (1); try again in 5 s, or with fewer prompts and "
        "choices at once: this one has 12 or more, and 10 may wait, unless nothing else waits",
        "type": "RateLimitError",
        "param": None,
        "code": 429,
    }
    assert limit.num_waiting == 1


def test_what_is_asked_for_when_the_answer_has_begun_does_not_change_it() -> None:
    limit = QueueLimit(10, 0.0)
    limit.enter(0.0, is_urgent=False)

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert reserved(limit, 20) is not None
        await send({"type": "http.response.body", "body": b"an error event"})

    client = TestClient(opened(OverloadMiddleware(ask, limit, DEFAULT_CLASSES)))
    answer = client.post("/v1/completions")
    assert (answer.status_code, answer.text) == (200, "an error event")


def unread(
    is_full: bool, path: str = "/v1/completions", keys: Sequence[ApiKey] = (), **headers: str
) -> httpx.Response:
    """Return the answer to a request whose body nobody may read unless the queue has room."""

    async def body() -> AsyncIterator[bytes]:
        assert not is_full, "the body was read"
        yield b"body"

    async def send() -> httpx.Response:
        limit = QueueLimit(20, 0.1)
        # Two more places are for urgent requests, and this may be one.
        for _ in range(20 + 2 * is_full):
            limit.enter(0.0, is_urgent=True)
        app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
        asked = opened(OverloadUnread(app, limit, FullLog()), keys, "/proxied")
        transport = httpx.ASGITransport(asked)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, content=body(), headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("path", ["/v1/completions", "/proxied/v1/completions"])
def test_where_nobody_is_let_in_no_body_is_read(path: str) -> None:
    refused = unread(True, path)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
    assert refused.headers["Connection"] == "close"
    assert unread(False, path).text == "inside"


def test_a_short_body_that_is_not_read_does_not_cost_the_connection() -> None:
    refused = unread(True, **{"Content-Length": str(UNREAD_BYTES)})
    assert "Connection" not in refused.headers
    assert (
        unread(True, **{"Content-Length": str(UNREAD_BYTES + 1)}).headers["Connection"] == "close"
    )


def test_who_reads_a_stream_on_or_shows_no_key_is_answered_further_on() -> None:
    keys = [ApiKey("mine", sha256(b"mine").digest())]
    headers = {"Last-Event-ID": "0"}
    assert unread(True, **headers).text == "inside"
    assert unread(True, keys=keys, Authorization="Bearer other").text == "inside"
    assert unread(True, keys=keys, Authorization="Bearer mine").status_code == 429
    assert unread(True, "/tokenize").text == "inside"


@pytest.mark.parametrize(
    ("tier", "status"), [("priority", 200), ("default", 429), ("flex", 429), (None, 429)]
)
def test_an_urgent_request_has_places_of_its_own(tier: str | None, status: int) -> None:
    limit = QueueLimit(20, 0.1)
    for _ in range(20):
        limit.enter(0.0, is_urgent=False)
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    limited = OverloadMiddleware(app, limit, DEFAULT_CLASSES)
    client = TestClient(opened(TierMiddleware(limited, DEFAULT_CLASSES)))
    asked = client.post("/v1/completions", json={"service_tier": tier})
    assert asked.status_code == status
    assert limit.num_waiting == 20, "it leaves with its answer"


def test_the_path_counts_without_the_root_path() -> None:
    limit = QueueLimit(1, 0.0)
    limit.enter(0.0, is_urgent=False)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    client = TestClient(
        opened(OverloadMiddleware(app, limit, DEFAULT_CLASSES), root_path="/proxied"),
        root_path="/proxied",
    )
    assert client.post("/v1/completions").status_code == 429
    assert client.post("/tokenize").status_code == 200


def test_what_another_front_end_has_let_in_does_not_wait_again() -> None:
    limit = QueueLimit(1, 0.0)
    limit.enter(0.0, is_urgent=False)
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])

    async def around(scope: Scope, receive: Receive, send: Send) -> None:
        stream = AnsweredStream("tern", True, on_let_in=lambda: None)
        with entered(replace(current(), stream=stream)):
            await OverloadMiddleware(app, limit, DEFAULT_CLASSES)(scope, receive, send)

    assert TestClient(opened(around)).post("/v1/completions").text == "inside"
    assert limit.num_waiting == 1


def test_that_the_queue_is_full_is_said_once_and_so_is_that_it_has_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether the bodies of the refused were read or not."""
    limit, log = QueueLimit(1, 0.0), FullLog()
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    read = TestClient(opened(OverloadMiddleware(app, limit, DEFAULT_CLASSES, log)))
    not_read = TestClient(opened(OverloadUnread(app, limit, log)))
    with caplog.at_level(logging.WARNING, "sterna.frontend.http.overload"):
        for _ in range(2):
            tickets = [limit.enter(0.0, is_urgent=True) for _ in range(2)]
            for client in (not_read, read, read):
                assert client.post("/v1/completions").status_code == 429
            for ticket in tickets:
                assert isinstance(ticket, Ticket)
                limit.leave(ticket)
            for _ in range(2):
                assert read.post("/v1/completions").status_code == 200
    full = "queue full, requests are refused waiting=2 limit=2"
    assert caplog.messages == [full, "queue has room again refused=3"] * 2


def test_outputs_wait_for_their_first_token_until_they_are_closed() -> None:
    limit = QueueLimit(10, 0.0)
    waiting: list[int] = []

    async def outputs() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            waiting.append(-1)

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        assert reserved(limit, 3) is None
        its = counted(limit, "cmpl-1", outputs(), 3)
        assert await anext(its) == 1
        limit.on_first_token("cmpl-1", 0.0)
        waiting.append(limit.num_waiting)
        await its.aclose()
        waiting.append(limit.num_waiting)
        await PlainTextResponse("inside")(scope, receive, send)

    asked = TestClient(opened(OverloadMiddleware(ask, limit, DEFAULT_CLASSES))).post(
        "/v1/completions"
    )
    assert asked.text == "inside"
    assert waiting == [2, -1, 0]


def test_a_request_that_nobody_answers_reserves_and_counts_nothing() -> None:
    """Nor does it when the answer to another one has ended."""

    async def outputs() -> AsyncGenerator[int, None]:
        yield 1

    async def test() -> None:
        limit = QueueLimit(1, 0.0)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

        async def app(*_: object) -> None:
            pass

        await opened(OverloadMiddleware(app, limit, DEFAULT_CLASSES))(scope, app, app)
        limit.enter(0.0, is_urgent=False)
        assert reserved(limit, 3) is None
        its = outputs()
        assert counted(limit, "cmpl-1", its, 3) is its
        assert limit.num_waiting == 1

    asyncio.run(test())


def test_a_stream_is_told_when_its_request_is_let_in_and_not_when_it_is_refused() -> None:
    let_in: list[str] = []
    limit = QueueLimit(1, 0.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert let_in == ["tern"]
        await PlainTextResponse("inside")(scope, receive, send)

    async def around(scope: Scope, receive: Receive, send: Send) -> None:
        stream = AnsweredStream("tern", False, on_let_in=lambda: let_in.append("tern"))
        with entered(replace(current(), stream=stream)):
            await OverloadMiddleware(app, limit, DEFAULT_CLASSES)(scope, receive, send)

    assert TestClient(opened(around)).post("/v1/completions").text == "inside"
    limit.enter(0.0, is_urgent=False)
    assert TestClient(opened(around)).post("/v1/completions").status_code == 429
    assert let_in == ["tern"]
