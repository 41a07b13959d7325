"""Streams that a client may leave and read on (`--resumable-streams`).

An ASGI application around vLLM's. Each event of a streamed answer says its number; a client whose
connection broke sends its request again, with the `X-Request-Id` of the answer and the
`Last-Event-ID` that it has, and gets the rest: what was generated meanwhile, and what still is. The
answer is generated as if the client had never gone; after `window_s` without it, it is given up.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.frontend.bodies import replaying
from sterna.frontend.error_response import error_response
from sterna.frontend.event_log import EventLog, EventLogs

logger = logging.getLogger(__name__)

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
REQUEST_ID = "X-Request-Id"
LAST_EVENT_ID = "Last-Event-ID"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


class _Body(msgspec.Struct):
    """A request, as far as it is looked at."""

    stream: bool | None = False


class ResumableStreams:
    """Keeps the streams of the application behind it.

    Args:
        window_s: see `EventLogs`.
        max_bytes: see `EventLogs`.
    """

    def __init__(self, app: ASGIApp, window_s: float, max_bytes: int) -> None:
        self._app = app
        self._logs = EventLogs(window_s, max_bytes)
        self._runs: dict[str, _Run] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if LAST_EVENT_ID in headers:
            await self._read_on(headers, scope, receive, send)
            return
        body = await _whole_body(receive)
        if body is None:
            return
        if not _is_streamed(body):
            await self._app(scope, replaying(body, receive), send)
            return
        await self._begin(headers, body, scope, receive, send)

    # -------------------------------------------------------------------------- new streams

    async def _begin(
        self, headers: Headers, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request_id = headers.get(REQUEST_ID, uuid.uuid4().hex)
        if _REQUEST_ID.fullmatch(request_id) is None:
            text = f"{REQUEST_ID} must have 1 to 200 visible ASCII characters"
            await error_response(HTTPStatus.BAD_REQUEST, text)(scope, receive, send)
            return
        log = self._logs.open(request_id, _owner(headers))
        if log is None:
            text = (
                f"a stream of this {REQUEST_ID} is kept already: send {LAST_EVENT_ID} to read it "
                "on (0 from its beginning), or take another id"
            )
            await error_response(HTTPStatus.CONFLICT, text)(scope, receive, send)
            return
        named: MutableMapping[str, Any] = {**scope, "headers": [*scope["headers"]]}
        MutableHeaders(scope=named)[REQUEST_ID] = request_id
        run = self._runs[request_id] = _Run(request_id, log)
        run.task = asyncio.create_task(self._generate(run, named, body))
        await self._follow(run, 0, scope, receive, send)

    async def _generate(self, run: "_Run", scope: Scope, body: bytes) -> None:
        """Have the answer generated to its end, whether or not somebody reads it."""

        async def receive() -> Message:
            if not run.is_body_read:
                run.is_body_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await run.given_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                run.start, run.is_stream = message, _is_event_stream(message)
            elif run.is_stream:
                for other in self._logs.feed(run.request_id, message.get("body", b"")):
                    self._give_up(other)
            else:
                run.plain.append(message)
            run.tell()

        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("stream broke off request=%s", run.request_id)
        finally:
            run.is_over = True
            self._logs.on_finished(run.request_id, _now_s())
            if not run.is_stream:
                self._forget(run.request_id)
            self._schedule()
            run.tell()

    # --------------------------------------------------------------------------- followers

    async def _read_on(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        request_id, last = headers.get(REQUEST_ID, ""), headers[LAST_EVENT_ID]
        log = self._logs.find(request_id)
        if log is None or not hmac.compare_digest(log.owner, _owner(headers)):
            text = (
                f"no stream of this {REQUEST_ID} is kept here: it has ended too long ago, or "
                "never was; send the request anew"
            )
            answer: ASGIApp = error_response(HTTPStatus.NOT_FOUND, text)
        elif not last.isdecimal() or int(last) > len(log.events):
            text = f"{LAST_EVENT_ID} must be a number up to {len(log.events)}, not {last[:50]!r}"
            answer = error_response(HTTPStatus.BAD_REQUEST, text)
        else:
            await self._follow(self._runs[request_id], int(last), scope, receive, send)
            return
        await answer(scope, receive, send)

    async def _follow(
        self, run: "_Run", num_known: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send what there is behind the events that the client has, and what comes, until the
        stream ends or the client goes."""
        self._logs.on_follower(run.log)
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self._tell_all(run, num_known, gone, send)
        finally:
            gone.cancel()
            self._logs.on_left(run.log, _now_s())
            self._schedule()

    async def _tell_all(
        self, run: "_Run", num_known: int, gone: "asyncio.Task[None]", send: Send
    ) -> None:
        has_started, num_plain = False, 0
        while not gone.done():
            news = run.news
            if run.start is not None and not has_started:
                has_started = True
                await send(_with_id(run.start, run.request_id))
            if run.is_stream:
                while num_known < len(run.log.events) and not gone.done():
                    # All that is there goes out at once.
                    events = run.log.events[num_known:]
                    num_known += len(events)
                    await send(_content(b"".join(events)))
            else:
                for message in run.plain[num_plain:]:
                    num_plain += 1
                    await send(message)
            if run.is_over and num_known >= len(run.log.events):
                await self._end(run, has_started, num_plain, send)
                return
            if news is run.news:
                waiting = asyncio.create_task(news.wait())
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()

    async def _end(self, run: "_Run", has_started: bool, num_plain: int, send: Send) -> None:
        if run.is_stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif not has_started:
            raise RuntimeError("the application ended without an answer")

    # ----------------------------------------------------------------------------- given up

    def _give_up(self, request_id: str) -> None:
        """The stream is not kept any more; if it is still generated, for nobody, it ends."""
        run = self._runs.pop(request_id, None)
        if run is not None and not run.is_over:
            logger.info("stream given up, nobody came back request=%s", request_id)
            run.given_up.set()

    def _forget(self, request_id: str) -> None:
        self._logs.forget(request_id)
        self._runs.pop(request_id, None)

    def _schedule(self) -> None:
        deadline_s = self._logs.next_deadline_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for request_id in self._logs.expired(_now_s()):
            self._give_up(request_id)
        self._schedule()


