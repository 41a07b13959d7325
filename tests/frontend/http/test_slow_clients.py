"""Clients that neither ask to the end nor read: cut, and nobody else notices."""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sterna.frontend.http.slow_clients import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    READ_BYTES,
    ConnectionLimit,
    bounded_head,
    with_limits,
)
from sterna.frontend.http.tls import Certificates, behind_tls
from tests.clocks import SkippingLoop, run_skipping

HANG_S = 60.0
"""No wait of a test takes so long unless something hangs."""

SKIPPED_S = 1e9
"""Nor this, where a test turns the loop's clock on."""

SHORT_S = 0.2
CHUNK = bytes(1 << 16)


class Application:
    """Answers `/short` at once, `/body` when it has come, and `/endless` until its client goes
    away."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.has_ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/body":
            while (await receive()).get("more_body"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] in ("/short", "/body"):
            await send({"type": "http.response.body", "body": b"short"})
            return
        if scope["path"] == "/large":
            await send({"type": "http.response.body", "body": CHUNK * 400})
            return
        leaving = asyncio.create_task(self._left(receive))
        while not leaving.done():
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            self.num_sent += 1
            await asyncio.sleep(0)
        self.has_ended.set()

    async def _left(self, receive: Callable[[], Awaitable[Any]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@asynccontextmanager
async def served(
    protocol: type[Any],
    head_s: float = HANG_S,
    reader_s: float = HANG_S,
    max_connections: int = 100,
    hang_s: float = HANG_S,
    tls: Certificates | None = None,
    handshake_s: float = HANG_S,
) -> AsyncIterator[tuple[Application, int]]:
    application = Application()
    config = uvicorn.Config(application, lifespan="off", log_level="error", timeout_keep_alive=1)
    config.load()
    connection_limit = ConnectionLimit(max_connections)
    config.http_protocol_class = with_limits(protocol, connection_limit, head_s, reader_s)
    if tls is not None:
        config.http_protocol_class = behind_tls(
            config.http_protocol_class, tls, connection_limit, handshake_s
        )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # What the kernel keeps for a client is part of what it must not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(hang_s):
                yield application, listener.getsockname()[1]
        finally:
            server.force_exit = server.should_exit = True
            await serving


async def dial(port: int, request: bytes) -> socket.socket:
    """A client that has said this, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, request)
    return client


async def until_cut(client: socket.socket) -> bytes:
    """Everything until the server has ended the connection."""
    content = b""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while received := await loop.sock_recv(client, 1 << 20):
            content += received
    client.close()
    return content


async def is_answered(port: int) -> bool:
    """Whether a client is, sooner or later: on a busy machine its own head may come too late."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=HANG_S) as http:
                return (await http.get(f"http://127.0.0.1:{port}/short")).text == "short"


both = pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
ENDLESS = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n"
SHORT = b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n"

PIECE = 1 << 14
MANY_BYTES = 64 * MAX_HEAD_BYTES

CHUNKED = b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@both
def test_a_client_that_does_not_read_is_cut_and_its_answer_ends(
    protocol: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with served(protocol, reader_s=SHORT_S) as (application, port):
            client = await dial(port, ENDLESS)
            assert await is_answered(port), "others are answered meanwhile"
            await application.has_ended.wait()
            # 64 KiB are kept here; the rest is with the kernel.
            assert application.num_sent < 100
            assert await is_answered(port)
            client.close()

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())
    assert "client=127.0.0.1 reason=its client does not read the answer" in caplog.text


@both
def test_a_client_that_reads_slowly_but_reads_is_not_cut(protocol: type[Any]) -> None:
    """However long the whole answer takes: each time that it reads, it is waited for anew. Most of
    the time passes on the loop's clock alone, so that this takes none and a slow machine may."""

    async def test(loop: SkippingLoop) -> None:
        async with served(protocol, reader_s=20.0) as (application, port):
            client = await dial(port, ENDLESS)
            for _ in range(3):
                num_sent = application.num_sent
                while application.num_sent < num_sent + 20:
                    assert await loop.sock_recv(client, 1 << 14), "it is cut"
                loop.skipped_s += 15.0
            assert not application.has_ended.is_set()
            client.close()
            await application.has_ended.wait()

    run_skipping(test)


@both
@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_an_answer_of_one_piece_is_not_cut_while_its_client_reads_steadily(
    protocol: type[Any], header: bytes
) -> None:
    """Nothing is held up and goes on meanwhile; how much is left tells that it is read. Time passes
    on the loop's clock alone."""

    async def test(loop: SkippingLoop) -> None:
        async with served(protocol, reader_s=1000.0, hang_s=SKIPPED_S) as (_, port):
            client = await dial(port, LARGE + header + b"\r\n")
            num_read = 0
            for _ in range(4):
                loop.skipped_s += 750.0
                until = num_read + (1 << 20)
                while num_read < until:
                    received = await loop.sock_recv(client, 1 << 14)
                    assert received, "it is cut"
                    num_read += len(received)
            client.close()

    run_skipping(test)


