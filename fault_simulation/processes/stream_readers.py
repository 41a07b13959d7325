"""Readers of streams at a front end: its own clients, and other front ends for theirs.

The interpreter of `Searches`, as `frontend.resumable.relays` is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fault_simulation.virtual.settings import FIND_S, INTRODUCTION_S
from sterna.frontend.resumable.event_log import EventId, event_id_of
from sterna.frontend.resumable.search import INTRODUCTION, NotFound, Searches, ToFrontend
from sterna.messages.streams import (
    AnswerPart,
    AnswerStart,
    FindStream,
    ReadStream,
    StopReading,
    StreamFound,
    StreamMessage,
)
from sterna.types import FrontendId

OWNER = b"owner"
OK, NOT_FOUND, UNAVAILABLE = 200, 404, 503


SendTo = Callable[[FrontendId, StreamMessage, Sequence[bytes]], None]


class Client(Protocol):
    """A client that wants a stream."""

    def on_start(self, connection: "Connection", status: int) -> None:
        """The answer begins; with another status than OK it is complete."""

    def on_events(self, connection: "Connection", content: bytes) -> None:
        """These events come."""

    def on_end(self, connection: "Connection") -> None:
        """The answer is over."""

    def on_broken(self, connection: "Connection") -> None:
        """The connection is broken."""


class Reader(Protocol):
    """The receiver of an answer of a front end that has the stream."""

    def start(self, status: int) -> None:
        """The head of the answer; with another status than OK it is complete."""

    def send(self, content: bytes, *, is_last: bool) -> None:
        """More of the answer."""


class Connection:
    """The connection of a client to a front end.

    Attributes:
        last: the last event that the client has.
        is_new: whether the stream begins with it.
    """

    def __init__(self, client: Client, stream_id: str, last: EventId, *, is_new: bool) -> None:
        self.client = client
        self.stream_id = stream_id
        self.last = last
        self.is_new = is_new
        self.is_closed = False
        self.has_started = False

    def start(self, status: int) -> None:
        """See `Reader`; the second head is that of a successor."""
        if self.is_closed:
            return
        if not self.has_started:
            self.has_started = True
            self.is_closed = status != OK
            self.client.on_start(self, status)
        elif status != OK:
            self.break_off()

    def send(self, content: bytes, *, is_last: bool) -> None:
        """See `Reader`."""
        if self.is_closed:
            return
        if content:
            self.client.on_events(self, content)
        if is_last and not self.is_closed:
            self.is_closed = True
            self.client.on_end(self)

    def break_off(self) -> None:
        """The client loses the connection."""
        if not self.is_closed:
            self.is_closed = True
            self.client.on_broken(self)


class _Remote:
    """Reads for another front end."""

    def __init__(self, own_id: FrontendId, query: ReadStream, send_to: SendTo) -> None:
        self._own_id = own_id
        self._query = query
        self._send_to = send_to

    def start(self, status: int) -> None:
        start = AnswerStart(self._own_id, self._query.query_id, status, ())
        self._send_to(self._query.sender, start, ())

    def send(self, content: bytes, *, is_last: bool) -> None:
        part = AnswerPart(self._own_id, self._query.query_id, is_last)
        self._send_to(self._query.sender, part, (content,))


@dataclass(eq=False, slots=True)
class _Looking:
    """A client whose stream is searched, by one search after the other."""

    connection: Connection


class Streams(Protocol):
    """The streams that a front end has."""

    def has(self, stream_id: str) -> bool:
        """Whether it can be read here."""

    def has_replica(self, stream_id: str) -> bool:
        """Whether it can be read here once its front end has died."""

    def answer(self, stream_id: str, last: EventId, reader: Reader) -> None:
        """Answer a reader that has all events up to this one."""

    def leave(self, reader: Reader) -> None:
        """The reader no longer reads, of any stream."""


class Reading:
    """All reading at, or through, one front end."""

    def __init__(
        self,
        own_id: FrontendId,
        streams: Streams,
        send_to: SendTo,
        later: Callable[[float, str, Callable[[], None]], None],
    ) -> None:
        self._own_id = own_id
        self._streams = streams
        self._send_to = send_to
        self._later = later
        self._searches = Searches(own_id)
        # The search that introduces this front end to the others; None before and afterwards.
        self._introduction: int | None = None
        self._is_introduced = False
        self._looking: dict[int, _Looking] = {}
        self._passing: dict[int, tuple[FrontendId, Connection]] = {}
        self._remotes: dict[tuple[FrontendId, int], _Remote] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no client reads or searches through this front end, and no other does here."""
        return not self._looking and not self._passing and self._searches.is_idle

    @property
    def is_introduced(self) -> bool:
        """Whether all others know this front end: it lets no client in before."""
        return self._is_introduced

    # --------------------------------------------------------------------- its own clients

    def read(self, connection: Connection) -> None:
        """Answer a client from the front end that has its stream."""
        if connection.is_closed:
            return
        stream_id = connection.stream_id
        if self._streams.has(stream_id):
            self._streams.answer(stream_id, connection.last, connection)
            return
        looking = _Looking(connection)
        self._later(FIND_S, "", lambda: self._give_up(looking))
        self._begin(looking)

    def leave(self, connection: Connection) -> None:
        """The client has gone."""
        for query_id in [q for q, each in self._looking.items() if each.connection is connection]:
            self._end(query_id)
        for query_id, (holder, each) in list(self._passing.items()):
            if each is connection:
                del self._passing[query_id]
                self._send_to(holder, StopReading(self._own_id, query_id), ())
        self._streams.leave(connection)

    def _begin(self, looking: "_Looking") -> None:
        stream_id = looking.connection.stream_id
        has_replica = self._streams.has_replica(stream_id)
        query_id, messages = self._searches.begin(stream_id, OWNER, has_replica=has_replica)
        self._looking[query_id] = looking
        self._send_all(messages)
        self._look(query_id)

    def _look(self, query_id: int) -> None:
        """Act on the state of the search."""
        connection = self._looking[query_id].connection
        if self._streams.has(connection.stream_id):
            self._end(query_id)
            self._streams.answer(connection.stream_id, connection.last, connection)
            return
        outcome = self._searches.outcome(query_id)
        if outcome is NotFound.NOWHERE:
            self._end(query_id)
            connection.start(NOT_FOUND)
        elif outcome is NotFound.ASK_AGAIN:
            self._begin(self._end(query_id))
        elif outcome is not None:
            self._end(query_id)
            self._pass_on(outcome, connection)

    def _give_up(self, looking: "_Looking") -> None:
        for query_id in [q for q, each in self._looking.items() if each is looking]:
            self._end(query_id).connection.start(UNAVAILABLE)

    def _end(self, query_id: int) -> "_Looking":
        self._send_all(self._searches.end(query_id))
        return self._looking.pop(query_id)

    def _pass_on(self, holder: FrontendId, connection: Connection) -> None:
        query_id = self._searches.next_id()
        self._passing[query_id] = holder, connection
        last = str(connection.last)
        query = ReadStream(self._own_id, query_id, connection.stream_id, OWNER, last)
        self._send_to(holder, query, ())

    # ---------------------------------------------------------------------- other front ends

    def on_frontends(self, live: Sequence[FrontendId]) -> None:
        """These front ends live; others are dead for good."""
        self._searches.on_frontends(live)
        if not self._is_introduced and self._introduction is None:
            self._introduce()
            self._later(FIND_S, "", self._open)
        for query_id in list(self._looking):
            self._look(query_id)
        for query_id, (holder, connection) in list(self._passing.items()):
            if holder not in live:
                del self._passing[query_id]
                self.read(connection)
        for key in [key for key in self._remotes if key[0] not in live]:
            self._streams.leave(self._remotes.pop(key))

    def _introduce(self) -> None:
        """Search for no stream, again and again, until all others have answered."""
        if self._introduction is not None:
            self._send_all(self._searches.end(self._introduction))
            self._introduction = None
        if self._is_introduced:
            return
        query_id, messages = self._searches.begin(INTRODUCTION, OWNER, has_replica=False)
        self._introduction = query_id
        self._send_all(messages)
        self._see_whether_introduced()
        self._later(INTRODUCTION_S, "", self._introduce)

    def _open(self) -> None:
        """One that has not answered yet is not waited for."""
        self._is_introduced = True

    def _see_whether_introduced(self) -> None:
        assert self._introduction is not None
        self._is_introduced = self._searches.outcome(self._introduction) is NotFound.NOWHERE

    def on_taken_over(self) -> None:
        """Streams of a dead front end can be read here."""
        for query_id in list(self._looking):
            self._look(query_id)
        self._send_all(self._searches.on_taken_over(lambda each, _: self._streams.has(each)))

    def on_message(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """A living front end has sent this."""
        match message:
            case FindStream():
                has_stream = self._streams.has(message.stream_id)
                has_replica = self._streams.has_replica(message.stream_id)
                answer = self._searches.on_find(
                    message, has_stream=has_stream, has_replica=has_replica
                )
                self._send_all([answer])
            case StreamFound(_, query_id, _):
                if not self._searches.on_found(message):
                    return
                if query_id == self._introduction:
                    self._see_whether_introduced()
                else:
                    self._look(query_id)
            case ReadStream(sender, query_id, stream_id, _, last):
                remote = _Remote(self._own_id, message, self._send_to)
                self._remotes[sender, query_id] = remote
                known = event_id_of(last)
                assert known is not None
                self._streams.answer(stream_id, known, remote)
            case AnswerStart(_, query_id, status, _):
                self._on_start(query_id, status)
            case AnswerPart(_, query_id, is_last):
                self._on_part(query_id, frames[0], is_last)
            case StopReading(sender, query_id):
                self._searches.on_stop(sender, query_id)
                if (sender, query_id) in self._remotes:
                    self._streams.leave(self._remotes.pop((sender, query_id)))

    def _on_start(self, query_id: int, status: int) -> None:
        if query_id in self._passing:
            _, connection = self._passing[query_id]
            if status != OK:
                del self._passing[query_id]
            connection.start(status)

    def _on_part(self, query_id: int, content: bytes, is_last: bool) -> None:
        if query_id in self._passing:
            _, connection = self._passing[query_id]
            if is_last:
                del self._passing[query_id]
            connection.send(content, is_last=is_last)

    def _send_all(self, messages: Sequence[ToFrontend]) -> None:
        for each in messages:
            self._send_to(each.frontend_id, each.message, ())
