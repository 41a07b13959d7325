"""What front ends do for each other's streams: the interpreter of `pacing` and `replicas`.

It stands between the router, which has the outputs of engines and the mailbox, the engine's client,
which knows how far vLLM's code is, and the streams that this front end keeps (`resumable`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Send

from sterna.frontend.resumable.paced_outputs import paced
from sterna.frontend.resumable.pacing import Begun, CaughtUp, Hand, Pacing, Parted, RunAgain
from sterna.frontend.resumable.relays import Reading, RelayMessage, Relays, SendTo
from sterna.frontend.resumable.replica_link import ToBuddy
from sterna.frontend.resumable.replicas import Record, Replicas, buddy_of
from sterna.messages.streams import ReplicaMessage, ReplicasKept, StreamHead, StreamMessage
from sterna.types import FrontendId, RequestId

logger = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""How long outputs wait for the front end that keeps the replicas."""


class KeptStreams(Protocol):
    """The streams that this front end keeps."""

    def has(self, stream_id: str, owner: bytes) -> bool:
        """Whether it is here, and that owner's."""

    async def answer(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> None:
        """Answer a client that has all events up to this one."""

    def take_over(self, record: Record) -> bool:
        """Keep a stream whose front end died; False: one of its id is here already."""

    def on_run_again(self, stream_id: str) -> None:
        """The stream is about to have come to the events again that it had."""

    def on_caught_up(self, stream_id: str) -> None:
        """The stream's events so far are all that its former front end can have told."""


class StreamExchange:
    """The streams of one front end towards the others.

    Args:
        max_bytes: see `Pacing`.
        send_to: sends a message to another front end, with its frames.
        hand: gives vLLM's client outputs.
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
        self._pacing = Pacing(frontend_id, max_bytes, PATIENCE_S)
        self._replicas = Replicas(frontend_id)
        self._relays = Relays(frontend_id, self, send_to)
        self._kept: KeptStreams | None = None
        self._orphans: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0

    def attach(self, kept: KeptStreams) -> None:
        """These are the streams that this front end keeps."""
        self._kept = kept
        orphans, self._orphans = self._orphans, []
        self._take_over(orphans)

    def close(self) -> None:
        """Say nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._relays.close()

    # ---------------------------------------------------------------------- of the cluster

    def on_frontends(self, live: Sequence[FrontendId]) -> None:
        """These front ends live, in the order of the membership; others are dead for good."""
        buddy = buddy_of(self._frontend_id, live, self._pacing.buddy)
        self._pacing.on_buddy(buddy, _now_s())
        self._flush()
        self._take_over(self._replicas.on_frontends(live))
        self._relays.on_frontends(live)

    def on_message(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Another front end says this."""
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

    # -------------------------------------------------------------- of engine requests

    def on_begun(self, request_id: RequestId) -> Begun | None:
        """See `Pacing`."""
        begun = self._pacing.on_begun(request_id)
        if begun is not None:
            self._flush()
        return begun

    def on_output(self, request_id: RequestId, payload: bytes, *, is_finished: bool) -> bool:
        """See `Pacing`; `flush` is to follow."""
        return self._pacing.on_output(request_id, payload, is_finished=is_finished)

    def flush(self) -> None:
        """Do what is due after outputs."""
        self._flush()

    def on_abort(self, request_ids: Iterable[RequestId]) -> None:
        """See `Pacing`."""
        self._pacing.on_abort(request_ids)
        self._flush()

    def expect(self, stream_id: str, name: str, *, is_repeatable: bool) -> int | None:
        """See `Pacing`."""
        serial = self._pacing.expect(stream_id, name, _now_s(), is_repeatable=is_repeatable)
        self._flush()
        return serial

    def paced(
        self, name: str, outputs: AsyncGenerator[Any, None], *, is_repeatable: bool
    ) -> AsyncGenerator[Any, None]:
        """See `paced`."""
        return paced(self, name, outputs, is_repeatable=is_repeatable)

    def on_asked(self, name: str, serial: int) -> None:
        """See `Pacing`."""
        self._pacing.on_asked(name, serial)
        self._flush()

    def on_taken(self, name: str, serial: int) -> None:
        """See `Pacing`."""
        self._pacing.on_taken(name, serial)

    def on_left(self, name: str, serial: int) -> None:
        """See `Pacing`."""
        self._pacing.on_left(name, serial)
        self._flush()

    # ----------------------------------------------------------------------- of streams

    def begin(self, head: StreamHead, body: bytes) -> None:
        """A stream begins here."""
        self._pacing.begin(head, body, _now_s())
        self._flush()

    def go_on(self, record: Record) -> None:
        """A stream goes on here."""
        self._pacing.take_over(record, _now_s())
        self._flush()

    def over(self, stream_id: str) -> None:
        """The stream has ended, and is kept."""
        self._pacing.over(stream_id, _now_s())
        self._flush()

    def drop(self, stream_id: str) -> None:
        """The stream is not kept any more."""
        self._pacing.drop(stream_id, _now_s())
        self._flush()

    async def read(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> Reading:
        """See `Relays`."""
        return await self._relays.read(stream_id, owner, last, receive, send)

    def has(self, stream_id: str, owner: bytes) -> bool:
        """Whether the stream is here."""
        return self._kept is not None and self._kept.has(stream_id, owner)

    def has_replica(self, stream_id: str, owner: bytes) -> bool:
        """Whether the stream comes here when its front end dies."""
        return self._replicas.holder(stream_id, owner) is not None

    async def answer(
        self, stream_id: str, owner: bytes, last: str, receive: Receive, send: Send
    ) -> None:
        """See `KeptStreams`."""
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
                case RunAgain(stream_id):
                    assert self._kept is not None
                    self._kept.on_run_again(stream_id)
                case CaughtUp(stream_id):
                    assert self._kept is not None
                    self._kept.on_caught_up(stream_id)
                case Parted(stream_id, reason):
                    logger.warning(
                        "stream has no replica any more stream=%s reason=%s", stream_id, reason
                    )
        if handed:
            self._hand(handed)
        if is_lost:
            # What it confirms from here on says nothing of what is missing. It gets everything
            # anew when somebody has come or gone.
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