@both
def test_a_client_that_reads_in_drops_is_cut(
    protocol: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    logged = asyncio.Event()
    noted = caplog.filtering(lambda record: logged.set() or True)

    async def test(loop: SkippingLoop) -> None:
        async with served(protocol, reader_s=1000.0, hang_s=SKIPPED_S) as (_, port):
            client = await dial(port, LARGE + b"\r\n")
            num_read = 0
            while not logged.is_set():
                # What the kernel keeps is refilled now and then, by less than is enough.
                loop.skipped_s += 100.0
                num_read += len(await loop.sock_recv(client, READ_BYTES // 32))
                await asyncio.sleep(0)
            assert num_read < READ_BYTES
            client.close()

    with noted, caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        run_skipping(test)
    assert "its client does not read the answer" in caplog.text


@both
@pytest.mark.parametrize("path", [b"/large", b"/large\r\nConnection: close"])
def test_an_answer_that_is_complete_but_not_read_is_cut_as_well(
    protocol: type[Any], path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    logged = asyncio.Event()
    noted = caplog.filtering(lambda record: logged.set() or True)

    async def test() -> None:
        async with served(protocol, reader_s=SHORT_S) as (_, port):
            line, _, header = path.partition(b"\r\n")
            request = b"GET " + line + b" HTTP/1.1\r\nHost: x\r\n" + header
            client = await dial(port, request + (b"\r\n\r\n" if header else b"\r\n"))
            await logged.wait()
            assert len(await until_cut(client)) < 400 * len(CHUNK)

    with noted, caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())


@both
def test_some_requests_before_an_answer_are_all_answered(protocol: type[Any]) -> None:
    async def test() -> None:
        async with served(protocol) as (_, port):
            # One is being answered.
            num = MAX_PIPELINED + 1
            client = await dial(port, SHORT * num)
            loop = asyncio.get_running_loop()
            content = b""
            while content.count(b"200 OK") < num or not content.endswith(b"0\r\n\r\n"):
                received = await loop.sock_recv(client, 1 << 16)
                assert received, content
                content += received
            client.close()

    asyncio.run(test())


def test_a_client_that_sends_requests_without_end_before_an_answer_is_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """httptools has read thousands of them from one packet, and each answer would let in more. (h11
    reads one at a time.)"""

    async def test() -> None:
        async with served(HttpToolsProtocol) as (application, port):
            client = await dial(port, ENDLESS)
            await asyncio.get_running_loop().sock_sendall(client, SHORT * (MAX_PIPELINED + 1))
            await until_cut(client)
            # The answer under way hears of it.
            await application.has_ended.wait()
            assert await is_answered(port)

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())
    assert "more than 16 of its requests wait" in caplog.text


@both
def test_a_client_that_resets_its_idle_connection_is_not_blamed(
    protocol: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn's time-out for the next request goes on after a reset."""

    async def test(loop: SkippingLoop) -> None:
        async with served(protocol, reader_s=100.0, hang_s=SKIPPED_S) as (_, port):
            client = await dial(port, SHORT)
            content = b""
            while b"short" not in content:
                content += await loop.sock_recv(client, 1 << 14)
            # Closed without the usual end: by a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            for _ in range(3):
                assert await is_answered(port)
                loop.skipped_s += 150.0

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        run_skipping(test)
    assert caplog.text == ""


@both
@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"],
    ids=["nothing", "half a line", "half a head"],
)
def test_a_head_that_does_not_come_is_not_awaited_for_ever(
    protocol: type[Any], beginning: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with served(protocol, head_s=SHORT_S) as (_, port):
            assert await until_cut(await dial(port, beginning)) == b""
            assert await is_answered(port)

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())
    assert "no whole request came" in caplog.text


@both
def test_nor_is_that_of_a_second_request(
    protocol: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with served(protocol, head_s=SHORT_S) as (_, port):
            loop = asyncio.get_running_loop()
            answer = b""
            while b"short" not in answer:
                # Again, where a busy machine was too late with the first request.
                client = await dial(port, SHORT)
                with contextlib.suppress(ConnectionError):
                    while b"short" not in answer and (
                        received := await loop.sock_recv(client, 1 << 14)
                    ):
                        answer += received
            await loop.sock_sendall(client, b"GET /sh")
            await until_cut(client)

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())
    assert "no whole request came" in caplog.text


@both
def test_an_answer_may_take_longer_than_a_head(protocol: type[Any]) -> None:
    async def test() -> None:
        async with served(protocol, head_s=SHORT_S) as (application, port):
            client = await dial(port, ENDLESS)
            ended = asyncio.create_task(application.has_ended.wait())
            await asyncio.wait({ended}, timeout=3 * SHORT_S)
            assert not ended.done()
            client.close()
            await ended

    asyncio.run(test())


@both
def test_where_descriptors_are_short_those_inside_are_served_and_others_are_not_let_in(
    protocol: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with served(protocol, max_connections=3) as (_, port):
            inside = [await dial(port, b"") for _ in range(3)]
            for _ in range(4):
                assert await until_cut(await dial(port, b"")) == b""
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(inside[0], SHORT)
            answer = b""
            while b"short" not in answer:
                answer += await loop.sock_recv(inside[0], 1 << 14)
            for client in inside:
                client.close()
            while "taken again" not in caplog.text:
                with contextlib.suppress(httpx.TransportError):
                    assert await is_answered(port)

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2, lines
    assert "file descriptors are short connections=4" in lines[0]
    assert lines[1].startswith("connections are taken again refused=")


# ------------------------------------------------------------------------------------- heads


def request_of(num_bytes: int) -> bytes:
    """A request for `/short` whose address and headers have so many bytes, as they are counted."""
    counted = b"/shortHost: x\r\nA: \r\n"
    value = b"x" * (num_bytes - len(counted))
    return b"GET /short HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n" % value


async def said_without_end(client: Any, piece: bytes) -> int:
    """Say this until the server has cut the connection, or far too long; returns how much."""
    num_bytes = 0
    with contextlib.suppress(ConnectionError):
        while num_bytes < MANY_BYTES:
            await asyncio.get_running_loop().sock_sendall(client, piece)
            num_bytes += len(piece)
            # The kernel may have room for all of it: the server, in this loop, needs its turns.
            await asyncio.sleep(0)
    return num_bytes


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"GET /", b"x" * PIECE),
        (b"GET / HTTP/1.1\r\nA: ", b"x" * PIECE),
        (b"GET / HTTP/1.1\r\n", b"a:\r\n" * (PIECE // 4)),
        (b"", b"\r\n" * (PIECE // 2)),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"a:\r\n" * (PIECE // 4)),
        (ENDLESS + b"GET / HTTP/1.1\r\n", b"a:\r\n" * (PIECE // 4)),
    ],
    ids=["address", "header", "headers", "empty lines", "trailers", "behind another request"],
)
def test_a_head_without_end_is_cut(
    beginning: bytes, piece: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol) as (_, port):
            client = await dial(port, beginning)
            assert await said_without_end(client, piece) < MANY_BYTES
            await until_cut(client)
            assert await is_answered(port)

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        asyncio.run(test())
    assert "connection cut client=127.0.0.1 reason=its head has more than 64 KiB" in caplog.text


def test_the_client_of_a_head_without_end_is_told_why() -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol) as (_, port):
            client = await dial(port, b"")
            # One byte too many, and none behind it: what is not read might undo the answer.
            beginning = b"GET / HTTP/1.1\r\nA: ".ljust(MAX_HEAD_BYTES + 1, b"x")
            await asyncio.get_running_loop().sock_sendall(client, beginning)
            answer = await until_cut(client)
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")

    asyncio.run(test())


@pytest.mark.parametrize(
    "request_",
    [
        request_of(MAX_HEAD_BYTES + 1),
        b"GET /short HTTP/1.1\r\n" + b"A: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    ],
    ids=["bytes", "headers"],
)
def test_a_head_that_arrives_whole_and_has_too_much_is_refused_as_well(request_: bytes) -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol) as (_, port):
            answer = await until_cut(await dial(port, request_))
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("request_", "num_answers"),
    [
        (request_of(MAX_HEAD_BYTES), 1),
        (request_of(MAX_HEAD_BYTES // 2) * 8, 8),
        (
            b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (8 * MAX_HEAD_BYTES)
            + bytes(8 * MAX_HEAD_BYTES),
            1,
        ),
        (CHUNKED + b"1\r\nx\r\n" * MAX_HEAD_BYTES + b"0\r\n\r\n", 1),
    ],
    ids=["the longest head", "many requests", "a long body", "a long body in chunks"],
)
def test_what_is_no_head_without_end_is_answered(request_: bytes, num_answers: int) -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol) as (_, port):
            loop = asyncio.get_running_loop()
            client = await dial(port, b"")
            sending = asyncio.create_task(loop.sock_sendall(client, request_))
            answers = b""
            while answers.count(b"HTTP/1.1 200") < num_answers:
                received = await loop.sock_recv(client, 1 << 14)
                assert received, answers
                answers += received
            await sending
            client.close()

    asyncio.run(test())


def test_h11_has_a_limit_to_heads_of_its_own() -> None:
    assert bounded_head(H11Protocol) is H11Protocol
