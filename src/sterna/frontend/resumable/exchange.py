"""Stream exchange between front ends: the interpreter of `pacing`, `replicas` and `relays`.

It connects three parts: the router, which has the outputs of engines and the mailbox; the engine's
client, which knows the position of vLLM's code in them; and the streams that this front end keeps
(`middleware`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Send

from sterna.frontend.http.request_context import current
from sterna.frontend.resumable.paced_outputs import paced
from sterna.frontend.resumable.pacing import Begun, CaughtUp, Hand, Pacing, Replayed, ReplicaDropped
from sterna.frontend.resumable.relays import Reading, RelayMessage, Relays, SendTo
from sterna.frontend.resumable.replica_link import ToBuddy
from sterna.frontend.resumable.replicas import Record, Replicas, buddy_of
from sterna.messages.streams import ReplicaMessage, ReplicasKept, StreamHead, StreamMessage
from sterna.types import FrontendId, RequestId

logger = logging.getLogger(__name__)

REPLICA_TIMEOUT_S = 0.5
"""Outputs wait at most this time for the front end that keeps the replicas."""


class KeptStreams(Protocol):
    """The streams that this front end keeps."""

    def has(self, stream_id: str, owner: bytes) -> bool:
        """Whether the stream is here, and belongs to that owner."""

    async def answer(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> None:
        """Answer a client that has all events up to this one."""

    def take_over(self, record: Record) -> bool:
        """Keep a stream whose front end died; False if one of its id is here already."""

    def on_replayed(self, stream_id: str) -> None:
        """vLLM's server has all outputs of the record that was taken over."""

    def on_caught_up(self, stream_id: str, num_groups: int) -> None:
        """The events so far are those of the first `num_groups` of the stream's record: of one of
        its ends."""


