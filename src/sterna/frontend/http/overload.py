"""Overload answers: 429 with `Retry-After` at once while the queue is full, as in OpenAI's API.

The queue is checked twice. First before the body is read, when the class is not known: if not even
an urgent request would be let in, nothing is read. Then in the innermost of the server's
middlewares: a request that gets there has shown a key, and its class is known.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.frontend.http.queue_limit import Full, QueueLimit, Ticket
from sterna.frontend.http.request_context import (
    LAST_EVENT_ID,
    caller,
    current,
    entered,
    is_taken_over,
    notify_let_in,
)
from sterna.frontend.http.request_errors import error_response
from sterna.frontend.http.service_tier import used_class
from sterna.priority_classes import PriorityClasses

logger = logging.getLogger(__name__)

UNREAD_BYTES = 64 << 10
"""A refused request with a longer body loses its connection, so that the body is not received."""


class FullLog:
    """One line in the log when the queue fills and one when it has room again, none per request."""

    def __init__(self) -> None:
        self._num_refused = 0

    def on_refused(self, full: Full) -> None:
        """A request has been refused."""
        self._num_refused += 1
        if self._num_refused == 1:
            logger.warning(
                "queue full, requests are refused waiting=%d limit=%d", full.num_waiting, full.limit
            )

    def on_let_in(self) -> None:
        """A request has been let in."""
        if self._num_refused:
            logger.warning("queue has room again refused=%d", self._num_refused)
            self._num_refused = 0


class OverloadUnread:
    """Refuses inference whose body has not been read, while not even urgent requests are let in."""

    def __init__(self, app: ASGIApp, limit: QueueLimit, log: FullLog) -> None:
        self._app = app
        self._limit = limit
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        full = self._full(scope)
        if full is None:
            await self._app(scope, receive, send)
            return
        self._log.on_refused(full)
        answer = _refusal(full)
        length = Headers(scope=scope).get("Content-Length", "")
        if not length.isdecimal() or int(length) > UNREAD_BYTES:
            answer.headers["Connection"] = "close"
        await answer(scope, receive, send)

    def _full(self, scope: Scope) -> Full | None:
        # A client that resumes a stream does not wait a second time. A caller without a key is
        # refused further in.
        if (
            not _is_inference(scope)
            or LAST_EVENT_ID in Headers(scope=scope)
            or not caller().is_known
        ):
            return None
        return self._limit.full(_now_s(), is_urgent=True)


class OverloadMiddleware:
    """Refuses inference while too many requests wait."""

    def __init__(
        self,
        app: ASGIApp,
        limit: QueueLimit,
        classes: PriorityClasses,
        log: FullLog | None = None,
    ) -> None:
        self._app = app
        self._limit = limit
        self._classes = classes
        self._log = log or FullLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        # A request that another front end has let in does not wait a second time.
        if not _is_inference(scope) or is_taken_over():
            await self._app(scope, receive, send)
            return
        used = used_class()
        normal = self._classes.normal
        is_urgent = used is not None and used.scheduling_priority > normal.scheduling_priority
        ticket = self._limit.enter(_now_s(), is_urgent=is_urgent)
        if isinstance(ticket, Full):
            self._log.on_refused(ticket)
            await _refusal(ticket)(scope, receive, send)
            return
        self._log.on_let_in()
        notify_let_in()
        answer = _Answer(ticket, send)
        try:
            with entered(replace(current(), ticket=ticket)):
                await self._app(scope, receive, answer.send)
        finally:
            self._limit.leave(ticket)
        if answer.refused is not None:
            await _refusal(answer.refused)(scope, receive, send)


def reserved(limit: QueueLimit, num_choices: int) -> Full | None:
    """Reserve places for this number of engine requests of the HTTP request that is being answered.

    Returns why there is no room, if there is none: the client gets this refusal, whatever the
    application answers.

    Raises:
        TooManyAtOnceError: they are more than one HTTP request may have.
    """
    ticket = current().ticket
    return None if ticket is None else limit.reserve(ticket, num_choices, _now_s())


def counted(
    limit: QueueLimit, name: str, outputs: AsyncGenerator[Any, None], num_choices: int
) -> AsyncGenerator[Any, None]:
    """Return these outputs of engine requests, which count as waiting until their first tokens.

    Their places have been reserved for the HTTP request that is being answered.
    """
    ticket = current().ticket
    return outputs if ticket is None else _counted(limit, name, outputs, ticket, num_choices)


async def _counted(
    limit: QueueLimit,
    name: str,
    outputs: AsyncGenerator[Any, None],
    ticket: Ticket,
    num_choices: int,
) -> AsyncGenerator[Any, None]:
    generation = limit.begin(name, ticket, num_choices)
    try:
        async for output in outputs:
            yield output
    finally:
        limit.end(generation)
        # Closing this generator closes the inner one, which aborts the request.
        await outputs.aclose()


class _Answer:
    """The answer of the application, which is dropped if the request is refused before it."""

    def __init__(self, ticket: Ticket, send: Send) -> None:
        self._ticket = ticket
        self._send = send
        self._has_begun = False

    @property
    def refused(self) -> Full | None:
        """The refusal, if the request was refused before an answer began."""
        return None if self._has_begun else self._ticket.refused

    def send(self, message: Message) -> Awaitable[None]:
        """See ASGI. A message has no coroutine of its own: there is one for each token."""
        if not self._has_begun:
            if self._ticket.refused is not None:
                return _dropped()
            self._has_begun = True
        return self._send(message)


async def _dropped() -> None:
    """What becomes of the answer to a request that is refused."""


def _is_inference(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and caller().route.is_inference


def _refusal(full: Full) -> JSONResponse:
    text = f"too many requests wait ({full.num_waiting}); try again in {full.retry_after_s} s"
    if full.num_asked > 1:
        text += (
            f", or with fewer prompts and choices at once: this one has {full.num_asked} or more, "
            f"and {full.limit} may wait, unless nothing else waits"
        )
    return error_response(
        HTTPStatus.TOO_MANY_REQUESTS,
        text,
        kind="RateLimitError",
        headers={"Retry-After": str(full.retry_after_s)},
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
