"""Limits for request bodies: the size of one, the size of all together, and the time of one.

The body of each request is read here, before anything else looks at it: vLLM's server would read
any number of bytes, for as long as a client sends them. All bodies together have a budget, from the
first byte of each until its answer begins. A request that would exceed it is refused, and may be
repeated later. It does not wait: several half-read bodies could wait for each other forever.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.frontend.http.request_context import caller, current, entered
from sterna.frontend.http.request_errors import error_response

logger = logging.getLogger(__name__)

METHODS = frozenset({"POST", "PUT", "PATCH"})
"""The bodies of other methods are not read; uvicorn takes only 64 KiB of one."""


RETRY_AFTER_S = 5
"""For a body without room: by then some other answers will have begun."""


ROOM_AGAIN = 0.9
"""Fraction of the budget: with less taken, the log says that there is room again."""


class BodyLimit:
    """An ASGI application around vLLM's.

    Args:
        max_bytes: limit for one body.
        max_waiting_bytes: limit for all bodies whose answers have not begun.
        timeout_s: for the whole body.
        reads_unknown: whether bodies of callers without a key are read too: a middleware further in
            may give them one.

    Attributes:
        num_waiting_bytes: size of all bodies whose answers have not begun.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        timeout_s: float,
        max_waiting_bytes: int = sys.maxsize,
        *,
        reads_unknown: bool = False,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._timeout_s = timeout_s
        self._reads_unknown = reads_unknown
        self.num_waiting_bytes = 0
        self._num_refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await self._app(scope, receive, send)
            return
        if not (caller().is_known or self._reads_unknown):
            # The key check refuses it, and no byte of its body is kept.
            await self._app(scope, replaying(b"", receive), send)
            return
        share = _Share(self)
        try:
            replayed = await self._read(scope, receive, share)
            if replayed is not None:
                with entered(replace(current(), keep_body=share.keep)):
                    await self._app(scope, replayed, share.until_answered(send))
            return
        except _TooLargeError:
            answer = _refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "ContentTooLargeError",
                f"the body has more than {self._max_bytes} bytes",
            )
        except _NoRoomError:
            answer = _refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                "RateLimitError",
                "the bodies of requests that wait leave no room for this one; try again in "
                f"{RETRY_AFTER_S} s",
            )
            answer.headers["Retry-After"] = str(RETRY_AFTER_S)
        except _TooSlowError:
            answer = _refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                "RequestTimeoutError",
                f"the body was not complete after {self._timeout_s:g} s",
            )
        finally:
            if not share.is_kept:
                share.give_back()
        await answer(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, share: "_Share") -> Receive | None:
        """Return a `receive` that gives the whole body, or None when the client went away.

        Raises:
            _TooLargeError: the body has too many bytes, or its header says so.
            _NoRoomError: all bodies together would have too many bytes.
            _TooSlowError: the body did not arrive in time.
        """
        declared = Headers(scope=scope).get("Content-Length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise _TooLargeError
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    if share.num_bytes + len(parts[-1]) > self._max_bytes:
                        raise _TooLargeError
                    share.take(len(parts[-1]))
                    if not message.get("more_body", False):
                        return replaying(b"".join(parts), receive)
        except TimeoutError:
            raise _TooSlowError from None

    def take(self, num_bytes: int) -> None:
        """Add this number of bytes to those that are kept.

        Raises:
            _NoRoomError: the budget has no room for them.
        """
        if self.num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            self._num_refused += 1
            if self._num_refused == 1:
                logger.warning(
                    "bodies are refused, too many bytes wait num_bytes=%d", self.num_waiting_bytes
                )
            raise _NoRoomError
        self.num_waiting_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Remove this number of bytes from those that are kept."""
        self.num_waiting_bytes -= num_bytes
        if self._num_refused and self.num_waiting_bytes < ROOM_AGAIN * self._max_waiting_bytes:
            logger.warning("bodies are taken again refused=%d", self._num_refused)
            self._num_refused = 0


class _Share:
    """The part of the budget that one body has.

    Attributes:
        is_kept: the body is needed even after its client has gone.
    """

    def __init__(self, limit: BodyLimit) -> None:
        self._limit = limit
        self.num_bytes = 0
        self.is_kept = False

    def take(self, num_bytes: int) -> None:
        """See `BodyLimit`."""
        self._limit.take(num_bytes)
        self.num_bytes += num_bytes

    def give_back(self) -> None:
        """Give the whole part back."""
        self._limit.give_back(self.num_bytes)
        self.num_bytes = 0

    def keep(self) -> Callable[[], None]:
        """See `RequestContext.keep_body`."""
        self.is_kept = True
        return self.give_back

    def until_answered(self, send: Send) -> Send:
        """Return a `send` that gives the part back when the answer begins."""

        def send_on(message: Message) -> Awaitable[None]:
            if self.num_bytes:
                self.give_back()
            return send(message)

        return send_on


class _TooLargeError(Exception):
    """The body has too many bytes."""


class _NoRoomError(Exception):
    """All bodies together have too many bytes."""


class _TooSlowError(Exception):
    """The body did not arrive in time."""


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then the later messages: the client went away."""
    given: bytes | None = body

    async def receive_again() -> Message:
        nonlocal given
        if given is None:
            return await receive()
        # From here on the application that reads the body keeps it.
        message, given = {"type": "http.request", "body": given, "more_body": False}, None
        return message

    return receive_again


async def whole_body(receive: Receive) -> bytes | None:
    """Return the request's body; None: the client went away. After `BodyLimit` its size is bounded,
    and it arrives in one piece."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _refusal(status: HTTPStatus, kind: str, message: str) -> JSONResponse:
    """Return OpenAI's error object; the rest of what the client sends is not read."""
    return error_response(status, message, kind=kind, headers={"Connection": "close"})
