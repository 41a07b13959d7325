"""Answer: one response to a client, generated once and read by any number of connections."""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from sterna.frontend.resumable.event_log import COMMENT, EventId, EventLog, mark_of
from sterna.frontend.resumable.replicas import Record
from sterna.frontend.resumable.resume_validity import ResumeValidity, Validity
from sterna.messages.streams import StreamHead

REQUEST_ID = "X-Request-Id"

EVENTS_AT_ONCE = 1024
"""Limit for events sent at once, so that they fit in a message to another front end."""


class StreamBrokenError(Exception):
    """A stream ended in the middle: it broke off, or no front end has it any longer."""


class Answer:
    """An answer, complete or still being generated.

    Attributes:
        created_s: see `StreamHead`.
        record: that of a stream that was taken over, until the stream goes on.
        has_replica: whether another front end gets its record, once the request is let in.
        task: generates the answer.
        on_begun: called when the answer begins, or when it is clear that it never will.
        start: the head of the answer, when it has arrived.
        is_stream: whether the answer is one of events; an error is not.
        plain: the messages after the head, if the answer is no stream.
        marks: those that stand in front of the next part of its body; None where events reach the
            log before vLLM's code goes on.
        is_over: no further message will come.
        has_broken_off: by an error of the server; what there is of it is not all.
        given_up: no client will read it.
        news: set, and replaced, whenever the answer has changed.
        resume_validity: decides which clients may resume it.
    """

    def __init__(
        self, request_id: str, log: EventLog, created_s: int, record: Record | None = None
    ) -> None:
        self.request_id = request_id
        self.log = log
        self.created_s = created_s
        self.record = record
        self.resume_validity = ResumeValidity(() if record is None else record.takeovers)
        self.has_replica = False
        self.task: asyncio.Task[None] | None = None
        self.on_begun: Callable[[], None] = lambda: None
        self.start: Message | None = None
        self.plain: list[Message] = []
        self.is_stream = False
        self.marks: list[bytes] | None = None
        self.is_body_read = False
        self.is_over = self.has_broken_off = False
        self.given_up = asyncio.Event()
        self.news = asyncio.Event()

    def notify(self) -> None:
        """Wake all followers."""
        self.news.set()
        self.news = asyncio.Event()

    def carry_marks(self) -> Callable[[], bytes]:
        """See `AnsweredStream`."""
        marks = self.marks = []

        def taken() -> bytes:
            found = b"".join(marks)
            marks.clear()
            return found

        return taken

    def on_caught_up(self, num_groups: int) -> None:
        """The events of the first `num_groups` of its record have been said."""
        if self.marks is None:
            self.resume_validity.on_replayed(num_groups, len(self.log.events))
            self.notify()
        else:
            self.marks.append(mark_of(num_groups))

    def on_content(self) -> None:
        """The log has grown."""
        for num_groups, num_events in self.log.marks:
            self.resume_validity.on_replayed(num_groups, num_events)
        self.log.marks.clear()

    async def validity(self, last: EventId) -> Validity:
        """Return whether a client with the events up to this one may resume the stream; waits until
        that is known."""
        while (found := self.resume_validity.of(last, len(self.log.events))) is None:
            await self.news.wait()
        return found

    async def follow(self, num_known: int, gone: "asyncio.Task[None]", send: Send) -> None:
        """Send the events after those that the client has, until the stream ends or the client
        goes.

        Raises:
            StreamBrokenError: the stream broke off; its connection must not end as a whole one.
        """
        has_started, num_plain, num_comments = False, 0, self.log.num_comments
        while not gone.done():
            news = self.news
            if self.start is not None and not has_started:
                has_started = True
                await send(_with_id(self.start, self.request_id))
            if self.is_stream:
                while num_known < len(self.log.events) and not gone.done():
                    events = self.log.events[num_known : num_known + EVENTS_AT_ONCE]
                    num_known += len(events)
                    await send(_content(b"".join(events)))
                if num_comments < self.log.num_comments:
                    num_comments = self.log.num_comments
                    await send(_content(COMMENT))
            else:
                for message in self.plain[num_plain:]:
                    num_plain += 1
                    await send(message)
            if self.is_over and num_known >= len(self.log.events):
                await self._end(has_started, send)
                return
            if news is self.news:
                waiting = asyncio.create_task(news.wait())
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()

    async def _end(self, has_started: bool, send: Send) -> None:
        if self.is_stream and self.has_broken_off:
            raise StreamBrokenError(self.request_id)
        if self.is_stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif not has_started:
            raise RuntimeError("the application ended without an answer")

    def receive(self, body: bytes) -> Receive:
        """Return a `receive` for the application: the body, and a disconnect when the answer is
        given up."""

        async def receive() -> Message:
            if not self.is_body_read:
                self.is_body_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self.given_up.wait()
            return {"type": "http.disconnect"}

        return receive


def head_of(answer: Answer, scope: Scope) -> StreamHead:
    """Return the facts that another front end needs, beside the body, to run the request again."""
    headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
    return StreamHead(
        stream_id=answer.request_id,
        owner=answer.log.owner,
        path=scope["path"],
        query=scope.get("query_string", b""),
        headers=headers,
        created_s=answer.created_s,
    )


def scope_of(head: StreamHead) -> Scope:
    """Return the scope of the request, without its connection, which was another front end's."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": head.path,
        "raw_path": head.path.encode(),
        "root_path": "",
        "query_string": head.query,
        "headers": [*head.headers],
        "client": None,
        "server": None,
        "state": {},
    }


async def until_gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def is_event_stream(start: Message) -> bool:
    """Whether this is the head of an answer of events."""
    kind = Headers(raw=start.get("headers", [])).get("content-type", "")
    return kind.startswith("text/event-stream")


def _with_id(start: Message, request_id: str) -> Message:
    answer = {**start, "headers": [*start.get("headers", [])]}
    MutableHeaders(raw=answer["headers"])[REQUEST_ID] = request_id
    return answer


def _content(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
