"""Relays: streams that are read through another front end than the one that has them.

A front end that is asked for a stream of another one looks for its holder (`search`), lets it
answer, and passes the answer on. If the holder dies meanwhile, the front end looks again, for the
rest after the events that its client has got.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol

from starlette.types import Message, Receive, Send

from sterna.frontend.resumable.answers import StreamBrokenError, until_gone
from sterna.frontend.resumable.event_log import last_id
from sterna.frontend.resumable.search import INTRODUCTION, NotFound, Searches, ToFrontend
from sterna.messages.streams import (
    AnswerPart,
    AnswerStart,
    FindStream,
    PartsTaken,
    ReadStream,
    StopReading,
    StreamFound,
    StreamMessage,
)
from sterna.types import FrontendId

_BROKEN = "sterna.broken"
"""The type of what stands in place of the rest of an answer that broke off."""

RETRY_S = 1.0
"""Time after which a message that the mailbox refused is sent again."""

FIND_TIMEOUT_S = 10.0
"""Time-out of a search; a death is known earlier, unless a front end hangs."""

INTRODUCTION_S = 0.1
"""A new front end introduces itself again after this time to those that have not answered."""

WINDOW_BYTES = 1 << 20
"""Limit for the bytes of an answer that are under way between two front ends."""

RelayMessage = (
    FindStream | StreamFound | ReadStream | AnswerStart | AnswerPart | PartsTaken | StopReading
)

SendTo = Callable[[FrontendId, StreamMessage, Sequence[bytes]], bool]
"""Sends to another front end; False if that one lives, but the mailbox refuses the message."""

logger = logging.getLogger(__name__)


class RetryingSender:
    """Sends to other front ends, to each in order, and retries what the mailbox refuses.

    The number of waiting messages has no limit here; callers must limit it.
    """

    def __init__(self, send_to: SendTo) -> None:
        self._send_to = send_to
        self._refused: dict[FrontendId, deque[tuple[StreamMessage, Sequence[bytes]]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def send(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes] = ()
    ) -> None:
        """Send now, or as soon as the mailbox takes it; nothing is sent to a dead front end."""
        if frontend_id in self._refused or not self._send_to(frontend_id, message, frames):
            self._refused.setdefault(frontend_id, deque()).append((message, frames))
            self._schedule()

    def close(self) -> None:
        """Retry no further."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._send_again)

    def _send_again(self) -> None:
        self._timer = None
        for frontend_id, refused in list(self._refused.items()):
            while refused and self._send_to(frontend_id, *refused[0]):
                refused.popleft()
            if not refused:
                del self._refused[frontend_id]
        if self._refused:
            self._schedule()


