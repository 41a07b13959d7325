"""Heads without end are cut; what is no head may be as long as it likes."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sterna.frontend.http.heads import MAX_HEAD_BYTES, MAX_HEADERS, bounded_head
from tests.frontend.http.test_slow_clients import ENDLESS, dial, is_answered, served, until_cut

PIECE = 1 << 14
MANY_BYTES = 64 * MAX_HEAD_BYTES

CHUNKED = b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


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

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.heads"):
        asyncio.run(test())
    assert "connection cut client=127.0.0.1 reason=its head has more than 64 KiB" in caplog.text


def test_its_client_is_told_why() -> None:
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
def test_one_that_arrives_whole_and_has_too_much_is_refused_as_well(request_: bytes) -> None:
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


def test_h11_has_a_limit_of_its_own() -> None:
    assert bounded_head(H11Protocol) is H11Protocol
