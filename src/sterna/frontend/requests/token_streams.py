"""Token streams in order, each token once, each stream ended once. Pure.

The tokens of a migrating request come from two instances over two connections, without an order
between them, and a request that an instance takes over after a death repeats tokens that were
already delivered. Every span carries the index of its first token, which is enough: a span that
begins at the next expected token is delivered, one that begins later waits, one that is behind is
dropped, and of one that is partly behind only the rest is delivered.

Of one instance the spans of a request follow each other without a gap, unless its mailbox has
refused some. What follows such a gap is never delivered: if the instance dies, the request may go
on where it was before, with other tokens in the gap's place. The gap's time-out shows the loss.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from sterna.frontend.requests.request_effects import Deliver
from sterna.messages.actors import RequestsMoved, TokenSpan
from sterna.types import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class Repeat:
    """Tokens whose places in the stream are filled already, perhaps by other tokens.

    Attributes:
        payload: its first token has the index `first_index`.
        num_before: number of deliveries of the batch that come before it. The next one is the rest
            of the same payload, if it has one.
    """

    request_id: RequestId
    first_index: int
    payload: bytes
    num_before: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a batch.

    Attributes:
        deliveries: in the order in which they must reach the client.
        repeats: what was cut or dropped, in order.
        advanced: spans of the batch with later tokens than all that their streams got before.
        ended: streams whose end is in the batch, while earlier tokens are still missing.
        ended_empty: streams that have ended, with no token since they were opened.
        ended_behind: streams whose instance has ended them before tokens that were delivered: they
            were another instance's, whose death gave the request back.
        strays: requests of the batch without an open stream that their instance still computes.
    """

    deliveries: list[Deliver]
    advanced: list[TokenSpan]
    ended: list[RequestId]
    ended_empty: list[RequestId]
    ended_behind: list[RequestId]
    strays: list[RequestId]
    repeats: list[Repeat]


_Span = tuple[int, int, bool, bytes, bool]


@dataclass(slots=True)
class _Stream:
    """One open stream.

    Attributes:
        first_index: the token with which it began. An instance that has not announced the request
            (`RequestsMoved`) begins there as well, or its announcement was refused.
        next_index: the first token that was not delivered yet.
        seen_index: one past the last token of all spans so far, delivered or held.
        held: spans after a gap, as (first token, one past the last, is finished, payload, whether
            it may be delivered), sorted.
        ends: by instance, one past its last token without a gap before it.
    """

    first_index: int = 0
    next_index: int = 0
    seen_index: int = 0
    held: list[_Span] = field(default_factory=list)
    ends: dict[InstanceId, int] = field(default_factory=dict)


class TokenStreams:
    """The open streams of one front end."""

    def __init__(self, gap_timeout_s: float) -> None:
        self._gap_timeout_s = gap_timeout_s
        self._streams: dict[RequestId, _Stream] = {}
        # In the order of their deadlines, because each is entered with the same time-out.
        self._gap_deadlines_s: dict[RequestId, float] = {}

    def open(self, request_id: RequestId, first_index: int = 0) -> None:
        """Expect the request's tokens from this one on."""
        self._streams[request_id] = _Stream(first_index, first_index, first_index)

    def close(self, request_id: RequestId) -> None:
        """Deliver nothing further of this request; no effect when its stream has ended."""
        self._streams.pop(request_id, None)
        self._gap_deadlines_s.pop(request_id, None)

    def num_delivered(self, request_id: RequestId) -> int | None:
        """Return the number of tokens that the client has, or None without an open stream."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.next_index

    def on_moved(self, moved: RequestsMoved) -> None:
        """The instance has got these requests, and will send their tokens from these on."""
        for request_id, first_index in zip(moved.request_ids, moved.first_indices, strict=True):
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.ends[moved.instance_id] = first_index

    def on_batch(
        self,
        instance_id: InstanceId,
        spans: Sequence[TokenSpan],
        payloads: Sequence[bytes],
        now_s: float,
    ) -> Outcome:
        """Take in a batch, one payload for each span, and return what to do with it."""
        outcome = Outcome([], [], [], [], [], [], [])
        for span, payload in zip(spans, payloads, strict=True):
            stream = self._streams.get(span.request_id)
            if stream is None:
                if not span.is_finished:
                    outcome.strays.append(span.request_id)
                continue
            self._take(stream, instance_id, span, payload, now_s, outcome)
        return outcome

    def expired(self, now_s: float) -> list[RequestId]:
        """Return the streams whose gap has been open too long: tokens were lost."""
        return [
            request_id
            for request_id, deadline_s in self._gap_deadlines_s.items()
            if deadline_s <= now_s
        ]

    def next_deadline_s(self) -> float | None:
        """Return when `expired` may next return something, or None when no gap is open."""
        return next(iter(self._gap_deadlines_s.values()), None)

    def _take(
        self,
        stream: _Stream,
        instance_id: InstanceId,
        span: TokenSpan,
        payload: bytes,
        now_s: float,
        outcome: Outcome,
    ) -> None:
        request_id = span.request_id
        end = span.first_index + span.num_tokens
        if end > stream.seen_index:
            stream.seen_index = end
            outcome.advanced.append(span)

        own_end = stream.ends.get(instance_id, stream.first_index)
        is_whole = span.first_index <= own_end
        if is_whole:
            stream.ends[instance_id] = max(own_end, end)
        arrived = (span.first_index, end, span.is_finished, payload, is_whole)
        if span.first_index > stream.next_index or not is_whole:
            if arrived not in stream.held:
                insort(stream.held, arrived)
            self._gap_deadlines_s.setdefault(request_id, now_s + self._gap_timeout_s)
            if span.is_finished:
                outcome.ended.append(request_id)
            return

        num_before = len(outcome.deliveries)
        is_open = self._deliver(stream, request_id, arrived, outcome)
        while is_open and stream.held and stream.held[0][0] <= stream.next_index:
            span_after = stream.held.pop(0)
            if span_after[-1]:
                is_open = self._deliver(stream, request_id, span_after, outcome)
        if not is_open:
            self.close(request_id)
            if stream.next_index == stream.first_index:
                outcome.ended_empty.append(request_id)
        elif len(outcome.deliveries) > num_before and request_id in self._gap_deadlines_s:
            del self._gap_deadlines_s[request_id]
            if stream.held:
                self._gap_deadlines_s[request_id] = now_s + self._gap_timeout_s

    @staticmethod
    def _deliver(stream: _Stream, request_id: RequestId, span: _Span, outcome: Outcome) -> bool:
        """Deliver what is not a repeat, and return whether the stream goes on.

        A finished span ends the stream even if all its tokens are repeats. An output without
        tokens that does not end the stream (a notice) is delivered at its place.
        """
        first, end, is_finished, payload, _ = span
        if first < min(end, stream.next_index):
            repeat = Repeat(request_id, first, payload, len(outcome.deliveries))
            outcome.repeats.append(repeat)
        is_behind = end < stream.next_index or (
            end == stream.next_index and first < end and not is_finished
        )
        if is_behind:
            if is_finished:
                outcome.ended_behind.append(request_id)
            return True
        num_repeated = stream.next_index - first
        outcome.deliveries.append(Deliver(request_id, payload, num_repeated, is_finished))
        stream.next_index = end
        return not is_finished
