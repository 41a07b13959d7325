"""Resumable streams: a client may lose its connection and read the rest (`--resumable-streams`).

An ASGI application around vLLM's. Each event of a streamed answer contains its id. A client
whose connection broke sends its request again, with the `X-Request-Id` of the answer and the
`Last-Event-ID` that it has, and gets the rest, as far as it exists and as it is generated. The
answer is generated as if the client had never gone; after `window_s` without a client it is given
up.

With several front ends, a stream can be resumed at any of them (`relays`). If its front end dies,
it goes on at another one, which runs the request again from its record (`pacing`). A stream that
had ended waits there until a client asks for it.
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
from pydantic import TypeAdapter, ValidationError
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
from sterna.frontend.http.service_tier import read_leniently
from sterna.frontend.resumable.answers import (
    REQUEST_ID,
    Answer,
    head_of,
    is_event_stream,
    scope_of,
    until_gone,
)
from sterna.frontend.resumable.event_log import EventId, EventLogs, event_id_of
from sterna.frontend.resumable.exchange import StreamExchange
from sterna.frontend.resumable.relays import Reading
from sterna.frontend.resumable.replicas import MAX_DEATHS, Record, dated
from sterna.frontend.resumable.resume_validity import Validity

logger = logging.getLogger(__name__)

MAX_FOLLOWERS = 16
"""Clients that read one stream at a time: each token wakes all of them."""

MAX_REPLAYS = 8
"""Limit for streams of a dead front end whose records are replayed at the same time, so that this
front end's own streams do not wait for hundreds of them."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


class _Body(msgspec.Struct):
    """The fields of a request that matter here."""

    stream: Any = None


_AS_VLLM = TypeAdapter(bool | None)
"""As vLLM's server reads the field: it takes "true" and 1 too."""