class StreamExchange:
    """The streams of one front end, in exchange with the others.

    Methods without a docstring do the same as those of `Pacing`, `Relays` or `KeptStreams`, and
    carry out the effects.

    Args:
        max_bytes: see `Pacing`.
        send_to: sends a message to another front end, with its frames.
        hand: gives outputs to vLLM's client.
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        max_bytes: int,
        send_to: SendTo,
        hand: Callable[[list[bytes]], None],
    ) -> None:
        self._frontend_id = frontend_id
        self._send_to = send_to
        self._hand = hand
        self._pacing = Pacing(frontend_id, max_bytes, REPLICA_TIMEOUT_S)
        self._replicas = Replicas(frontend_id)
        self._relays = Relays(frontend_id, self, send_to)
        self._kept: KeptStreams | None = None
        self._orphans: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0

    def attach(self, kept: KeptStreams) -> None:
        """Set the streams that this front end keeps."""
        self._kept = kept
        orphans, self._orphans = self._orphans, []
        self._take_over(orphans)

    def close(self) -> None:
        """Send nothing from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._relays.close()

    # -------------------------------------------------------------------------- cluster

    def on_frontends(self, live: Sequence[FrontendId]) -> None:
        """These front ends live, in the order of the membership; others are dead for good."""
        buddy = buddy_of(self._frontend_id, live, self._pacing.buddy)
        self._pacing.on_buddy(buddy, _now_s())
        self._flush()
        self._take_over(self._replicas.on_frontends(live))
        self._relays.on_frontends(live)

    def on_message(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Another front end has sent this."""
        match message:
            case ReplicasKept(sender, number):
                self._pacing.on_kept(sender, number, _now_s())
                self._flush()
            case message if isinstance(message, ReplicaMessage):
                answer = self._replicas.on_message(message, frames)
                self._send_to(message.sender, answer, ())
            case message if isinstance(message, RelayMessage):
                if not self._replicas.is_dead(message.sender):
                    self._relays.on_message(message, frames)

    def _take_over(self, records: list[Record]) -> None:
        if self._kept is None:
            self._orphans += records
            return
        taken = [record for record in records if self._kept.take_over(record)]
        if records:
            logger.info("streams taken over num=%d of=%d", len(taken), len(records))
            self._flush()
            self._relays.on_taken_over()

    # ------------------------------------------------------------------ engine requests

    def on_sent(self, request_id: RequestId) -> None:
        """vLLM's code sends this engine request, within the context of its HTTP request."""
        stream = current().stream
        if stream is not None:
            self._pacing.on_sent(stream.stream_id, request_id)

    def on_begun(self, request_id: RequestId) -> Begun | None:
        begun = self._pacing.on_begun(request_id)
        if begun is not None:
            self._flush()
        return begun

    def on_output(self, request_id: RequestId, payload: bytes, *, is_finished: bool) -> bool:
        """See `Pacing`; call `flush` afterwards."""
        return self._pacing.on_output(request_id, payload, is_finished=is_finished)

    def flush(self) -> None:
        """Carry out the effects of outputs."""
        self._flush()

    def on_abort(self, request_ids: Iterable[RequestId]) -> None:
        self._pacing.on_abort(request_ids)
        self._flush()

    def expect(self, stream_id: str, name: str, *, is_repeatable: bool) -> int | None:
        serial = self._pacing.expect(stream_id, name, _now_s(), is_repeatable=is_repeatable)
        self._flush()
        return serial

    def paced(
        self, name: str, outputs: AsyncGenerator[Any, None], *, is_repeatable: bool
    ) -> AsyncGenerator[Any, None]:
        """See `paced_outputs.paced`."""
        return paced(self, name, outputs, is_repeatable=is_repeatable)

    def on_asked(self, name: str, serial: int) -> None:
        self._pacing.on_asked(name, serial)
        self._flush()

    def on_taken(self, name: str, serial: int) -> None:
        self._pacing.on_taken(name, serial)

    def on_left(self, name: str, serial: int) -> None:
        self._pacing.on_left(name, serial)
        self._flush()

    # -------------------------------------------------------------------------- streams

    def begin(self, head: StreamHead, body: bytes) -> None:
        self._pacing.begin(head, body, _now_s())
        self._flush()

    def go_on(self, record: Record) -> None:
        """A stream that was taken over goes on here."""
        self._pacing.take_over(record, _now_s())
        self._flush()

    def over(self, stream_id: str) -> None:
        self._pacing.over(stream_id, _now_s())
        self._flush()

    def drop(self, stream_id: str) -> None:
        self._pacing.drop(stream_id, _now_s())
        self._flush()

    async def introduce(self) -> None:
        await self._relays.introduce()

    async def read(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> Reading:
        return await self._relays.read(stream_id, owner, last, receive, send)

    def has(self, stream_id: str, owner: bytes) -> bool:
        return self._kept is not None and self._kept.has(stream_id, owner)

    def has_replica(self, stream_id: str, owner: bytes) -> bool:
        """Whether this front end takes the stream over if its front end dies."""
        return self._replicas.holder(stream_id, owner) is not None

    async def answer(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> None:
        assert self._kept is not None
        await self._kept.answer(stream_id, owner, last, receive, send)

    # -------------------------------------------------------------------------- effects

    def _flush(self) -> None:
        handed = []
        is_lost = False
        for effect in self._pacing.flush(_now_s()):
            match effect:
                case Hand(payload):
                    handed.append(payload)
                case ToBuddy(buddy, message, frames):
                    is_lost = not self._send_to(buddy, message, frames) or is_lost
                case Replayed(stream_id):
                    assert self._kept is not None
                    self._kept.on_replayed(stream_id)
                case CaughtUp(stream_id, num_groups):
                    assert self._kept is not None
                    self._kept.on_caught_up(stream_id, num_groups)
                case ReplicaDropped(stream_id, reason):
                    logger.warning(
                        "replica of stream dropped stream=%s reason=%s", stream_id, reason
                    )
        if handed:
            self._hand(handed)
        if is_lost:
            # Later confirmations would not show that a message is missing. The buddy gets all
            # records again when the set of front ends changes.
            logger.error("replicas given up, their front end cannot be sent to")
            self._pacing.on_buddy(None, _now_s())
            self._flush()
        self._schedule()

    def _schedule(self) -> None:
        """Wake at the next deadline, or earlier, as the router does."""
        next_s = self._pacing.next_deadline_s
        if next_s is None or (self._timer is not None and self._timer_at_s <= next_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = next_s
        self._timer = asyncio.get_running_loop().call_at(next_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._flush()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
