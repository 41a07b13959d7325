"""Resume validity: whether a client's Last-Event-ID belongs to this stream. Pure.

A stream that was taken over first repeats the events that its former front end had recorded. After
these it goes on in its own way. The former front end may have sent other events beyond its record:
a client that has such events must not resume.
"""

from dataclasses import dataclass
from enum import Enum


class Validity(Enum):
    """The relation of a client's number to a stream."""

    VALID = "the client has a beginning of this very stream"
    LOST = "the client may have events that only a dead front end knew"
    IMPOSSIBLE = "no client can have this number of events"


@dataclass(slots=True)
class ResumeValidity:
    """The numbers that are valid for one stream at one front end.

    Attributes:
        num_sent: number of events that this front end has sent to any client.
        num_sure: for a stream that was taken over: number of the recorded events, which its former
            front end can have sent; None until all of them are here again.
    """

    is_taken_over: bool
    num_sent: int = 0
    num_sure: int | None = None

    def on_sent(self, number: int) -> None:
        """A client has been sent the events up to this one."""
        self.num_sent = max(self.num_sent, number)

    def on_caught_up(self, num_events: int) -> None:
        """This number of events is all that the former front end had recorded."""
        self.num_sure = num_events

    def on_over(self, num_events: int) -> None:
        """The stream has ended with this number of events."""
        if self.num_sure is None:
            self.num_sure = num_events

    def of(self, number: int, num_events: int) -> Validity | None:
        """Return whether a client with the events up to this number may resume the stream.

        The stream has `num_events` so far. None: more events must decide that.
        """
        if not self.is_taken_over:
            return Validity.VALID if number <= num_events else Validity.IMPOSSIBLE
        if self.num_sure is None:
            return Validity.VALID if number <= num_events else None
        is_known = number <= max(self.num_sure, self.num_sent)
        return Validity.VALID if is_known else Validity.LOST
