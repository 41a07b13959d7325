"""Streams that a client may leave and read on (`--resumable-streams`).

An ASGI application around vLLM's. Each event of a streamed answer says its number; a client whose
connection broke sends its request again, with the `X-Request-Id` of the answer and the
`Last-Event-ID` that it has, and gets the rest: what was generated meanwhile, and what still is. The
answer is generated as if the client had never gone; after `window_s` without it, it is given up.

With several front ends, a stream is read on at any of them (`relays`). One whose front end dies
goes on at another one, which runs the request again, from the record that it has of it (`pacing`);
a stream that had ended waits there until somebody asks for it.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.errors import UNREADABLE
from sterna.frontend.http.body_limit import replaying, whole_body
from sterna.frontend.http.request_context import (
    LAST_EVENT_ID,
    AnsweredStream,
    RequestContext,
    caller,
    current,
    entered,
)
from sterna.frontend.http.request_errors import error_response
from sterna.frontend.resumable.answers import (
    REQUEST_ID,
    Answer,
    head_of,
    is_event_stream,
    scope_of,
    until_gone,
)
from sterna.frontend.resumable.event_log import EventLogs
from sterna.frontend.resumable.exchange import StreamExchange
from sterna.frontend.resumable.relays import Reading
from sterna.frontend.resumable.replicas import Record, dated
from sterna.frontend.resumable.resume_validity import Knowledge

logger = logging.getLogger(__name__)

NUM_RUN_AGAIN = 8
"""Streams of a dead front end that come to their events again at the same time: this front end's
own streams are not to wait for hundreds of them."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_EVENT_NUMBER = re.compile(r"[0-9]{1,18}")


class _Body(msgspec.Struct):
    """A request, as far as it is looked at."""

    stream: bool | None = False


