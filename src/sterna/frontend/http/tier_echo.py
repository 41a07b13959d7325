"""Tier echo: writes `service_tier` into answers on their way out.

vLLM leaves the field null in completions and out of their chunks. Chunks are not parsed: a token
costs one search in some hundred bytes. Streams are not held back; an answer in one piece is.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

CHUNK_BEGIN = b'data: {"id":'
"""The beginning of every chunk of a completion. It occurs nowhere else: quotes in text are
escaped."""

EMPTY_FIELD = b'"service_tier":null'
RESPONSE_FIELD = b'"service_tier":'
DATA = b"data: "


def echoing(send: Send, tier: str) -> Send:
    """Return a `send` that adds the tier to a completion, whole or in chunks."""
    name = json.dumps(tier).encode()
    chunk_begin = b'data: {"service_tier":' + name + b',"id":'

    def in_chunks(part: bytes) -> bytes:
        return part.replace(CHUNK_BEGIN, chunk_begin)

    def in_whole(body: bytes) -> bytes:
        if EMPTY_FIELD in body:
            return body.replace(EMPTY_FIELD, b'"service_tier":' + name, 1)
        return _with_field(body, tier)

    return _Rewriting(send, in_chunks, in_whole)


def echoing_responses(send: Send, tier: str) -> Send:
    """Return a `send` that changes the tier in answers of the Responses API: in the few events
    that contain the whole response."""

    def in_events(part: bytes) -> bytes:
        if RESPONSE_FIELD not in part:
            return part
        return b"\n".join(in_event_line(line) for line in part.split(b"\n"))

    def in_event_line(line: bytes) -> bytes:
        if not line.startswith(DATA):
            return line
        event = json.loads(line.removeprefix(DATA))
        response = event.get("response")
        if not isinstance(response, dict) or "service_tier" not in response:
            return line
        response["service_tier"] = tier
        return DATA + _encoded(event)

    return _Rewriting(send, in_events, lambda body: _with_field(body, tier))


class _Rewriting:
    """A `send` that changes the body of an answer of status 200."""

    def __init__(
        self,
        send: Send,
        in_stream: Callable[[bytes], bytes],
        in_whole: Callable[[bytes], bytes],
    ) -> None:
        self._send = send
        self._in_stream = in_stream
        self._in_whole = in_whole
        self._held: Message | None = None
        self._parts: list[bytes] = []
        self._is_stream = False

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        # A chunk has no coroutine of its own: there is one for each token.
        if self._is_stream and message["type"] == "http.response.body":
            return self._send({**message, "body": self._in_stream(message.get("body", b""))})
        return self._send_other(message)

    async def _send_other(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = message["status"] == 200 and kind.startswith("text/event-stream")
            if message["status"] == 200 and kind.startswith("application/json"):
                # This message contains the length of the body, which is not known yet.
                self._held = message
                return
        elif message["type"] == "http.response.body" and self._held is not None:
            await self._send_whole(message)
            return
        await self._send(message)

    async def _send_whole(self, message: Message) -> None:
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        assert self._held is not None
        body = self._in_whole(b"".join(self._parts))
        start = {**self._held, "headers": list(self._held["headers"])}
        MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _with_field(body: bytes, tier: str) -> bytes:
    answer = json.loads(body)
    if not isinstance(answer, dict):
        return body
    return _encoded({**answer, "service_tier": tier})


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
