"""The whole chain before an application: its order, and what a request is known by on its way."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from sterna.config import DoorConfig
from sterna.frontend.http.api_keys import ApiKeys
from sterna.frontend.http.door import Door, build_door
from sterna.frontend.http.queue_limit import QueueLimit, Ticket
from sterna.frontend.http.request_context import (
    AnsweredStream,
    RequestContext,
    current,
    entered,
)
from sterna.frontend.resumable.middleware import ResumableStreams
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey

PATH = "/v1/completions"
KEY = ApiKey("user", sha256(b"user").digest())
SHORT, LONG = b'{"service_tier": "gold"}', b'{"service_tier": "default", "prompt": "Terns"}'
MAX_QUEUED = 10


class VllmsCheck:
    """Lets nobody in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it was to be replaced")


class CountingKeys(ApiKeys):
    """Counts how often a key is looked for."""

    num_finds = 0

    def find(self, authorization: str | None) -> ApiKey | None:
        self.num_finds += 1
        return super().find(authorization)


class Changing:
    """A middleware of the server's host, which changes requests."""

    def __init__(self, app: ASGIApp, **changes: Any) -> None:
        self._app = app
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, **self._changes}, receive, send)


class Server:
    """An application behind its door."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (KEY,),
        hosts: Sequence[Middleware] = (),
        root_path: str = "",
        max_body_bytes: int = 1000,
        keep_streams: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self.keys = CountingKeys(keys)
        self.queue = QueueLimit(MAX_QUEUED, 0.1)
        self.contexts: list[RequestContext] = []
        self.vllm = FastAPI(root_path=root_path)
        self.vllm.post(PATH)(self._answer)
        self.vllm.get("/v1/models")(self._answer)
        check = [Middleware(VllmsCheck)] if keys else []
        self.vllm.user_middleware = [*hosts, *check]
        config = DoorConfig(max_queued_requests=MAX_QUEUED, max_body_bytes=max_body_bytes)
        self.door: Door = build_door(
            *(self.vllm, VllmsCheck, self.keys, DEFAULT_CLASSES, self.queue, config, root_path),
            keep_streams=keep_streams,
            has_operators_middleware=bool(hosts),
        )
        self.client = TestClient(self.door.app)

    async def _answer(self, request: Request) -> Any:
        self.contexts.append(current())
        if b"stream" in await request.body():
            return StreamingResponse(iter(["data: one\n\n"]), media_type="text/event-stream")
        return {}

    def fill(self, num: int) -> None:
        for _ in range(num):
            self.queue.enter(0.0, is_urgent=True)

    def status(self, body: bytes = b"{}", key: str | None = "user", path: str = PATH) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.post(path, content=body, headers=headers).status_code


@pytest.mark.parametrize("root_path", ["", "/behind/proxy"])
def test_a_request_passes_one_check_after_the_other(root_path: str) -> None:
    """Whatever the later ones would say."""
    server = Server(max_body_bytes=len(SHORT), root_path=root_path)
    path = root_path + PATH
    assert server.status(path=path) == 200
    # The tier is looked at before the queue, and the key before both.
    server.fill(MAX_QUEUED)
    assert server.status(SHORT, path=path) == 400
    assert server.status(SHORT, "other", path) == 401
    assert server.status(path=path) == 429
    assert server.status(LONG, path=path) == 413
    # The body of a stranger is not looked at, and nobody's where there is no room at all.
    assert server.status(LONG, "other", path) == 401
    server.fill(1)
    assert server.status(LONG, path=path) == 429
    assert server.status(LONG, None, path) == 401
    server.door.gate.close()
    assert server.status(LONG, None, path) == 503


def test_without_keys_everybody_may_ask() -> None:
    assert Server(keys=()).status(key=None) == 200


@pytest.mark.parametrize("key", ["user", "other"])
def test_no_websocket_is_opened(key: str) -> None:
    """vLLM's realtime API would keep whatever a client sends."""
    server = Server()

    @server.vllm.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await websocket.accept()

    headers = {"Authorization": f"Bearer {key}"}
    refused = pytest.raises(WebSocketDisconnect)
    with refused, server.client.websocket_connect("/v1/realtime", headers=headers):
        pass


def test_a_key_is_looked_for_once_in_the_whole_chain() -> None:
    server = Server()
    assert server.status() == 200
    assert server.keys.num_finds == 1
    (context,) = server.contexts
    assert context.caller is not None
    assert (context.caller.path, context.caller.key) == (PATH, KEY)
    assert context.admission is not None
    assert context.ticket is not None
    assert current() == RequestContext()