class RelayedStreams(Protocol):
    """The streams that a front end has itself."""

    def has(self, stream_id: str, owner: bytes) -> bool:
        """Whether the stream can be read here, by that owner."""

    def has_replica(self, stream_id: str, owner: bytes) -> bool:
        """Whether the stream can be read here when its front end has died."""

    async def answer(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> None:
        """Answer a client that has all events up to this one."""


class Reading(Enum):
    """The result for a client that wanted to read a stream."""

    ANSWERED = "the client was answered"
    NOWHERE = "no front end has the stream; nothing was sent to the client"
    UNDECIDED = "some front end may have it; nothing was sent to the client"


class _Reader:
    """A client of another front end, which reads here."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.num_sent = self.num_taken = 0
        self.room = asyncio.Event()


class Relays:
    """Reads at other front ends, and lets them read here."""

    def __init__(self, frontend_id: FrontendId, streams: RelayedStreams, send_to: SendTo) -> None:
        self._frontend_id = frontend_id
        self._streams = streams
        # WINDOW_BYTES limits the answers that wait in it, and the other messages are small.
        self._sender = RetryingSender(send_to)
        self._live: tuple[FrontendId, ...] = ()
        self._searches = Searches(frontend_id)
        # One event for each search under way, set when something has changed.
        self._news: dict[int, asyncio.Event] = {}
        # The answers that arrive from other front ends; None in a queue: the holder has died.
        self._answers: dict[int, tuple[FrontendId, asyncio.Queue[Message | None]]] = {}
        self._readers: dict[tuple[FrontendId, int], _Reader] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_frontends(self, live: Sequence[FrontendId]) -> None:
        """These front ends live, this one among them; others are dead for good."""
        self._live = tuple(each for each in live if each != self._frontend_id)
        self._searches.on_frontends(live)
        self._wake_searches()
        for holder, answer in self._answers.values():
            if holder not in self._live:
                answer.put_nowait(None)
        for (frontend_id, _), reader in self._readers.items():
            if frontend_id not in self._live:
                reader.gone.set()
                reader.room.set()

    def on_taken_over(self) -> None:
        """Streams of a dead front end can be read here."""
        self._wake_searches()
        self._say_all(self._searches.on_taken_over(self._streams.has))

    def _wake_searches(self) -> None:
        for news in self._news.values():
            news.set()

    def on_message(self, message: RelayMessage, frames: Sequence[bytes]) -> None:
        """Another live front end has sent this."""
        match message:
            case FindStream():
                self._on_find(message)
            case StreamFound():
                if self._searches.on_found(message):
                    self._news[message.query_id].set()
            case ReadStream():
                self._on_read(message)
            case AnswerStart(_, query_id, status, headers):
                start = {"type": "http.response.start", "status": status, "headers": [*headers]}
                self._on_answer(query_id, start)
            case AnswerPart(_, query_id, _, is_broken=True):
                self._on_answer(query_id, {"type": _BROKEN})
            case AnswerPart(_, query_id, is_last):
                body = {"type": "http.response.body", "body": frames[0], "more_body": not is_last}
                self._on_answer(query_id, body)
            case PartsTaken(sender, query_id, num_bytes):
                if (reader := self._readers.get((sender, query_id))) is not None:
                    reader.num_taken = num_bytes
                    reader.room.set()
            case StopReading(sender, query_id):
                self._searches.on_stop(sender, query_id)
                if (reader := self._readers.get((sender, query_id))) is not None:
                    reader.gone.set()
                    reader.room.set()

    def close(self) -> None:
        """End all answers to other front ends."""
        self._sender.close()
        for task in self._tasks:
            task.cancel()

    def _say_all(self, messages: Iterable[ToFrontend]) -> None:
        for each in messages:
            self._sender.send(each.frontend_id, each.message)

    # -------------------------------------------------------------------- reading elsewhere

    async def read(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> Reading:
        """Answer a client from the front end that has its stream.

        Raises:
            StreamBrokenError: the stream was lost, or broke off, in the middle of the answer.
        """
        gone = asyncio.create_task(until_gone(receive))
        client = _Client(last, send)
        try:
            while not gone.done():
                finding = asyncio.create_task(self._find(stream_id, owner, FIND_TIMEOUT_S))
                await asyncio.wait({finding, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not finding.done():
                    finding.cancel()
                    break
                holder = finding.result()
                if isinstance(holder, Reading):
                    if client.has_started:
                        raise StreamBrokenError(stream_id)
                    return holder
                if holder == self._frontend_id:
                    await self._streams.answer(
                        stream_id, owner, client.last, _when_done(gone), client.send
                    )
                    break
                if await self._pass_on(holder, stream_id, owner, client, gone):
                    break
            return Reading.ANSWERED
        finally:
            gone.cancel()

    async def introduce(self) -> None:
        """Return when all other front ends know this one, and ask it too for streams.

        One that has not answered in the time of a search is not waited for: it cannot be reached.
        By then it is dead to the supervisor, or has heard from it who lives.
        """
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                while await self._find(INTRODUCTION, b"", INTRODUCTION_S) is Reading.UNDECIDED:
                    pass
        except TimeoutError:
            logger.warning("not all other front ends can be reached")

    async def _find(self, stream_id: str, owner: bytes, timeout_s: float) -> FrontendId | Reading:
        """Return the front end that has the stream, maybe this one, or why none was found."""
        try:
            async with asyncio.timeout(timeout_s):
                while (found := await self._search(stream_id, owner)) is NotFound.ASK_AGAIN:
                    pass
        except TimeoutError:
            return Reading.UNDECIDED
        return Reading.NOWHERE if found is NotFound.NOWHERE else found

    async def _search(self, stream_id: str, owner: bytes) -> FrontendId | NotFound:
        """Ask all other front ends once."""
        has_replica = self._streams.has_replica(stream_id, owner)
        query_id, messages = self._searches.begin(stream_id, owner, has_replica=has_replica)
        news = self._news[query_id] = asyncio.Event()
        self._say_all(messages)
        try:
            while True:
                if self._streams.has(stream_id, owner):
                    return self._frontend_id
                outcome = self._searches.outcome(query_id)
                if outcome is not None:
                    return outcome
                news.clear()
                await news.wait()
        finally:
            del self._news[query_id]
            self._say_all(self._searches.end(query_id))

    async def _pass_on(
        self,
        holder: FrontendId,
        stream_id: str,
        owner: bytes,
        client: "_Client",
        gone: "asyncio.Task[None]",
    ) -> bool:
        """Pass the holder's answer on; returns False if the holder died before the end.

        Raises:
            StreamBrokenError: the stream broke off at the holder.
        """
        if holder not in self._live:
            # Its death became known after the search had ended, and before its answer is awaited.
            return False
        query_id = self._searches.next_id()
        answer: asyncio.Queue[Message | None] = asyncio.Queue()
        self._answers[query_id] = holder, answer
        num_taken = 0
        self._sender.send(
            holder, ReadStream(self._frontend_id, query_id, stream_id, owner, client.last)
        )
        try:
            while True:
                coming = asyncio.create_task(answer.get())
                await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    self._sender.send(holder, StopReading(self._frontend_id, query_id))
                    return True
                message = coming.result()
                if message is None:
                    return False
                if message["type"] == _BROKEN:
                    raise StreamBrokenError(stream_id)
                await client.send(message)
                if message["type"] == "http.response.body":
                    if not message["more_body"]:
                        return True
                    num_taken += len(message["body"])
                    self._sender.send(holder, PartsTaken(self._frontend_id, query_id, num_taken))
        finally:
            del self._answers[query_id]

    def _on_answer(self, query_id: int, message: Message) -> None:
        if query_id in self._answers:
            self._answers[query_id][1].put_nowait(message)

    # ------------------------------------------------------------------------- read by others

    def _on_find(self, query: FindStream) -> None:
        has_stream = self._streams.has(query.stream_id, query.owner)
        has_replica = self._streams.has_replica(query.stream_id, query.owner)
        answer = self._searches.on_find(query, has_stream=has_stream, has_replica=has_replica)
        self._say_all([answer])

    def _on_read(self, query: ReadStream) -> None:
        # Entered before the task has its first turn: the very next message may say that the client
        # has gone, or that its front end has died.
        reader = self._readers[query.sender, query.query_id] = _Reader()
        task = asyncio.create_task(self._let_read(query, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_read(self, query: ReadStream, reader: _Reader) -> None:
        """Answer another front end's client."""
        asker, query_id = query.sender, query.query_id

        async def receive() -> Message:
            await reader.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
                start = AnswerStart(self._frontend_id, query_id, message["status"], headers)
                self._sender.send(asker, start)
                return
            body = bytes(message.get("body", b""))
            is_last = not message.get("more_body", False)
            self._sender.send(asker, AnswerPart(self._frontend_id, query_id, is_last), [body])
            reader.num_sent += len(body)
            while reader.num_sent - reader.num_taken > WINDOW_BYTES and not reader.gone.is_set():
                reader.room.clear()
                await reader.room.wait()

        try:
            await self._streams.answer(query.stream_id, query.owner, query.last, receive, send)
        except Exception as error:
            if not isinstance(error, StreamBrokenError):
                logger.exception("stream broke off stream=%s", query.stream_id)
            self._sender.send(asker, AnswerPart(self._frontend_id, query_id, True, True), [b""])
        finally:
            del self._readers[asker, query_id]


class _Client:
    """A client whose answer may come from several front ends, one after the other.

    Attributes:
        last: the id of the last event that it has.
    """

    def __init__(self, last: str, send: Send) -> None:
        self.last = last
        self.has_started = False
        self._send = send

    async def send(self, message: Message) -> None:
        """Pass a message of an answer on.

        Raises:
            StreamBrokenError: the stream cannot go on.
        """
        if message["type"] == "http.response.start":
            if not self.has_started:
                self.has_started = True
                await self._send(message)
            elif message["status"] != 200:
                raise StreamBrokenError(f"its next holder answers {message['status']}")
            return
        found = last_id(message.get("body", b""))
        if found is not None:
            self.last = found
        await self._send(message)


def _when_done(gone: "asyncio.Task[None]") -> Receive:
    async def receive() -> Message:
        await asyncio.wait({gone})
        return {"type": "http.disconnect"}

    return receive
