"""What a client sends is bounded: in size, and in the time that it may take.

The body of each request is read here, before anything else looks at it: vLLM's server would read
any number of bytes, for as long as somebody sends them.
"""

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.frontend.error_response import error_response
from sterna.frontend.keys import ApiKeys

METHODS = frozenset({"POST", "PUT", "PATCH"})
"""Others have no body that anybody would read; uvicorn takes only 64 KiB of one."""


class BodyLimit:
    """An ASGI application around vLLM's.

    Args:
        max_bytes: of one body.
        timeout_s: for all of it.
        keys: who shows none of them is refused further on, and no byte of its body is kept.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout_s: float, keys: ApiKeys | None = None
    ) -> None:
        self._app = app
        self._keys = keys or ApiKeys()
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await self._app(scope, receive, send)
            return
        if self._keys.refuse(Headers(scope=scope).get("Authorization")):
            await self._app(scope, replaying(b"", receive), send)
            return
        try:
            body = await self._read(scope, receive)
        except _TooLargeError:
            answer = _refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "ContentTooLargeError",
                f"the body has more than {self._max_bytes} bytes",
            )
        except TimeoutError:
            answer = _refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                "RequestTimeoutError",
                f"the body was not there after {self._timeout_s:g} s",
            )
        else:
            if body is not None:
                await self._app(scope, replaying(body, receive), send)
            return
        await answer(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the whole body, or None when the client went away.

        Raises:
            _TooLargeError: it has too many bytes, or says so.
            TimeoutError: it did not come in time.
        """
        declared = Headers(scope=scope).get("Content-Length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise _TooLargeError
        parts: list[bytes] = []
        num_bytes = 0
        async with asyncio.timeout(self._timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > self._max_bytes:
                    raise _TooLargeError
                if not message.get("more_body", False):
                    return b"".join(parts)


class _TooLargeError(Exception):
    """The body has too many bytes."""


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then what else comes: that the client went away."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _refusal(status: HTTPStatus, kind: str, message: str) -> JSONResponse:
    """Return OpenAI's error object; what else the client sends is not read."""
    return error_response(status, message, kind=kind, headers={"Connection": "close"})
