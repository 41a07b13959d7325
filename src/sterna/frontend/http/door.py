"""The front door: the whole chain of what a request passes on its way to vLLM's routes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sterna.config import DoorConfig
from sterna.frontend.http.api_keys import ApiKeys, Callers, KeyCheck
from sterna.frontend.http.body_limit import BodyLimit
from sterna.frontend.http.overload import FullLog, OverloadMiddleware, OverloadUnread
from sterna.frontend.http.queue_limit import QueueLimit
from sterna.frontend.http.request_context import RequestContext, current, entered
from sterna.frontend.http.service_tier import TierMiddleware
from sterna.frontend.http.shutdown_gate import Gate
from sterna.priority_classes import PriorityClasses


class OpenContext:
    """Opens the context of each request, for everything behind it."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        # A new one, for uvicorn may begin a client's next request within the one before.
        with entered(RequestContext(caller=self._callers.of(scope))):
            await self._app(scope, receive, send)


class RenewCaller:
    """Looks at path and key again: middlewares of the server's host (vLLM's `--middleware`) may
    change them, and a stream that was taken over has not come in by the door."""

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


@dataclass(frozen=True, slots=True)
class Door:
    """A server's front door.

    Attributes:
        app: the whole chain, the application at its end.
        gate: what closes the door.
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
) -> Door:
    """Put everything before vLLM's application that a request has to pass:

        OpenContext          who asks for what
        Gate                 503 when the server is about to end
        OverloadUnread       429 where the queue has no room for anybody; the body is not read
        BodyLimit            408, 413 and 429: the body is read, within bounds
        ResumableStreams     with the option: begins, keeps and reads streams on
          vLLM's own for errors, those of the server's host (`--middleware`), request ids
        RenewCaller          who asks for what, after these
        KeyCheck             401; in the place of vLLM's own check, where there are keys
          vLLM's own for browsers (CORS)
        TierMiddleware       400 for tiers that there are not; finds the class, says it in answers
        OverloadMiddleware   429 where the queue has no room for the class
          vLLM's routes

    Args:
        vllms_check: vLLM's middleware that checks keys.
        keep_streams: returns `ResumableStreams` around an application; None: there are no such
            streams.
    """
    callers = Callers(keys, root_path)
    log = FullLog()
    outer, inner = _around(vllms_check if keys.are_needed else None, app.user_middleware)
    app.user_middleware = [
        *outer,
        Middleware(RenewCaller, callers=callers),
        *([Middleware(KeyCheck)] if keys.are_needed else []),
        *inner,
        Middleware(TierMiddleware, classes=classes),
        Middleware(OverloadMiddleware, limit=queue, classes=classes, log=log),
    ]
    # vLLM has had it built already, for its hosts' own standards.
    app.middleware_stack = app.build_middleware_stack()
    # What is around the application is built from the inside out.
    chain: ASGIApp = app
    if keep_streams is not None:
        chain = keep_streams(chain)
    chain = BodyLimit(
        chain, config.max_body_bytes, config.body_timeout_s, config.max_waiting_body_bytes
    )
    chain = OverloadUnread(chain, queue, log)
    gate = Gate(chain)
    return Door(OpenContext(gate, callers), gate)


def _around(
    check: object, middlewares: Sequence[Middleware]
) -> tuple[list[Middleware], list[Middleware]]:
    """Return those outside of this one, and those inside; without one, all are outside."""
    if check is None:
        return [*middlewares], []
    (place,) = [place for place, each in enumerate(middlewares) if each.cls is check]
    return [*middlewares[:place]], [*middlewares[place + 1 :]]
