"""Event logs: the events of streams, kept for clients that come back. Pure.

A stream's events are numbered from 1, and each contains its id (`id:`, server-sent events): its
number, and the front end that sent it, if that had taken the stream over. A log is kept while it
grows and for a window afterwards. A log whose clients are all gone grows for the window, and is
given up then. If all logs together take too much memory, those without followers are given up
first.
"""

import re
from dataclasses import dataclass, field

from sterna.types import FrontendId

SEPARATOR = b"\n\n"
"""Between two events."""

COMMENT = b": keep-alive" + SEPARATOR
"""A comment, which clients ignore."""

MARK = b": replayed "
"""Begins a comment that no client gets: behind it follows a number of groups (`mark_of`)."""

_ID = re.compile(rb"id: (\S+)\n")
_PARTS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of an event: as text `13`, or `13-4` if front end 4 had taken the stream over.

    Attributes:
        number: from 1 on; 0 of a client that has no event.
        sender: the front end that sent the event; None: the one where the stream began.
    """

    number: int
    sender: FrontendId | None = None

    def __str__(self) -> str:
        return str(self.number) if self.sender is None else f"{self.number}-{self.sender}"


def event_id_of(text: str) -> EventId | None:
    """Return the id that a client gives; None if it is none."""
    parts = _PARTS.fullmatch(text)
    if parts is None:
        return None
    return EventId(int(parts[1]), None if parts[2] is None else FrontendId(int(parts[2])))


def mark_of(num_groups: int) -> bytes:
    """Return the comment that stands in a stream behind the events of this many groups."""
    return MARK + str(num_groups).encode() + SEPARATOR


def last_id(events: bytes) -> str | None:
    """Return the id of the last of these events of a log; None without one."""
    for event in reversed(events.split(SEPARATOR)):
        if (found := _ID.match(event)) is not None:
            return found[1].decode()
    return None


@dataclass(slots=True, eq=False)
class EventLog:
    """One stream.

    Attributes:
        owner: the credentials of the client that began it; no other client may resume it.
        sender: see `EventId`.
        events: complete, with their ids; the first one is number 1.
        num_bytes: size of the events.
        num_comments: number of comments among the events. They show only that the server lives, and
            are not kept.
        marks: number of groups and number of events of each mark so far (`mark_of`).
        num_followers: number of clients that read it.
        is_finished: no event will follow.
        left_s: time when the last follower left, or when the stream was finished, whichever was
            later; None while it has followers.
    """

    owner: bytes
    sender: FrontendId | None = None
    events: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    num_comments: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)
    num_followers: int = 0
    is_finished: bool = False
    left_s: float | None = None
    _rest: bytes = b""

    def feed(self, content: bytes) -> int:
        """Add the next output of the server; returns by how many bytes the log has grown."""
        before = self.num_bytes
        *complete, self._rest = (self._rest + content).split(SEPARATOR)
        for event in complete:
            if event.startswith(MARK):
                self.marks.append((int(event.removeprefix(MARK)), len(self.events)))
            elif event.startswith(b":"):
                self.num_comments += 1
            elif event.strip():
                own_id = EventId(len(self.events) + 1, self.sender)
                numbered = b"id: %s\n%s%s" % (str(own_id).encode(), event, SEPARATOR)
                self.events.append(numbered)
                self.num_bytes += len(numbered)
        return self.num_bytes - before


class EventLogs:
    """All streams of a front end that can be resumed.

    Args:
        window_s: a log is kept for this time for clients to come back.
        max_bytes: limit for all events together.
    """

    def __init__(self, window_s: float, max_bytes: int) -> None:
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._logs: dict[str, EventLog] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of all events that are kept."""
        return self._num_bytes

    def open(
        self, request_id: str, owner: bytes, sender: FrontendId | None = None
    ) -> EventLog | None:
        """Begin the log of a stream; None if one of that id is kept already.

        Args:
            sender: see `EventId`.
        """
        if request_id in self._logs:
            return None
        log = self._logs[request_id] = EventLog(owner, sender)
        return log

    def find(self, request_id: str) -> EventLog | None:
        """Return the stream, if it is kept. The caller must check its owner."""
        return self._logs.get(request_id)

    def feed(self, request_id: str, content: bytes) -> list[str]:
        """Add output to a stream; returns the streams that were given up to make room."""
        log = self._logs.get(request_id)
        if log is None:
            return []
        self._num_bytes += log.feed(content)
        given_up = []
        while self._num_bytes > self._max_bytes:
            unwanted = [
                (not each.is_finished, each.left_s, name)
                for name, each in self._logs.items()
                if each.left_s is not None and name != request_id
            ]
            if not unwanted:
                break
            *_, name = min(unwanted)
            self._forget(name)
            given_up.append(name)
        return given_up

    def on_finished(self, request_id: str, now_s: float) -> None:
        """No event of this stream will follow."""
        log = self._logs.get(request_id)
        if log is not None:
            log.is_finished = True
            if log.num_followers == 0:
                log.left_s = now_s

    def on_unread(self, log: EventLog, now_s: float) -> None:
        """The stream has no follower yet; its window begins."""
        if log.num_followers == 0:
            log.left_s = now_s

    def on_follower(self, log: EventLog) -> None:
        """A client reads the stream."""
        log.num_followers += 1
        log.left_s = None

    def on_left(self, log: EventLog, now_s: float) -> None:
        """A client has stopped reading the stream."""
        log.num_followers -= 1
        if log.num_followers == 0:
            log.left_s = now_s

    def forget(self, request_id: str) -> None:
        """Forget a stream that cannot be resumed."""
        if request_id in self._logs:
            self._forget(request_id)

    def expired(self, now_s: float) -> list[str]:
        """Forget the streams to which no client has come back in time; returns them."""
        names = [
            name
            for name, each in self._logs.items()
            if each.left_s is not None and each.left_s + self._window_s <= now_s
        ]
        for name in names:
            self._forget(name)
        return names

    def next_deadline_s(self) -> float | None:
        """When `expired` may next return something, or None if all streams have followers."""
        lefts_s = [each.left_s for each in self._logs.values() if each.left_s is not None]
        return min(lefts_s) + self._window_s if lefts_s else None

    def _forget(self, request_id: str) -> None:
        self._num_bytes -= self._logs.pop(request_id).num_bytes
