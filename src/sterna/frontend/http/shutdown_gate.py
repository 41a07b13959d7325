"""Shutdown gate: once closed, it refuses new requests, and waits for those that are inside.

An ASGI application around vLLM's. A closed gate answers 503 with `Retry-After`, also to `/health`,
so that load balancers take the server out; `/metrics` and `/admin` go on to work (`routes`).

A response in the background (OpenAI's `background`) is inside like a request, although the answer
to its request is complete: its client asks for it later, again and again, until it is there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from sterna.frontend.http.request_context import caller
from sterna.frontend.http.request_errors import error_response
from sterna.frontend.http.routes import AtShutdown

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_S = 5
"""By then another server, or this one's successor, may answer."""


FETCH_S = 3.0
"""Time for the client of a response in the background to fetch it: clients ask about every two
seconds."""


class Gate:
    """Lets requests in until it is closed, and knows when the last one has left.

    Args:
        background: the tasks that make responses in the background, by their ids; vLLM's server
            adds them and takes them out.
    """

    def __init__(
        self,
        application: Application,
        background: Mapping[str, asyncio.Task[None]] = MappingProxyType({}),
    ) -> None:
        self._application = application
        self._background = background
        self._is_closed = False
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._watched: set[asyncio.Task[None]] = set()
        # By then the client of the last response in the background has asked for it.
        self._fetched_by_s = 0.0

    @property
    def num_inside(self) -> int:
        """Number of requests whose answers are not complete, and of responses in the background."""
        return self._num_inside + len(self._background)

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._is_closed = True

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until no request is inside, and clients could fetch what was made in the background;
        returns False if a request still is at the time-out."""
        loop = asyncio.get_running_loop()
        self._watch_background()
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_inside or loop.time() < self._fetched_by_s:
                    await self._empty.wait()
                    if self._background:
                        self._watch_background()
                        await asyncio.wait(self._background.values())
                    else:
                        await asyncio.sleep(self._fetched_by_s - loop.time())
        except TimeoutError:
            return self.num_inside == 0
        return True

    def _watch_background(self) -> None:
        """Note the ends of the responses in the background."""
        for task in set(self._background.values()) - self._watched:
            self._watched.add(task)
            task.add_done_callback(self._on_background_end)

    def _on_background_end(self, task: asyncio.Task[None]) -> None:
        self._watched.discard(task)
        self._fetched_by_s = task.get_loop().time() + FETCH_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] not in ("http", "websocket"):
            await self._application(scope, receive, send)
            return
        at_shutdown = caller().route.at_shutdown
        if self._is_closed and at_shutdown in (AtShutdown.FINISHED, AtShutdown.PROBE):
            await self._refuse(scope, receive, send)
        elif at_shutdown in (AtShutdown.FINISHED, AtShutdown.AWAITED):
            await self._let_in(scope, receive, send)
        else:
            await self._application(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_inside += 1
        self._empty.clear()
        try:
            await self._application(scope, receive, send)
        finally:
            self._watch_background()
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # A websocket that is closed before it is accepted is refused.
            await send({"type": "websocket.close", "code": 1012})
            return
        response = error_response(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the server is shutting down",
            headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
        )
        await response(scope, receive, send)