class _Run:
    """An answer that is being generated, or was.

    Attributes:
        start: the head of the answer, when it is there.
        is_stream: whether the answer is one of events; an error is not.
        plain: the messages behind it, where the answer is no stream.
        is_over: nothing more will come.
        given_up: nobody will read it.
        news: set, and replaced, whenever something has come.
    """

    def __init__(self, request_id: str, log: EventLog) -> None:
        self.request_id = request_id
        self.log = log
        self.task: asyncio.Task[None] | None = None
        self.start: Message | None = None
        self.plain: list[Message] = []
        self.is_stream = False
        self.is_body_read = False
        self.is_over = False
        self.given_up = asyncio.Event()
        self.news = asyncio.Event()

    def tell(self) -> None:
        """Wake everybody who follows it."""
        self.news.set()
        self.news = asyncio.Event()


async def _whole_body(receive: Receive) -> bytes | None:
    """Return the request's body; None: the client went away. Its size was bounded before."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_event_stream(start: Message) -> bool:
    kind = Headers(raw=start.get("headers", [])).get("content-type", "")
    return kind.startswith("text/event-stream")


def _is_streamed(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Body).stream)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # vLLM's server says what is wrong with it.
        return False


def _owner(headers: Headers) -> bytes:
    return hashlib.sha256(headers.get("Authorization", "").encode()).digest()


def _with_id(start: Message, request_id: str) -> Message:
    answer = {**start, "headers": [*start.get("headers", [])]}
    MutableHeaders(raw=answer["headers"])[REQUEST_ID] = request_id
    return answer


def _content(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _now_s() -> float:
    return asyncio.get_running_loop().time()
