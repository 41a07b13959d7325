"""What clients of streams that outlive their front ends were told: the promises about these.

A client gets each event of its stream once, in order, whoever tells it. It may be told that its
stream is unknown (404) only where it came too late, or where what it has is lost, and that only by
what the documentation says (`docs/operations/resumable_streams.md`): at the death of a front end,
what it had given out and no living other one had. It gives out what its buddy does not have only
where it has none, or has heard nothing of it for `PATIENCE_S`, or where it repeats what another one
had given out.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fault_simulation.oracle.token_oracle import EMPTY, Ask, Event, decode_event, followed
from fault_simulation.virtual.settings import WINDOW_S
from fault_simulation.virtual.timeline import Violation


class Fate(Enum):
    """How a stream stands, as its client sees it."""

    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left by its client"
    LOST = "lost"


class Excuse(Enum):
    """Why an event was given out that the buddy did not have, or has no more."""

    UNSAID = "nothing was recorded yet"
    ALONE = "there was no other front end"
    SILENT = "the buddy was silent"
    REPEATED = "the successor's own buddy did not have it yet"
    BUDDY_DIED = "the buddy died too, and the next one had not caught up"


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a stream, what is left: so many events, or nothing at all (None)."""

    num_left: int | None
    excuse: Excuse


@dataclass(slots=True)
class Told:
    """One stream.

    Attributes:
        ask: without the id of an engine request.
        leave: has its client go away.
        num_events: that its client has.
        digest: of the tokens that its client has.
        has_failed: a front end was told that its engine request has failed.
        loss: what its client may have and its successor not.
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
    """All streams of a cluster whose streams are read on."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.streams: dict[str, Told] = {}
        self.num_open = 0

    def begin(self, ask: Ask, leave: Callable[[], None]) -> None:
        """A front end took the request; `leave` has its client go away."""
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
            Violation: one is missing, repeated, or follows upon other tokens than the client has.
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
        """A front end died, and others have only this of its stream."""
        told = self.streams[stream_id]
        if told.loss is None or _size(loss) < _size(told.loss):
            told.loss = loss

    def on_read_on(self, stream_id: str) -> None:
        """A front end that has the stream lets its client read on."""
        self.streams[stream_id].loss = None

    def on_unknown(self, stream_id: str, away_s: float) -> None:
        """The client is told that its stream is lost.

        Args:
            away_s: for so long it was not answered, or told only to try again.

        Raises:
            Violation: it need not be.
        """
        told = self.streams[stream_id]
        if away_s >= WINDOW_S:
            self._counts["stream lost: nobody came for it in time"] += 1
            self.end(stream_id, Fate.LOST)
            return
        loss, num_events = told.loss, told.num_events
        if loss is None or (loss.num_left is not None and num_events <= loss.num_left):
            left = "the stream" if loss is None else f"{loss.num_left} events"
            raise Violation(
                f"{stream_id} is unknown to its client, who has {num_events} events, and a front "
                f"end has {left}"
            )
        if loss.excuse is Excuse.UNSAID and num_events:
            raise Violation(f"{stream_id} is unknown, and its client has {num_events} events")
        self._counts[f"stream lost: {loss.excuse.value}"] += 1
        self.end(stream_id, Fate.LOST)

    def check_ended(self, now_s: float) -> None:
        """After all has healed.

        Raises:
            Violation: a client waits for its stream still.
        """
        for stream_id, told in self.streams.items():
            if told.fate is Fate.OPEN:
                raise Violation(
                    f"stream {stream_id} has not ended at {now_s:.1f} s: its client has "
                    f"{told.num_tokens} of {told.ask.output_tokens} tokens"
                )


def _size(loss: Loss) -> int:
    return -1 if loss.num_left is None else loss.num_left
