"""Resume validity: whether a client's Last-Event-ID belongs to this stream. Pure.

A stream that was taken over first repeats the events that its former front end had recorded. After
these it goes on in its own way. The former front end may have sent other events beyond its record:
a client that has such events must not resume. The ids of events say how often the stream had been
taken over when they were sent (`EventId`), and so which records they must be in.
"""

from dataclasses import dataclass, field
from enum import Enum

from sterna.frontend.resumable.event_log import EventId


class Validity(Enum):
    """The relation of a client's last event to a stream."""

    VALID = "the client has a beginning of this very stream"
    LOST = "the client has events that only a dead front end knew"
    IMPOSSIBLE = "no client can have this event"


@dataclass(slots=True)
class ResumeValidity:
    """The ids that are valid for one stream at one front end.

    Attributes:
        ends: see `Record`.
    """

    ends: tuple[int, ...]
    # For each end that has been replayed, the number of its events.
    _num_events: dict[int, int] = field(default_factory=dict)

    def on_replayed(self, num_groups: int, num_events: int) -> None:
        """The first `num_groups` of the record, up to one of its ends, have become events."""
        self._num_events[num_groups] = num_events

    def on_over(self, num_events: int) -> None:
        """The stream has ended with this number of events."""
        for end in self.ends:
            self._num_events.setdefault(end, num_events)

    def num_sure(self, last: EventId) -> int | None:
        """Return how many of the events up to this one are in the records of all takeovers since it
        was sent; None until these have become events here again."""
        return self._num_events.get(min(self.ends[last.num_takeovers :]))

    def of(self, last: EventId, num_events: int) -> Validity | None:
        """Return whether a client with the events up to this one may resume the stream.

        The stream has `num_events` so far. None: more events must decide that.
        """
        if last.num_takeovers > len(self.ends):
            return Validity.IMPOSSIBLE
        if last.num_takeovers == len(self.ends):
            return Validity.VALID if last.number <= num_events else Validity.IMPOSSIBLE
        num_sure = self.num_sure(last)
        if num_sure is None:
            return Validity.VALID if last.number <= num_events else None
        return Validity.VALID if last.number <= num_sure else Validity.LOST
