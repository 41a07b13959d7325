"""How much of a stream clients can know. Pure.

A stream that was taken over comes to the events again that its former front end had recorded.
Behind these it goes on by itself, and what the former one may have said there beyond its record
was something else: who has that must not read on.
"""

from dataclasses import dataclass
from enum import Enum


class Knowledge(Enum):
    """How a client's number stands to a stream."""

    ITS = "the client has a beginning of this very stream"
    LOST = "the client may have what a dead front end said and nobody else knows"
    NONE = "no client can have been told so much"


@dataclass(slots=True)
class ResumeValidity:
    """Of one stream at one front end.

    Attributes:
        num_told: events that somebody has been sent from here.
        num_sure: of a stream that was taken over, the events that its former front end can have
            told; None: they are not all there again yet.
    """

    is_taken_over: bool
    num_told: int = 0
    num_sure: int | None = None

    def on_told(self, number: int) -> None:
        """A client has been sent the events up to this one."""
        self.num_told = max(self.num_told, number)

    def on_caught_up(self, num_events: int) -> None:
        """So many events are all that the former front end can have told."""
        self.num_sure = num_events

    def on_over(self, num_events: int) -> None:
        """There are so many events, and there will be no more."""
        if self.num_sure is None:
            self.num_sure = num_events

    def knowledge(self, number: int, num_events: int) -> Knowledge | None:
        """Return whether a client can have the event of this number from this stream, of which
        there are so many by now; None: that is open, wait for more."""
        if not self.is_taken_over:
            return Knowledge.ITS if number <= num_events else Knowledge.NONE
        if self.num_sure is None:
            return Knowledge.ITS if number <= num_events else None
        is_known = number <= max(self.num_sure, self.num_told)
        return Knowledge.ITS if is_known else Knowledge.LOST