class ResumableStreams:
    """Keeps the streams of the application that it wraps.

    Args:
        window_s: see `EventLogs`.
        max_bytes: see `EventLogs`.
        exchange: the exchange with other front ends; None if there are none.
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
        self._answers: dict[str, Answer] = {}
        # Number of answers under way that are no streams, by id.
        self._plain: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._turns = asyncio.Semaphore(MAX_REPLAYS)
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
            # The application refuses it: it is neither kept nor sent to another front end.
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = await whole_body(receive)
        if body is None:
            return
        if LAST_EVENT_ID in headers:
            checking = self._passes_checks(scope, replaying(body, receive), send)
            # It is not kept for as long as the stream is read.
            del body
            if await checking:
                await self._read_on(headers, scope, receive, send)
            return
        if not _is_streamed(body):
            await self._pass(headers.get(REQUEST_ID), scope, replaying(body, receive), send)
            return
        await self._begin(headers, body, scope, receive, send)

    async def _pass(
        self, request_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass on a request whose answer is no stream."""
        if request_id is None:
            await self._app(scope, receive, send)
            return
        answer = self._answers.get(request_id)
        if answer is not None and answer.has_replica and not answer.is_over:
            # The engine requests of both would have the same names.
            await _taken()(scope, receive, send)
            return
        self._plain[request_id] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._plain[request_id] -= 1
            self._plain += Counter()

    async def _passes_checks(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the request passes the checks of the application and its middlewares, those of
        the operator too; if not, their answer is sent."""
        has_passed = False

        def on_checked() -> None:
            nonlocal has_passed
            has_passed = True

        async def send_refusal(message: Message) -> None:
            if not has_passed:
                await send(message)

        with entered(replace(current(), on_checked=on_checked)):
            await self._app(scope, receive, send_refusal)
        return has_passed

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
        answer = self._answers[request_id] = Answer(request_id, log, int(_wall_s()))
        answer.has_replica = self._exchange is not None and caller().route.is_replicated
        answer.on_begun = current().keep_body()
        on_let_in = partial(self._on_let_in, answer, named, body)
        stream = AnsweredStream(request_id, False, on_let_in, answer.carry_marks)
        context = replace(current(), stream=stream)
        answer.task = asyncio.create_task(self._generate(answer, named, body, context))
        async with self._following(answer, receive) as gone:
            await answer.follow(0, gone, send)

    def _on_let_in(self, answer: Answer, scope: Scope, body: bytes) -> None:
        """Send the record to the other front end, which so gets none of a refused request."""
        is_kept = self._answers.get(answer.request_id) is answer
        if self._exchange is not None and answer.has_replica and is_kept:
            self._exchange.begin(head_of(answer, scope), body)

    async def _generate(
        self, answer: Answer, scope: Scope, body: bytes, context: RequestContext
    ) -> None:
        """Have the answer generated to its end, with or without clients."""

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.start, answer.is_stream = message, is_event_stream(message)
                answer.on_begun()
            elif not answer.is_stream:
                answer.plain.append(message)
            elif self._answers.get(answer.request_id) is answer:
                content = dated(message.get("body", b""), answer.created_s)
                for other in self._logs.feed(answer.request_id, content):
                    self._give_up(other)
                answer.on_content()
            answer.notify()

        has_broken_off = False
        try:
            with entered(context):
                await self._app(scope, answer.receive(body), send)
        except Exception:
            has_broken_off = True
            logger.exception("stream broke off request=%s", answer.request_id)
        finally:
            self._on_over(answer, has_broken_off=has_broken_off)

    def _on_over(self, answer: Answer, *, has_broken_off: bool) -> None:
        answer.is_over, answer.has_broken_off = True, has_broken_off
        answer.on_begun()
        answer.resume_validity.on_over(len(answer.log.events), has_broken_off=has_broken_off)
        self._end_turn(answer)
        # Another stream may have its id by now.
        if self._answers.get(answer.request_id) is answer:
            self._logs.on_finished(answer.request_id, _now_s())
            if self._exchange is not None and answer.has_replica:
                self._exchange.over(answer.request_id)
            if not answer.is_stream:
                self._logs.forget(answer.request_id)
                self._give_up(answer.request_id)
            self._schedule()
        answer.notify()

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
        answer = self._answers[stream_id]
        if answer.log.num_followers >= MAX_FOLLOWERS:
            text = f"{MAX_FOLLOWERS} connections read this stream already; close one of them"
            await error_response(HTTPStatus.TOO_MANY_REQUESTS, text)(scope, receive, send)
            return
        if answer.record is not None and answer.record.is_stuck:
            await _stuck()(scope, receive, send)
            return
        if answer.record is not None:
            self._go_on(answer, answer.record)
        # A client counts as a follower while it waits for the decision whether it may resume.
        async with self._following(answer, receive) as gone:
            known = event_id_of(last)
            validity: Validity | None = Validity.IMPOSSIBLE
            if known is not None:
                validity = await _unless_gone(gone, answer.validity(known))
                if validity is Validity.VALID:
                    await answer.follow(known.number, gone, send)
        if validity is Validity.VALID or validity is None:
            return
        if known is not None and validity is Validity.LOST:
            num_sure = answer.resume_validity.num_sure(known)
            which = "its events" if num_sure is None else f"its events after number {num_sure}"
            text = (
                f"the front end of this stream died, and {which} are lost; send the request as a "
                "new one"
            )
            await error_response(HTTPStatus.NOT_FOUND, text)(scope, receive, send)
            return
        newest = EventId(len(answer.log.events), answer.log.sender)
        text = f"{LAST_EVENT_ID} must be 0 or the id of an event, up to {newest}, not {last[:50]!r}"
        await error_response(HTTPStatus.BAD_REQUEST, text)(scope, receive, send)

    @asynccontextmanager
    async def _following(
        self, answer: Answer, receive: Receive
    ) -> AsyncIterator["asyncio.Task[None]"]:
        """Count the client as a follower of the stream; the task is done when it has gone."""
        self._logs.on_follower(answer.log)
        gone = asyncio.create_task(until_gone(receive))
        try:
            yield gone
        finally:
            gone.cancel()
            self._logs.on_left(answer.log, _now_s())
            self._schedule()

    # ------------------------------------------------------------ streams taken over

    def take_over(self, record: Record) -> bool:
        """See `KeptStreams`."""
        assert self._exchange is not None
        head = record.head
        log = self._logs.open(head.stream_id, head.owner, record.takeovers[-1][0])
        if log is None:
            return False
        answer = self._answers[head.stream_id] = Answer(head.stream_id, log, head.created_s, record)
        answer.has_replica = True
        self._logs.on_unread(log, _now_s())
        self._exchange.go_on(record)
        if record.is_stuck:
            logger.error(
                "stream is not tried again, front ends died with it request=%s", head.stream_id
            )
        elif not record.is_over:
            self._go_on(answer, record)
        self._schedule()
        return True

    def on_replayed(self, stream_id: str) -> None:
        """See `KeptStreams`."""
        answer = self._answers.get(stream_id)
        if answer is not None:
            self._end_turn(answer)

    def on_caught_up(self, stream_id: str, num_groups: int) -> None:
        """See `KeptStreams`."""
        answer = self._answers.get(stream_id)
        if answer is not None:
            answer.on_caught_up(num_groups)

    def _go_on(self, answer: Answer, record: Record) -> None:
        answer.record = None
        answer.task = asyncio.create_task(self._replay(answer, record))

    async def _replay(self, answer: Answer, record: Record) -> None:
        if record.groups:
            await self._turns.acquire()
            self._has_turn.add(answer)
        if answer.given_up.is_set():
            self._end_turn(answer)
            return
        # It was let in before, and has a replica.
        stream = AnsweredStream(answer.request_id, True, _nothing, answer.carry_marks)
        context = RequestContext(stream=stream)
        await self._generate(answer, scope_of(record.head), record.body, context)

    def _end_turn(self, answer: Answer) -> None:
        if answer in self._has_turn:
            self._has_turn.discard(answer)
            self._turns.release()

    # ----------------------------------------------------------------------------- given up

    def _give_up(self, request_id: str) -> None:
        """Keep the stream no longer; if it is still being generated, that ends."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return
        if self._exchange is not None and answer.has_replica:
            self._exchange.drop(request_id)
        if not answer.is_over:
            logger.info("stream given up, no client came back request=%s", request_id)
            answer.given_up.set()

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
    gone: "asyncio.Task[None]", known: Coroutine[Any, Any, Validity]
) -> Validity | None:
    """Return the result; None if the client goes before."""
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
        stream = msgspec.json.decode(body, type=_Body).stream
    except UNREADABLE:
        stream = (read_leniently(body) or {}).get("stream")
    try:
        return bool(_AS_VLLM.validate_python(stream))
    except ValidationError:
        # vLLM's server refuses it, with the reason.
        return False


def _owner(headers: Headers) -> bytes:
    return hashlib.sha256(headers.get("Authorization", "").encode()).digest()


def _taken() -> JSONResponse:
    text = (
        f"a stream of this {REQUEST_ID} is kept already, or another request with it is under way: "
        f"send {LAST_EVENT_ID} to resume the stream (0 from its beginning), or use another id"
    )
    return error_response(HTTPStatus.CONFLICT, text)


def _unknown() -> JSONResponse:
    text = (
        f"no stream of this {REQUEST_ID} is kept: it has ended too long ago, or never existed, or "
        "was lost; send the request as a new one"
    )
    return error_response(HTTPStatus.NOT_FOUND, text)


def _stuck() -> JSONResponse:
    text = (
        f"{MAX_DEATHS} front ends have died with this stream, one after the other, and those that "
        "had taken it over brought nothing new of it: it is not tried again; its request, or that "
        "of a stream beside it, may be what ends them"
    )
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, text)


def _undecided() -> JSONResponse:
    text = "a front end that may have the stream does not answer; try again"
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, text, headers={"Retry-After": "1"})


def _wall_s() -> float:
    return time.time()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
