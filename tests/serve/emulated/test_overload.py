"""More clients, and worse ones, than a server has room for."""

import asyncio
import json
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.serve.emulated.quick import completion, many_connections, num_tokens, quick_server
from tests.serve.server import HANG_TIMEOUT_S, ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS = 1000
MAX_QUEUED = 1000
MAX_TOKENS = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--instances", "4", "--max-queued-requests", str(MAX_QUEUED))
    with quick_server(
        tmp_path_factory.mktemp("overload"), *options, "--reader-timeout", "2"
    ) as server:
        yield server


def frontend(server: ServerProcess) -> psutil.Process:
    """The process that answers HTTP."""
    for process in server.processes():
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == server.port:
                return process
    raise AssertionError("nobody listens")


def test_a_thousand_streams_at_once_are_answered_whole(server: ServerProcess) -> None:
    """Each is open before the first one is read."""

    async def run() -> list[int]:
        async with many_connections() as http:
            url = f"{server.url}/v1/completions"
            answers = await asyncio.gather(
                *(http.post(url, json=completion(i, MAX_TOKENS)) for i in range(NUM_STREAMS))
            )
            assert {each.status for each in answers} == {200}
            return await asyncio.gather(*(num_tokens(each) for each in answers))

    process = frontend(server)
    assert asyncio.run(run()) == [MAX_TOKENS] * NUM_STREAMS
    until(server.is_empty, "every instance is empty")
    until(lambda: process.num_fds() < NUM_STREAMS / 2, "the connections are gone")
    assert "Traceback" not in server.log


def test_beyond_the_limit_clients_are_told_when_to_come_again_and_the_others_are_served(
    server: ServerProcess,
) -> None:
    num_refused = 0

    async def one(http: object, number: int) -> int:
        nonlocal num_refused
        url = f"{server.url}/v1/completions"
        async with http.post(url, json=completion(number, MAX_TOKENS)) as answer:  # type: ignore[attr-defined]
            if answer.status == 200:
                return await num_tokens(answer)
            assert answer.status == 429
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("RateLimitError", 429)
            assert 1 <= int(answer.headers["Retry-After"]) <= 30
            num_refused += 1
            return MAX_TOKENS

    async def run() -> list[int]:
        async with many_connections() as http:
            return await asyncio.gather(*(one(http, i) for i in range(3 * MAX_QUEUED)))

    assert asyncio.run(run()) == [MAX_TOKENS] * (3 * MAX_QUEUED)
    assert num_refused > 0
    until(lambda: "queue full, requests are refused" in server.log, "refusals are logged")
    until(server.is_empty, "every instance is empty")
    with server.http() as http:
        body = {**completion(0, 3), "stream": False}
        del body["stream_options"]
        assert http.post("/v1/completions", json=body).status_code == 200
    until(lambda: "queue has room again" in server.log, "the end of it is logged")


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST /v1/completions HT",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"A" * 100_000,
    ],
    ids=lambda value: repr(value[:24]),
)
@pytest.mark.parametrize("is_half_closed", [False, True])
def test_connections_that_are_slow_broken_or_half_closed_disturb_nobody(
    server: ServerProcess, beginning: bytes, is_half_closed: bool
) -> None:
    process = frontend(server)
    before = process.num_fds()
    clients = []
    for _ in range(20):
        client = socket.create_connection(("127.0.0.1", server.port))
        clients.append(client)
        try:
            client.sendall(beginning)
            if is_half_closed:
                client.shutdown(socket.SHUT_WR)
        except ConnectionError:
            # It was hung up on already.
            continue
    with server.http() as http:
        assert http.get("/health").status_code == 200
    for client in clients:
        client.close()
    until(lambda: process.num_fds() <= before + 5, "the connections are gone")
    assert "Traceback" not in server.log


def test_a_client_that_does_not_read_its_stream_is_cut_and_its_memory_is_free(
    server: ServerProcess,
) -> None:
    """Half of its answer is larger than what the kernel keeps for it, which may be 4 MiB and
    more."""
    max_tokens = 3000
    asked = {**completion(0, max_tokens), "n": 16, "return_token_ids": True}
    content = json.dumps(asked).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        server.until_line("its client does not read the answer", 5 * HANG_TIMEOUT_S)
        server.until_freed(max_tokens)
