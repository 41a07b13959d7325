"""The `Server-Timing` header of answers."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.types import Message, Receive, Scope, Send

from sterna.frontend.http import server_timing
from sterna.frontend.http.request_context import add_engine_request
from sterna.frontend.http.server_timing import ServerTiming, header_of
from sterna.frontend.requests.histories import Timing
from sterna.types import InstanceId

HANG_S = 60.0
TIMING = Timing(0.38021, 0.0031, 0.0504, InstanceId("i1"))
HEADER = 'scheduler;dur=380.2, queue;dur=3.1, prefill;dur=50.4, instance;desc="i1"'
SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


@pytest.mark.parametrize(
    ("timing", "header"),
    [
        (TIMING, HEADER),
        (Timing(0.5, None, None, InstanceId("i1")), 'scheduler;dur=500.0, instance;desc="i1"'),
        (Timing(None, None, None, None), ""),
    ],
)
def test_what_is_not_known_is_left_out(timing: Timing, header: str) -> None:
    assert header_of(timing) == header


class Server:
    """An application that streams pieces when it is let, and what has been sent of its answer."""

    def __init__(self, timing: Timing | None = TIMING) -> None:
        self._timing = timing
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: list[Message] = []
        self.news = asyncio.Event()
        self.asked: list[Sequence[str]] = []
        self.is_broken = False

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        add_engine_request("cmpl-tern-0")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (piece := await self.pieces.get()) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def timing_of(self, names: Sequence[str], since_s: float) -> Timing | None:
        assert since_s <= asyncio.get_running_loop().time()
        self.asked.append([*names])
        if self.is_broken:
            raise RuntimeError("the histories are broken")
        return self._timing

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.news.set()

    def answer(self) -> "asyncio.Task[None]":
        async def receive() -> Message:
            raise AssertionError("nothing is read")

        timed = ServerTiming(self.app, self.timing_of)
        return asyncio.create_task(timed(SCOPE, receive, self.send))


def played(scenario: object) -> None:
    async def within() -> None:
        async with asyncio.timeout(HANG_S):
            await scenario()  # type: ignore[operator]

    asyncio.run(within())


def test_the_headers_wait_for_the_first_piece() -> None:
    async def scenario() -> None:
        server = Server()
        answering = server.answer()
        for _ in range(5):
            await asyncio.sleep(0)
        assert server.sent == []
        for piece in (b"a", b"b", None):
            server.pieces.put_nowait(piece)
        await answering
        start, *body = server.sent
        assert start["headers"] == [(b"server-timing", HEADER.encode())]
        assert [each["body"] for each in body] == [b"a", b"b", b""]
        assert server.asked == [["cmpl-tern-0"]]

    played(scenario)


def test_the_headers_do_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_timing, "HOLD_S", 0.01)

    async def scenario() -> None:
        server = Server()
        answering = server.answer()
        await server.news.wait()
        assert [each["type"] for each in server.sent] == ["http.response.start"]
        server.pieces.put_nowait(b"a")
        server.pieces.put_nowait(None)
        await answering
        assert [each["type"] for each in server.sent].count("http.response.start") == 1
        assert [each["body"] for each in server.sent[1:]] == [b"a", b""]

    played(scenario)


def test_an_answer_that_asked_no_engine_has_no_header() -> None:
    async def scenario() -> None:
        server = Server(None)
        server.pieces.put_nowait(None)
        await server.answer()
        assert server.sent[0]["headers"] == []

    played(scenario)


def test_what_is_sent_in_the_moment_of_the_timer_comes_behind_the_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_timing, "HOLD_S", 0.0)

    async def scenario() -> None:
        server = Server()
        may_send = asyncio.Event()
        send = server.send

        async def slowly(message: Message) -> None:
            server.news.set()
            await may_send.wait()
            await send(message)

        server.send = slowly  # type: ignore[method-assign]
        answering = server.answer()
        await server.news.wait()
        server.pieces.put_nowait(b"a")
        server.pieces.put_nowait(None)
        for _ in range(5):
            await asyncio.sleep(0)
        may_send.set()
        await answering
        assert [each["type"] for each in server.sent] == [
            "http.response.start",
            "http.response.body",
            "http.response.body",
        ]

    played(scenario)


def test_an_answer_is_worth_more_than_its_header() -> None:
    async def scenario() -> None:
        server = Server()
        server.is_broken = True
        server.pieces.put_nowait(None)
        await server.answer()
        assert server.sent[0]["type"] == "http.response.start"
        assert server.sent[0]["headers"] == []

    played(scenario)


def test_the_application_hears_that_the_headers_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_timing, "HOLD_S", 0.0)

    async def scenario() -> None:
        server = Server()

        async def broken(message: Message) -> None:
            server.news.set()
            raise OSError("the client has gone")

        server.send = broken  # type: ignore[method-assign]
        answering = server.answer()
        await server.news.wait()
        await asyncio.sleep(0)
        server.pieces.put_nowait(b"a")
        with pytest.raises(OSError, match="the client has gone"):
            await answering

    played(scenario)