@pytest.mark.parametrize(
    ("path", "key", "changes"),
    [
        ("/mine/v1/models", "user", {"path": "/v1/models"}),
        ("/v1/models", "other", {"headers": [(b"authorization", b"Bearer user")]}),
        ("/mine/v1/models", "user", {"root_path": "/mine"}),
    ],
)
def test_path_and_key_count_as_the_hosts_own_middlewares_leave_them(
    path: str, key: str, changes: dict[str, Any]
) -> None:
    server = Server(hosts=[Middleware(Changing, **changes)])
    headers = {"Authorization": f"Bearer {key}"}
    assert server.client.get(path, headers=headers).status_code == 200
    (context,) = server.contexts
    assert context.caller is not None
    assert (context.caller.path, context.caller.key) == ("/v1/models", KEY)


def test_a_middleware_of_the_host_that_gives_a_key_finds_the_body_too() -> None:
    given = Middleware(Changing, headers=[(b"authorization", b"Bearer user")])
    server = Server(hosts=[given])
    # What the tier's check says of it, which reads it.
    assert server.status(SHORT, "other") == 400
    assert server.status(b"{}", "other") == 200


class Refusing:
    """A middleware of the host, which lets some clients in by a header of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_known = (b"x-user", b"tern") in scope.get("headers", ())
        answer = self._app if is_known else JSONResponse({}, 403)
        await answer(scope, receive, send)


@pytest.mark.parametrize("refuses", ["the host's middleware", "the key's check"])
def test_to_resume_a_stream_one_must_pass_the_checks_as_to_begin_it(refuses: str) -> None:
    key = KEY if refuses == "the host's middleware" else None
    streams = partial(ResumableStreams, window_s=60.0, max_bytes=1 << 20)
    server = Server(hosts=[Middleware(Refusing)], keys=[KEY], keep_streams=streams)
    known = {"Authorization": "Bearer user", "X-User": "tern", "X-Request-Id": "tern"}
    begun = server.client.post(PATH, content=b'{"stream": true}', headers=known)
    assert (begun.status_code, begun.text) == (200, "id: 1\ndata: one\n\n")
    resuming = {**known, "Last-Event-ID": "0"}
    resumed = server.client.post(PATH, content=b"{}", headers=resuming)
    assert (resumed.status_code, resumed.text) == (200, begun.text)
    assert resumed.headers == begun.headers
    unknown = {"X-User": "gull"} if key else {"Authorization": "Bearer other"}
    refused = server.client.post(PATH, content=b"{}", headers={**resuming, **unknown})
    assert (refused.status_code, "data" in refused.text) == (403 if key else 401, False)


@pytest.mark.parametrize(
    ("hosts", "num_marks"),
    [
        ([], 0),
        ([Middleware(Changing)], 1),
        ([Middleware(BaseHTTPMiddleware, dispatch=lambda request, go_on: go_on(request))], 1),
    ],
    ids=["none", "the operator's", "one that is late"],
)
def test_streams_have_marks_in_front_of_all_middlewares_that_could_change_them(
    hosts: Sequence[Middleware], num_marks: int
) -> None:
    marks = [b": mark\n\n"]

    def kept(app: ASGIApp) -> ASGIApp:
        stream = AnsweredStream("tern", False, lambda: None, lambda: lambda: b"".join(marks))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with entered(replace(current(), stream=stream)):
                await app(scope, receive, send)

        return answer

    server = Server(hosts=hosts, keep_streams=kept)
    answered = server.client.post(
        PATH, content=b'{"stream": true}', headers={"Authorization": "Bearer user"}
    )
    assert answered.text.startswith(num_marks * ": mark\n\n" + "data: one\n\n")
    assert (": mark" in answered.text) == bool(num_marks)


@pytest.mark.parametrize(("key", "status"), [("user", 200), ("other", 401)])
def test_keys_are_checked_of_what_does_not_come_in_by_the_door(key: str, status: int) -> None:
    """So comes a stream that was taken over from another front end."""
    http = TestClient(Server().vllm)
    assert http.post(PATH, headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_nothing_is_left_to_a_request_of_the_one_before() -> None:
    """uvicorn begins a client's next request within the end of the one before."""
    server = Server()

    async def ask() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/models",
            "query_string": b"",
            "headers": [(b"authorization", b"Bearer user")],
        }
        with entered(RequestContext(ticket=Ticket(None))):
            await server.door.app(scope, receive, send)

    asyncio.run(ask())
    (context,) = server.contexts
    assert context.ticket is None
