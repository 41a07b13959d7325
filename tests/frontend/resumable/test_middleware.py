"""Clients that leave a stream and read it on, on a real ASGI application."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from hashlib import sha256
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sterna.frontend.http.body_limit import BodyLimit
from sterna.frontend.http.door import EndOfChecks
from sterna.frontend.resumable.middleware import ResumableStreams
from sterna.priority_classes import ApiKey
from tests.frontend.http.opened import opened
from tests.frontend.resumable.connection import PATH, Connection

HANG_S = 60.0


class Server:
    """An application whose stream goes on when the test says so."""

    def __init__(
        self, window_s: float = 60.0, root_path: str = "", keys: Sequence[ApiKey] = ()
    ) -> None:
        self.go_on = asyncio.Semaphore(0)
        self.num_begun = 0
        self.ended = asyncio.Event()
        self.was_cancelled = False
        self.path = root_path + PATH
        inner = Starlette(routes=[Route(self.path, self._answer, methods=["POST"])])
        self.app = opened(ResumableStreams(EndOfChecks(inner), window_s, 1 << 20), keys, root_path)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.num_begun += 1
        if "error" in body:
            return JSONResponse({"error": "no"}, 400)
        if not body.get("stream"):
            return JSONResponse({"id": request.headers.get("X-Request-Id")})
        return StreamingResponse(self._events(body["events"]), media_type="text/event-stream")

    async def _events(self, count: int) -> AsyncIterator[str]:
        try:
            for number in range(count):
                await self.go_on.acquire()
                yield f"data: {number}\n\n"
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.go_on.release()


class Client(Connection):
    """One connection to the server."""

    def __init__(self, server: Server, body: dict[str, Any], **headers: str) -> None:
        named = [(k.replace("_", "-").lower().encode(), v.encode()) for k, v in headers.items()]
        super().__init__(server.app, body, named)

    @property
    def numbered(self) -> list[tuple[int, str]]:
        """Number and data of each event."""
        pairs = [event.split("\n") for event in self.events]
        return [(int(n.removeprefix("id: ")), d.removeprefix("data: ")) for n, d in pairs]


def played(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(HANG_S):
            await scenario()

    asyncio.run(within())


def stream(events: int) -> dict[str, Any]:
    return {"stream": True, "events": events}


def test_events_say_their_numbers_and_the_answer_its_id() -> None:
    async def scenario() -> None:
        server = Server()
        server.step(3)
        client = Client(server, stream(3))
        await client.task
        assert client.status == 200
        assert client.numbered == [(1, "0"), (2, "1"), (3, "2")]
        assert client.headers["x-request-id"]

    played(scenario)


def test_a_stream_has_no_more_readers_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.middleware.MAX_FOLLOWERS", 3)

    async def scenario() -> None:
        server = Server()
        server.step(1)
        readers = [Client(server, stream(2), x_request_id="tern")]
        await readers[0].until(1)
        for _ in range(2):
            readers.append(Client(server, {}, x_request_id="tern", last_event_id="0"))
            await readers[-1].until(1)
        refused = Client(server, {}, x_request_id="tern", last_event_id="0")
        await refused.task
        assert refused.status == 429
        assert "3 connections read this stream already" in refused.content.decode()
        await readers.pop().leave()
        readers.append(Client(server, {}, x_request_id="tern", last_event_id="0"))
        server.step(1)
        for each in readers:
            await each.task
            assert each.numbered == [(1, "0"), (2, "1")]

    played(scenario)


def test_a_client_that_comes_back_gets_the_rest_each_event_once() -> None:
    async def scenario() -> None:
        server = Server()
        first = Client(server, stream(6), x_request_id="tern")
        server.step(2)
        await first.until(2)
        await first.leave()
        # It goes on meanwhile, and afterwards.
        server.step(2)
        second = Client(server, {}, x_request_id="tern", last_event_id="2")
        await second.until(2)
        server.step(2)
        await second.task
        assert first.numbered + second.numbered == [(n + 1, str(n)) for n in range(6)]
        assert server.num_begun == 1

    played(scenario)


def test_a_finished_stream_can_be_read_again_from_anywhere() -> None:
    async def scenario() -> None:
        server = Server()
        server.step(3)
        await Client(server, stream(3), x_request_id="tern").task
        for last in range(4):
            again = Client(server, {}, x_request_id="tern", last_event_id=str(last))
            await again.task
            assert (again.status, len(again.numbered)) == (200, 3 - last)

    played(scenario)


def test_a_proxy_may_leave_the_root_path_before_the_paths() -> None:
    async def scenario() -> None:
        server = Server(root_path="/behind/proxy")
        server.step(2)
        first = Connection(server.app, stream(2), [(b"x-request-id", b"tern")], server.path)
        await first.task
        headers = [(b"x-request-id", b"tern"), (b"last-event-id", b"1")]
        second = Connection(server.app, {}, headers, server.path)
        await second.task
        assert [first.events, second.events] == [
            ["id: 1\ndata: 0", "id: 2\ndata: 1"],
            ["id: 2\ndata: 1"],
        ]
        assert server.num_begun == 1

    played(scenario)


def test_nobody_who_comes_back_ends_the_stream_after_the_window() -> None:
    async def scenario() -> None:
        server = Server(window_s=0.01)
        client = Client(server, stream(3), x_request_id="tern")
        server.step()
        await client.until(1)
        await client.leave()
        await server.ended.wait()
        assert server.was_cancelled
        late = Client(server, {}, x_request_id="tern", last_event_id="1")
        await late.task
        assert late.status == 404

    played(scenario)


def test_another_client_cannot_read_the_stream() -> None:
    async def scenario() -> None:
        server = Server()
        server.step(1)
        await Client(server, stream(1), x_request_id="tern", authorization="Bearer mine").task
        thief = Client(server, {}, x_request_id="tern", last_event_id="0", authorization="Bearer a")
        await thief.task
        assert thief.status == 404
        owner = {"authorization": "Bearer mine", "last_event_id": "0"}
        back = Client(server, {}, x_request_id="tern", **owner)
        await back.task
        assert back.numbered == [(1, "0")]

    played(scenario)


@pytest.mark.parametrize("last", ["2", "-1", "one", "", "9" * 5000], ids=lambda last: last[:5])
def test_an_event_that_never_was_is_a_bad_request(last: str) -> None:
    async def scenario() -> None:
        server = Server()
        server.step(1)
        await Client(server, stream(1), x_request_id="tern").task
        client = Client(server, {}, x_request_id="tern", last_event_id=last)
        await client.task
        assert client.status == 400
        assert "Last-Event-ID must be 0 or the id of an event, up to 1" in client.content.decode()

    played(scenario)


def test_who_shows_no_key_is_left_to_the_application_and_takes_no_id() -> None:
    async def scenario() -> None:
        keys = [ApiKey("mine", sha256(b"mine").digest())]
        server = Server(keys=keys)
        server.step(3)
        strange = Client(server, stream(1), x_request_id="tern", authorization="Bearer a")
        await strange.task
        assert strange.events == ["data: 0"]
        back = Client(
            server, stream(1), x_request_id="tern", last_event_id="0", authorization="Bearer a"
        )
        await back.task
        assert back.events == ["data: 0"]
        owner = Client(server, stream(1), x_request_id="tern", authorization="Bearer mine")
        await owner.task
        assert owner.numbered == [(1, "0")]

    played(scenario)


def test_an_id_that_is_in_use_begins_no_second_stream() -> None:
    async def scenario() -> None:
        server = Server()
        server.step(1)
        await Client(server, stream(1), x_request_id="tern").task
        second = Client(server, stream(1), x_request_id="tern")
        await second.task
        assert second.status == 409
        assert server.num_begun == 1

    played(scenario)


def test_an_error_is_answered_as_it_is_and_not_kept() -> None:
    async def scenario() -> None:
        server = Server()
        for _ in range(2):
            client = Client(server, {"stream": True, "error": 1}, x_request_id="tern")
            await client.task
            assert (client.status, client.content) == (400, b'{"error":"no"}')

    played(scenario)


def test_what_nobody_can_read_is_left_to_the_application() -> None:
    async def scenario() -> None:
        deep = b'{"stream": true, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        read: list[bytes] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            read.append((await receive())["body"])

        async def receive() -> Any:
            return {"type": "http.request", "body": deep, "more_body": False}

        async def send(message: Any) -> None:
            raise AssertionError("nothing is to be answered")

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        await opened(ResumableStreams(app, 60.0, 1 << 20))(scope, receive, send)
        assert read == [deep]

    played(scenario)


@pytest.mark.parametrize("begins", [False, True])
def test_a_body_has_its_share_of_all_bodies_until_its_answer_begins(begins: bool) -> None:
    """Also when its client has gone: the answer is generated on, from the body."""

    async def scenario() -> None:
        reached, gone, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        num_bytes: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            reached.set()
            if begins:
                await gone.wait()
                num_bytes.append(limited.num_waiting_bytes)
                await send({"type": "http.response.start", "status": 200, "headers": []})
                num_bytes.append(limited.num_waiting_bytes)
            else:
                # Nobody has come back.
                assert (await receive())["type"] == "http.disconnect"
                num_bytes.append(limited.num_waiting_bytes)
            ended.set()

        limited = BodyLimit(ResumableStreams(app, 0.01, 1 << 20), 1 << 20, HANG_S)
        client = Connection(opened(limited), stream(1), [])
        await reached.wait()
        await client.leave()
        gone.set()
        await ended.wait()
        num_bytes.append(limited.num_waiting_bytes)
        assert num_bytes == [len(json.dumps(stream(1))), *[0] * (len(num_bytes) - 1)]

    played(scenario)


@pytest.mark.parametrize("said", ["true", 1, "yes"])
def test_what_vllms_server_takes_for_a_stream_is_kept(said: str | int) -> None:
    async def scenario() -> None:
        server = Server()
        server.step()
        client = Client(server, {"stream": said, "events": 1}, x_request_id="tern")
        await client.task
        assert client.numbered == [(1, "0")]

    played(scenario)


def test_a_body_that_only_pythons_reader_takes_is_kept_as_well() -> None:
    """As vLLM's server does, whose logit biases may be NaN."""

    async def scenario() -> None:
        server = Server()
        server.step()
        client = Client(server, stream(1) | {"bias": float("nan")}, x_request_id="tern")
        await client.task
        assert client.numbered == [(1, "0")]

    played(scenario)


def test_what_is_no_stream_passes() -> None:
    async def scenario() -> None:
        client = Client(Server(), {"stream": False}, x_request_id="tern")
        await client.task
        assert (client.status, client.content) == (200, b'{"id":"tern"}')

    played(scenario)
