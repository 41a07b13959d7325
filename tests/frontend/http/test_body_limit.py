"""Bodies: how large, and how slow, they may be."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from hashlib import sha256

import httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from sterna.frontend.http.body_limit import BodyLimit
from sterna.frontend.http.request_context import current
from sterna.priority_classes import ApiKey
from tests.frontend.http.opened import opened

LIMIT = 1000


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def client(timeout_s: float = 20.0) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST", "PUT", "PATCH"])])
    transport = httpx.ASGITransport(opened(BodyLimit(app, LIMIT, timeout_s)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def answer(content: bytes | list[bytes], method: str = "POST", **headers: str) -> httpx.Response:
    async def parts() -> AsyncIterator[bytes]:
        for part in content:
            assert isinstance(part, bytes)
            yield part

    async def send() -> httpx.Response:
        body = content if isinstance(content, bytes) else parts()
        async with client() as http:
            return await http.request(method, "/", content=body, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
@pytest.mark.parametrize("body", [b"", bytes(LIMIT), [bytes(LIMIT - 1), b"x"]])
def test_a_body_within_the_limit_arrives_whole(method: str, body: bytes | list[bytes]) -> None:
    whole = body if isinstance(body, bytes) else b"".join(body)
    assert (answer(body, method).status_code, answer(body, method).text) == (200, str(len(whole)))


@pytest.mark.parametrize(
    "body", [bytes(LIMIT + 1), [bytes(LIMIT), b"x"], [b"x"] * (LIMIT + 1)], ids=str
)
def test_a_larger_one_is_refused_in_openais_words(body: bytes | list[bytes]) -> None:
    refused = answer(body)
    assert refused.status_code == 413
    assert refused.headers["Connection"] == "close"
    assert refused.json() == {
        "error": {
            "message": "the body has more than 1000 bytes",
            "type": "ContentTooLargeError",
            "param": None,
            "code": 413,
        }
    }


def test_one_that_says_that_it_is_larger_is_refused_unread() -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async def test() -> None:
        async with client() as http:
            headers = {"Content-Length": str(LIMIT + 1)}
            refused = await http.post("/", content=never(), headers=headers)
        assert refused.status_code == 413

    asyncio.run(test())


def test_a_body_that_does_not_come_is_refused() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async def test() -> None:
        async with client(timeout_s=0.01) as http:
            refused = await http.post("/", content=endless())
        assert refused.status_code == 408
        assert refused.json()["error"]["type"] == "RequestTimeoutError"

    asyncio.run(test())


@pytest.mark.parametrize(("key", "num_bytes"), [("Bearer a", "0"), ("Bearer mine", "4"), ("", "0")])
def test_nothing_is_kept_of_who_shows_no_key(key: str, num_bytes: str) -> None:
    """The application refuses it; here that says how much has come."""

    async def test() -> None:
        app = Starlette(routes=[Route("/", echo, methods=["POST"])])
        keys = [ApiKey("mine", sha256(b"mine").digest())]
        transport = httpx.ASGITransport(opened(BodyLimit(app, LIMIT, 20.0), keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answer = await http.post("/", content=b"body", headers={"Authorization": key})
        assert answer.text == num_bytes

    asyncio.run(test())


def test_a_client_that_goes_away_before_its_body_is_there_reaches_nobody() -> None:
    async def test() -> None:
        async def unreachable(scope: object, receive: object, send: object) -> None:
            raise AssertionError("the application was called")

        async def receive() -> dict[str, object]:
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            raise AssertionError("something was sent")

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await opened(BodyLimit(unreachable, LIMIT, 1.0))(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(test())


def test_all_bodies_together_are_bounded_until_their_answers_begin() -> None:
    async def test() -> None:
        reached, answered = asyncio.Event(), asyncio.Event()
        ended = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            reached.set()
            await answered.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            begun.set()
            await ended.wait()
            await send({"type": "http.response.body", "body": b""})

        begun = asyncio.Event()
        limited = BodyLimit(app, LIMIT, 20.0, max_waiting_bytes=LIMIT + 1)
        transport = httpx.ASGITransport(opened(limited))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            first = asyncio.create_task(http.post("/", content=bytes(LIMIT)))
            await reached.wait()
            refused = await http.post("/", content=b"xx")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
            assert refused.headers["Connection"] == "close"
            assert refused.json()["error"]["type"] == "RateLimitError"
            fits = asyncio.create_task(http.post("/", content=b"x"))
            answered.set()
            await begun.wait()
            # The first answers go on, and what their requests had is free again.
            last = asyncio.create_task(http.post("/", content=bytes(LIMIT)))
            ended.set()
            for each in (first, fits, last):
                assert (await each).status_code == 200
        assert limited.num_waiting_bytes == 0

    asyncio.run(test())


@pytest.mark.parametrize("length", [LIMIT // 2, LIMIT + 1], ids=["broken off", "too large"])
def test_what_a_body_had_is_free_when_it_does_not_arrive(length: int) -> None:
    async def test() -> None:
        messages = [{"type": "http.request", "body": bytes(length), "more_body": True}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise AssertionError("the application was called")

        limited = BodyLimit(app, LIMIT, 20.0, max_waiting_bytes=2 * LIMIT)
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await opened(limited)(scope, receive, send)
        assert limited.num_waiting_bytes == 0

    asyncio.run(test())


async def nothing(*_: object) -> Message:
    raise AssertionError("something was said")


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/", "headers": []},
        {"type": "http", "method": "GET", "path": "/", "headers": []},
    ],
    ids=lambda scope: scope["type"],
)
def test_what_has_no_body_passes_once_and_unread(scope: Scope) -> None:
    passed: list[tuple[object, ...]] = []

    async def app(*connection: object) -> None:
        passed.append(connection)

    asyncio.run(opened(BodyLimit(app, LIMIT, 20.0))(scope, nothing, nothing))
    assert passed == [(scope, nothing, nothing)]


def scripted(*messages: Message) -> Receive:
    """A client that says this, and goes."""
    left = list(messages)

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.disconnect"}

    return receive


POST = {"type": "http", "method": "POST", "path": "/", "headers": []}


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"body": bytes(LIMIT), "more_body": True}, {"body": b"x", "more_body": False}], 413),
        ([{"body": bytes(LIMIT - 1), "more_body": True}, {"body": b"x"}], 200),
        ([{"body": bytes(LIMIT)}], 200),
        ([{}], 200),
    ],
)
def test_the_last_bytes_may_come_with_the_end_and_the_end_unsaid(
    messages: list[Message], status: int
) -> None:
    async def test() -> None:
        said: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            whole = await receive()
            assert whole["body"] == b"".join(each.get("body", b"") for each in messages)
            assert (await receive())["type"] == "http.disconnect"
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Message) -> None:
            said.append(message)

        receive = scripted(*({"type": "http.request", **each} for each in messages))
        await opened(BodyLimit(app, LIMIT, 20.0))(POST, receive, send)
        assert said[0]["status"] == status

    asyncio.run(test())


def test_a_body_that_is_kept_takes_its_room_until_it_is_given_back() -> None:
    async def test() -> None:
        give_back: list[Callable[[], None]] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            give_back.append(current().keep_body())

        limited = BodyLimit(app, LIMIT, 20.0)
        body = {"type": "http.request", "body": b"body"}
        await opened(limited)(POST, scripted(body), nothing)
        assert limited.num_waiting_bytes == 4
        # It is of the request that is being answered: there is none.
        current().keep_body()()
        assert limited.num_waiting_bytes == 4
        give_back[0]()
        assert limited.num_waiting_bytes == 0

    asyncio.run(test())


def test_that_bodies_are_refused_is_said_once_and_so_is_that_they_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where there is room for a few more bytes it is not over yet. One that is too large for what
    is left finds room for others."""

    async def test() -> None:
        give_back: list[Callable[[], None]] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            give_back.append(current().keep_body())

        async def send(message: Message) -> None:
            pass

        async def come(num_bytes: int) -> None:
            body = {"type": "http.request", "body": bytes(num_bytes)}
            await opened(limited)(POST, scripted(body), send)

        limited = BodyLimit(app, LIMIT, 20.0, max_waiting_bytes=LIMIT)
        for num_bytes in (900, 100, 1, 2):
            await come(num_bytes)
        assert limited.num_waiting_bytes == LIMIT
        give_back[1]()
        assert len(caplog.messages) == 1
        await come(1)
        give_back[0]()
        await come(1_000)

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.body_limit"):
        asyncio.run(test())
    assert caplog.messages == [
        "bodies are refused, too many bytes wait num_bytes=1000",
        "bodies are taken again refused=2",
        "bodies are refused, too many bytes wait num_bytes=1",
        "bodies are taken again refused=1",
    ]
