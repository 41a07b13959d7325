"""The front door: the chain of ASGI applications that a request passes before vLLM's routes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import MappingProxyType

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.config import DoorConfig
from sterna.frontend.http.api_keys import ApiKeys, Callers, KeyCheck
from sterna.frontend.http.body_limit import BodyLimit
from sterna.frontend.http.overload import FullLog, OverloadMiddleware, OverloadUnread
from sterna.frontend.http.queue_limit import QueueLimit
from sterna.frontend.http.request_context import RequestContext, current, entered
from sterna.frontend.http.server_timing import ServerTiming, TimingOf
from sterna.frontend.http.service_tier import TierMiddleware
from sterna.frontend.http.shutdown_gate import Gate
from sterna.priority_classes import PriorityClasses


class OpenContext:
    """Opens the context of each request, for all applications further in."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        # A new context: uvicorn may begin a client's next request within the previous one.
        with entered(RequestContext(caller=self._callers.of(scope))):
            await self._app(scope, receive, send)


class NoWebSockets:
    """Refuses websockets. vLLM has them for its realtime API, which is not served: it would keep
    all that a client sends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] == "websocket":
            # Closed before it is accepted: the client gets 403.
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)


class RenewCaller:
    """Finds the caller again: middlewares of the operator (vLLM's `--middleware`) may change path
    and key, and the request of a stream that was taken over has not passed `OpenContext`."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        with entered(replace(current(), caller=self._callers.of(scope))):
            await self._app(scope, receive, send)


class EndOfChecks:
    """Ends requests that need the checks alone: a stream is resumed outside of these
    (`ResumableStreams`), with the headers that its answer has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        on_checked = current().on_checked
        if on_checked is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        on_checked()
        await Response(status_code=HTTPStatus.NO_CONTENT)(scope, receive, send)


class StreamMarks:
    """Puts the marks of a stream that is kept between its events (`AnsweredStream.carry_marks`).

    It is the innermost: middlewares of the operator may change the number of events, and
    Starlette's `BaseHTTPMiddleware` hands a part of an answer on when vLLM's code has gone on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        stream = current().stream
        if stream is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = stream.carry_marks()

        def send_marked(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.body" and (marks := taken()):
                message = {**message, "body": marks + message.get("body", b"")}
            return send(message)

        await self._app(scope, receive, send_marked)


@dataclass(frozen=True, slots=True)
class Door:
    """A server's front door.

    Attributes:
        app: the whole chain, with the application at its end.
        gate: closes the door.
    """

    app: ASGIApp
    gate: Gate


def build_door(
    app: FastAPI,
    vllms_check: type,
    keys: ApiKeys,
    classes: PriorityClasses,
    queue: QueueLimit,
    config: DoorConfig,
    root_path: str = "",
    keep_streams: Callable[[ASGIApp], ASGIApp] | None = None,
    timing_of: TimingOf | None = None,
    background: Mapping[str, asyncio.Task[None]] = MappingProxyType({}),
    *,
    has_operators_middleware: bool = False,
) -> Door:
    """Put these in front of vLLM's application, in the order in which a request passes them:

        OpenContext          finds the caller
        Gate                 503 when the server is about to end
        NoWebSockets         403 for all of them
        OverloadUnread       429 if the queue has no room for any class; the body is not read
        BodyLimit            408, 413 and 429: reads the body, within limits
        ResumableStreams     with the option: begins, keeps and resumes streams
          vLLM's own for errors, those of the operator (`--middleware`), request ids
        RenewCaller          finds the caller again, after these
        KeyCheck             401; replaces vLLM's own check, if there are keys
        EndOfChecks          a client that resumes a stream goes no further
          vLLM's own for browsers (CORS)
        TierMiddleware       400 for unknown tiers; finds the class, writes it into answers
        OverloadMiddleware   429 if the queue has no room for the class
        ServerTiming         unless turned off: the header of that name
        StreamMarks          with resumable streams and middlewares that need it
          vLLM's routes

    Args:
        vllms_check: vLLM's middleware that checks keys.
        keep_streams: returns `ResumableStreams` around an application; None without resumable
            streams.
        timing_of: for `ServerTiming`; None without the header.
        background: that of `Gate`.
        has_operators_middleware: whether there are middlewares of the operator.
    """
    callers = Callers(keys, root_path)
    log = FullLog()
    needs_marks = has_operators_middleware or any(
        isinstance(each.cls, type) and issubclass(each.cls, BaseHTTPMiddleware)
        for each in app.user_middleware
    )
    outer, inner = _around(vllms_check if keys.are_needed else None, app.user_middleware)
    app.user_middleware = [
        *outer,
        Middleware(RenewCaller, callers=callers),
        *([Middleware(KeyCheck)] if keys.are_needed else []),
        *([] if keep_streams is None else [Middleware(EndOfChecks)]),
        *inner,
        Middleware(TierMiddleware, classes=classes),
        Middleware(OverloadMiddleware, limit=queue, classes=classes, log=log),
        *([] if timing_of is None else [Middleware(ServerTiming, timing_of=timing_of)]),
        *([Middleware(StreamMarks)] if keep_streams is not None and needs_marks else []),
    ]
    # vLLM has built the stack already, for the standards of hosting services (SageMaker).
    app.middleware_stack = app.build_middleware_stack()
    # The applications around this one are built from the inside out.
    chain: ASGIApp = app
    if keep_streams is not None:
        chain = keep_streams(chain)
    chain = BodyLimit(
        chain,
        config.max_body_bytes,
        config.body_timeout_s,
        config.max_waiting_body_bytes,
        reads_unknown=has_operators_middleware,
    )
    chain = NoWebSockets(OverloadUnread(chain, queue, log))
    gate = Gate(chain, background)
    return Door(OpenContext(gate, callers), gate)


def _around(
    check: object, middlewares: Sequence[Middleware]
) -> tuple[list[Middleware], list[Middleware]]:
    """Return the middlewares outside of the check, and those inside; without a check, all are
    outside."""
    if check is None:
        return [*middlewares], []
    (place,) = [place for place, each in enumerate(middlewares) if each.cls is check]
    return [*middlewares[:place]], [*middlewares[place + 1 :]]