class ResumableStreams:
    """Keeps the streams of the application behind it.

    Args:
        window_s: see `EventLogs`.
        max_bytes: see `EventLogs`.
        exchange: with the other front ends; None: there are none.
    """

    def __init__(
        self,
        app: ASGIApp,
        window_s: float,
        max_bytes: int,
        exchange: StreamExchange | None = None,
    ) -> None:
        self._app = app
        self._logs = EventLogs(window_s, max_bytes)
        self._runs: dict[str, Answer] = {}
        # Answers that are no streams: how many of each id are under way.
        self._plain: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._turns = asyncio.Semaphore(NUM_RUN_AGAIN)
        self._has_turn: set[Answer] = set()
        self._exchange = exchange
        if exchange is not None:
            exchange.attach(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if not is_post or not caller().route.is_resumable:
            await self._app(scope, receive, send)
            return
        if not caller().is_known:
            # The application refuses it: nothing of it is to be kept, or sent to another front end.
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if LAST_EVENT_ID in headers:
            await self._read_on(headers, scope, receive, send)
            return
        body = await whole_body(receive)
        if body is None:
            return
        if not _is_streamed(body):
            await self._pass(headers.get(REQUEST_ID), scope, replaying(body, receive), send)
            return
        await self._begin(headers, body, scope, receive, send)

    async def _pass(
        self, request_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let a request pass whose answer is no stream."""
        if request_id is None:
            await self._app(scope, receive, send)
            return
        run = self._runs.get(request_id)
        if run is not None and run.has_replica and not run.is_over:
            # Their engine requests would have the same names.
            await _taken()(scope, receive, send)
            return
        self._plain[request_id] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._plain[request_id] -= 1
            self._plain += Counter()

    # -------------------------------------------------------------------------- new streams

    async def _begin(
        self, headers: Headers, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request_id = headers.get(REQUEST_ID, uuid.uuid4().hex)
        if _REQUEST_ID.fullmatch(request_id) is None:
            text = f"{REQUEST_ID} must have 1 to 200 visible ASCII characters"
            await error_response(HTTPStatus.BAD_REQUEST, text)(scope, receive, send)
            return
        log = None if request_id in self._plain else self._logs.open(request_id, _owner(headers))
        if log is None:
            await _taken()(scope, receive, send)
            return
        named: MutableMapping[str, Any] = {**scope, "headers": [*scope["headers"]]}
        MutableHeaders(scope=named)[REQUEST_ID] = request_id
        run = self._runs[request_id] = Answer(request_id, log, int(_wall_s()))
        run.has_replica = self._exchange is not None and caller().route.is_replicated
        run.on_begun = current().keep_body()
        stream = AnsweredStream(request_id, False, partial(self._on_let_in, run, named, body))
        context = replace(current(), stream=stream)
        run.task = asyncio.create_task(self._generate(run, named, body, context))
        async with self._following(run, receive) as gone:
            await run.follow(0, gone, send)

    def _on_let_in(self, run: Answer, scope: Scope, body: bytes) -> None:
        """Have the other front end told of it; who is refused costs that one nothing."""
        is_kept = self._runs.get(run.request_id) is run
        if self._exchange is not None and run.has_replica and is_kept:
            self._exchange.begin(head_of(run, scope), body)

    async def _generate(
        self, run: Answer, scope: Scope, body: bytes, context: RequestContext
    ) -> None:
        """Have the answer generated to its end, whether or not somebody reads it."""

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                run.start, run.is_stream = message, is_event_stream(message)
                run.on_begun()
            elif not run.is_stream:
                run.plain.append(message)
            elif self._runs.get(run.request_id) is run:
                content = dated(message.get("body", b""), run.created_s)
                for other in self._logs.feed(run.request_id, content):
                    self._give_up(other)
            run.tell()

        try:
            with entered(context):
                await self._app(scope, run.receive(body), send)
        except Exception:
            logger.exception("stream broke off request=%s", run.request_id)
        finally:
            self._on_over(run)

    def _on_over(self, run: Answer) -> None:
        run.is_over = True
        run.on_begun()
        run.horizon.on_over(len(run.log.events))
        self._end_turn(run)
        # Another stream may have its id by now.
        if self._runs.get(run.request_id) is run:
            self._logs.on_finished(run.request_id, _now_s())
            if self._exchange is not None and run.has_replica:
                self._exchange.over(run.request_id)
            if not run.is_stream:
                self._logs.forget(run.request_id)
                self._give_up(run.request_id)
            self._schedule()
        run.tell()

    # --------------------------------------------------------------------------- followers

    async def _read_on(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        request_id, last = headers.get(REQUEST_ID, ""), headers[LAST_EVENT_ID]
        owner = _owner(headers)
        if self._exchange is None or self.has(request_id, owner):
            await self.answer(request_id, owner, last, receive, send)
            return
        match await self._exchange.read(request_id, owner, last, receive, send):
            case Reading.NOWHERE:
                await _unknown()(scope, receive, send)
            case Reading.UNDECIDED:
                await _undecided()(scope, receive, send)
            case Reading.ANSWERED:
                pass

    def has(self, stream_id: str, owner: bytes) -> bool:
        """See `KeptStreams`."""
        log = self._logs.find(stream_id)
        return log is not None and hmac.compare_digest(log.owner, owner)

    async def answer(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> None:
        """See `KeptStreams`."""
        scope = {"type": "http"}
        if not self.has(stream_id, owner):
            await _unknown()(scope, receive, send)
            return
        run = self._runs[stream_id]
        if run.record is not None:
            self._go_on(run, run.record)
        # Who waits until it is known whether the stream is its own follows it already.
        async with self._following(run, receive) as gone:
            knowledge: Knowledge | None = Knowledge.NONE
            if _EVENT_NUMBER.fullmatch(last) is not None:
                knowledge = await _unless_gone(gone, run.knowledge(int(last)))
            if knowledge is Knowledge.ITS:
                await run.follow(int(last), gone, send)
        if knowledge is Knowledge.ITS or knowledge is None:
            return
        if knowledge is Knowledge.LOST:
            text = (
                f"the front end of this stream died, and what it had said behind event "
                f"{run.horizon.num_sure} is lost; send the request anew"
            )
            await error_response(HTTPStatus.NOT_FOUND, text)(scope, receive, send)
            return
        text = f"{LAST_EVENT_ID} must be a number up to {len(run.log.events)}, not {last[:50]!r}"
        await error_response(HTTPStatus.BAD_REQUEST, text)(scope, receive, send)

    @asynccontextmanager
    async def _following(
        self, run: Answer, receive: Receive
    ) -> AsyncIterator["asyncio.Task[None]"]:
        """Have the client count among those that follow the stream; the task is done when it has
        gone."""
        self._logs.on_follower(run.log)
        gone = asyncio.create_task(until_gone(receive))
        try:
            yield gone
        finally:
            gone.cancel()
            self._logs.on_left(run.log, _now_s())
            self._schedule()

    # --------------------------------------------------------------- streams of the dead

    def take_over(self, record: Record) -> bool:
        """See `KeptStreams`."""
        assert self._exchange is not None
        head = record.head
        log = self._logs.open(head.stream_id, head.owner)
        if log is None:
            return False
        run = self._runs[head.stream_id] = Answer(head.stream_id, log, head.created_s, record)
        run.has_replica = True
        self._logs.on_unread(log, _now_s())
        self._exchange.go_on(record)
        if not record.is_over:
            self._go_on(run, record)
        self._schedule()
        return True

    def on_run_again(self, stream_id: str) -> None:
        """See `KeptStreams`."""
        run = self._runs.get(stream_id)
        if run is not None:
            self._end_turn(run)

    def on_caught_up(self, stream_id: str) -> None:
        """See `KeptStreams`."""
        run = self._runs.get(stream_id)
        if run is not None:
            run.horizon.on_caught_up(len(run.log.events))
            run.tell()

    def _go_on(self, run: Answer, record: Record) -> None:
        run.record = None
        run.task = asyncio.create_task(self._run_again(run, record))

    async def _run_again(self, run: Answer, record: Record) -> None:
        if record.groups:
            await self._turns.acquire()
            self._has_turn.add(run)
        if run.given_up.is_set():
            self._end_turn(run)
            return
        # It was let in before, and has its replica.
        context = RequestContext(stream=AnsweredStream(run.request_id, True, _nothing))
        await self._generate(run, scope_of(record.head), record.body, context)

    def _end_turn(self, run: Answer) -> None:
        if run in self._has_turn:
            self._has_turn.discard(run)
            self._turns.release()

    # ----------------------------------------------------------------------------- given up

    def _give_up(self, request_id: str) -> None:
        """The stream is not kept any more; if it is still generated, for nobody, it ends."""
        run = self._runs.pop(request_id, None)
        if run is None:
            return
        if self._exchange is not None and run.has_replica:
            self._exchange.drop(request_id)
        if not run.is_over:
            logger.info("stream given up, nobody came back request=%s", request_id)
            run.given_up.set()

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


async def _unless_gone(
    gone: "asyncio.Task[None]", known: Coroutine[Any, Any, Knowledge]
) -> Knowledge | None:
    """Return what becomes known; None when the client goes before."""
    knowing = asyncio.create_task(known)
    await asyncio.wait({knowing, gone}, return_when=asyncio.FIRST_COMPLETED)
    if knowing.done():
        return knowing.result()
    knowing.cancel()
    return None


def _nothing() -> None:
    pass


def _is_streamed(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Body).stream)
    except UNREADABLE:
        # vLLM's server says what is wrong with it.
        return False


def _owner(headers: Headers) -> bytes:
    return hashlib.sha256(headers.get("Authorization", "").encode()).digest()


def _taken() -> JSONResponse:
    text = (
        f"a stream of this {REQUEST_ID} is kept already, or another request of it is under way: "
        f"send {LAST_EVENT_ID} to read the stream on (0 from its beginning), or take another id"
    )
    return error_response(HTTPStatus.CONFLICT, text)


def _unknown() -> JSONResponse:
    text = (
        f"no stream of this {REQUEST_ID} is kept: it has ended too long ago, or never was, or was "
        "lost; send the request anew"
    )
    return error_response(HTTPStatus.NOT_FOUND, text)


def _undecided() -> JSONResponse:
    text = "a front end that may have the stream does not answer; try again"
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, text, headers={"Retry-After": "1"})


def _wall_s() -> float:
    return time.time()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
