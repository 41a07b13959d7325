"""Streams that outlive their front ends: the promises about the answers to their clients.

A client gets each event of its stream once and in order, from any front end. It may be told that
its stream is unknown (404) only if it came too late, or if what it has is lost. A loss is allowed
only as documented (`docs/operations/resumable_streams.md`): with a front end that dies, events that
it had given out and no living front end had. A front end gives out an event that its buddy does not
have only if it has no buddy, or has heard nothing of it for `REPLICA_TIMEOUT_S`, or repeats what
another front end had given out.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from fault_simulation.oracle.token_oracle import EMPTY, Ask, Event, decode_event, followed
from fault_simulation.virtual.settings import WINDOW_S
from fault_simulation.virtual.timeline import Violation


class Fate(Enum):
    """The state of a stream, as its client sees it."""

    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left by its client"
    LOST = "lost"


class Excuse(Enum):
    """The reason that the buddy does not have an event that was given out."""

    UNSAID = "nothing was recorded yet"
    ALONE = "there was no other front end"
    SILENT = "the buddy was silent"
    REPEATED = "the successor's own buddy did not have it yet"
    BUDDY_DIED = "the buddy died too, and the next one had not caught up"


@dataclass(frozen=True, slots=True)
class Loss:
    """The rest of a stream: its number of events, or None if nothing is left."""

    num_left: int | None
    excuse: Excuse


@dataclass(slots=True)
class Told:
    """One stream.

    Attributes:
        ask: without the id of an engine request.
        leave: lets its client go away.
        num_events: number of events that its client has.
        digest: of the tokens that its client has.
        has_failed: whether a front end has heard that its engine request has failed.
        loss: the rest that a successor may have, while the client may have more.
    """

    ask: Ask
    leave: Callable[[], None]
    fate: Fate = Fate.OPEN
    num_events: int = 0
    num_tokens: int = 0
    digest: int = EMPTY
    has_failed: bool = False
    loss: Loss | None = None


class StreamLedger:
    """All streams of a cluster whose streams outlive front ends."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.streams: dict[str, Told] = {}
        self.num_open = 0

    def begin(self, ask: Ask, leave: Callable[[], None]) -> None:
        """A front end took the request; `leave` lets its client go away."""
        self.streams[ask.request_id] = Told(ask, leave)
        self.num_open += 1

    def end(self, stream_id: str, fate: Fate) -> None:
        """The stream has ended for its client."""
        told = self.streams[stream_id]
        if told.fate is not Fate.OPEN:
            raise Violation(f"{stream_id} ends twice: {told.fate.value}, {fate.value}")
        told.fate = fate
        self.num_open -= 1
        self._counts[f"stream {fate.value}"] += 1

    def on_event(self, stream_id: str, number: int, content: bytes) -> None:
        """The client gets this event next.

        Raises:
            Violation: one is missing, repeated, or follows other tokens than the client has.
        """
        told = self.streams[stream_id]
        if told.fate is not Fate.OPEN:
            raise Violation(f"{stream_id} got an event after its end: {told.fate.value}")
        if number != told.num_events + 1:
            raise Violation(f"{stream_id} got event {number} behind {told.num_events}")
        told.num_events = number
        event = decode_event(content)
        self._take(told, event)
        if not event.is_last:
            return
        if told.num_tokens == told.ask.output_tokens:
            self.end(stream_id, Fate.FINISHED)
        elif told.has_failed:
            self.end(stream_id, Fate.FAILED)
        else:
            raise Violation(f"{stream_id} ended after {told.num_tokens} tokens")

    @staticmethod
    def _take(told: Told, event: Event) -> None:
        told.num_tokens, told.digest = followed(
            told.ask, told.num_tokens, told.digest, zip(event.token_ids, event.digests, strict=True)
        )

    # ------------------------------------------------------------------------------ losses

    def on_loss(self, stream_id: str, loss: Loss) -> None:
        """A front end died, and others have only this rest of its stream."""
        told = self.streams[stream_id]
        if told.loss is None or _size(loss) < _size(told.loss):
            if told.loss is not None and loss.excuse is Excuse.UNSAID:
                # A successor that had recorded nothing: what its client had was lost before.
                loss = replace(loss, excuse=told.loss.excuse)
            told.loss = loss

    def on_read_on(self, stream_id: str) -> None:
        """A front end that has the stream lets its client continue."""
        self.streams[stream_id].loss = None

    def on_unknown(self, stream_id: str, away_s: float) -> None:
        """The client is told that its stream is lost.

        Args:
            away_s: time for which it got no answer, or only that it should try again.

        Raises:
            Violation: the stream is not lost.
        """
        told = self.streams[stream_id]
        if away_s >= WINDOW_S:
            self._counts["stream lost: its client did not come in time"] += 1
            self.end(stream_id, Fate.LOST)
            return
        loss, num_events = told.loss, told.num_events
        if loss is None or (loss.num_left is not None and num_events <= loss.num_left):
            left = "the stream" if loss is None else f"{loss.num_left} events"
            raise Violation(
                f"{stream_id} is unknown to its client, which has {num_events} events, and a front "
                f"end has {left}"
            )
        if loss.excuse is Excuse.UNSAID and num_events:
            raise Violation(f"{stream_id} is unknown, and its client has {num_events} events")
        self._counts[f"stream lost: {loss.excuse.value}"] += 1
        self.end(stream_id, Fate.LOST)

    def check_ended(self, now_s: float) -> None:
        """After all has healed.

        Raises:
            Violation: a client still waits for its stream.
        """
        for stream_id, told in self.streams.items():
            if told.fate is Fate.OPEN:
                raise Violation(
                    f"stream {stream_id} has not ended at {now_s:.1f} s: its client has "
                    f"{told.num_tokens} of {told.ask.output_tokens} tokens"
                )


def _size(loss: Loss) -> int:
    return -1 if loss.num_left is None else loss.num_left
