"""Resume validity: whether a client's Last-Event-ID belongs to this stream. Pure.

A stream that was taken over first repeats the events that its former front end had recorded. After
these it goes on in its own way. The former front end may have sent other events beyond its record:
a client that has such events must not resume. The ids of events say which front end sent them
(`EventId`), and so which record they must be in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from sterna.frontend.resumable.event_log import EventId
from sterna.types import FrontendId


class Validity(Enum):
    """The relation of a client's last event to a stream."""

    VALID = "the client has a beginning of this very stream"
    LOST = "the client has events that only a dead front end knew"
    IMPOSSIBLE = "no client can have this event"


@dataclass(slots=True)
class ResumeValidity:
    """The ids that are valid for one stream at one front end.

    Attributes:
        takeovers: see `Record`; the last takeover is that of this front end.
    """

    takeovers: Sequence[tuple[FrontendId, int]]
    # For each number of groups in `takeovers` that has been replayed, the number of its events.
    _num_events: dict[int, int] = field(default_factory=dict)
    _has_broken_off: bool = False

    def on_replayed(self, num_groups: int, num_events: int) -> None:
        """The first `num_groups` of the record, up to one of its takeovers, have become events."""
        self._num_events[num_groups] = num_events

    def on_over(self, num_events: int, *, has_broken_off: bool) -> None:
        """The stream has ended with this number of events.

        Args:
            has_broken_off: by an error of the server, so that they are not all of the record.
        """
        self._has_broken_off = has_broken_off
        if not has_broken_off:
            for _, num_groups in self.takeovers:
                self._num_events.setdefault(num_groups, num_events)

    def num_sure(self, last: EventId) -> int | None:
        """Return how many of the sender's events were in its record when it died. None: they have
        not become events here again, or this stream was never there."""
        place = self._place(last)
        if place is None or place == len(self.takeovers):
            return None
        _, num_groups = self.takeovers[place]
        return self._num_events.get(num_groups)

    def of(self, last: EventId, num_events: int) -> Validity | None:
        """Return whether a client with the events up to this one may resume the stream.

        The stream has `num_events` so far. None: more events must decide that.
        """
        place = self._place(last)
        if place is None:
            # Two front ends can have taken a stream over, if one could not be sent to.
            return Validity.LOST if self.takeovers else Validity.IMPOSSIBLE
        if place == len(self.takeovers):
            return Validity.VALID if last.number <= num_events else Validity.IMPOSSIBLE
        num_sure = self.num_sure(last)
        if num_sure is not None:
            return Validity.VALID if last.number <= num_sure else Validity.LOST
        if self._has_broken_off:
            return Validity.LOST
        return Validity.VALID if last.number <= num_events else None

    def _place(self, last: EventId) -> int | None:
        """The number of takeovers until the sender had the stream; None: it never had it."""
        if last.sender is None:
            return 0
        senders = [sender for sender, _ in self.takeovers]
        return senders.index(last.sender) + 1 if last.sender in senders else None
