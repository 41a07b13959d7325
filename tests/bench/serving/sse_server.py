"""A small HTTP server that speaks OpenAI's completions API, for tests of clients.

A real one, in the test's own process and loop: what it answers to which request is up to the test.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.serving.target import Target

T = TypeVar("T")
Body = dict[str, Any]
Answer = Callable[[web.StreamResponse, Body], Awaitable[None]]

MODEL = "terns"


async def token(stream: web.StreamResponse, **more: Any) -> None:
    """Send a piece of an answer."""
    await event(stream, {"choices": [{"index": 0, "text": " tern", **more}]})


async def event(stream: web.StreamResponse, content: object) -> None:
    """Send one event."""
    await stream.write(b"data: " + json.dumps(content).encode() + b"\n\n")


async def finish(stream: web.StreamResponse, num_tokens: int) -> None:
    """Tell the usage, and that this was all."""
    await event(stream, {"choices": [], "usage": {"completion_tokens": num_tokens}})
    await stream.write(b"data: [DONE]\n\n")


async def all_tokens(stream: web.StreamResponse, body: Body) -> None:
    """Answer as was asked."""
    for _ in range(body["max_tokens"]):
        await token(stream)
    await finish(stream, body["max_tokens"])


class CompletionsServer:
    """Keeps what it was asked.

    Attributes:
        bodies: of all completions asked for so far.
        ports: where they came from.
        has_been_asked: set when there is one.
        instances: what `/admin/instances` answers, one element a question, the last again and
            again; empty for a server that has no such page.
        api_key: what every question needs; None for nothing.
    """

    def __init__(
        self,
        answer: Answer = all_tokens,
        *,
        instances: list[list[dict[str, Any]]] | None = None,
        api_key: str | None = None,
        models: tuple[str, ...] = (MODEL,),
    ) -> None:
        self.bodies: list[Body] = []
        self.ports: list[int] = []
        self.has_been_asked = threading.Event()
        self.instances = instances or []
        self.api_key = api_key
        self._answer = answer
        self._models = models
        self._num_looks = 0

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 24)
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_post("/v1/completions", self._complete)
        if self.instances:
            application.router.add_get("/admin/instances", self._list_instances)
        return application

    async def _list_models(self, request: web.Request) -> web.Response:
        if not self._is_allowed(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        models = [{"id": name, "max_model_len": 2048} for name in self._models]
        return web.json_response({"object": "list", "data": models})

    async def _list_instances(self, request: web.Request) -> web.Response:
        if not self._is_allowed(request):
            return web.json_response({"error": {"message": "a key is needed"}}, status=401)
        answer = self.instances[min(self._num_looks, len(self.instances) - 1)]
        self._num_looks += 1
        return web.json_response(answer)

    def _is_allowed(self, request: web.Request) -> bool:
        header = request.headers.get("Authorization")
        return self.api_key is None or header == f"Bearer {self.api_key}"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self.has_been_asked.set()
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await self._answer(stream, body)
        return stream


class Gate:
    """Opens when so many wait before it."""

    def __init__(self, num_waiting: int) -> None:
        self._left = num_waiting
        self._open = asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._open.set()
        await self._open.wait()


@asynccontextmanager
async def running(server: CompletionsServer) -> AsyncIterator[Target]:
    """Serve on a free port."""
    async with TestServer(server.application()) as listening:
        url = str(listening.make_url("")).rstrip("/")
        yield Target(url, MODEL, 2048, server.api_key)


@contextmanager
def in_thread(server: CompletionsServer) -> Iterator[str]:
    """Serve beside a test that has a loop of its own; gives the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    context = running(server)
    try:
        target = run(context.__aenter__())
        yield target.url
        run(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
