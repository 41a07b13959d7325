"""Pacing: keeps streams and their replicas in step, so that a client gets no event that only one
front end knows. Pure.

For each resumable stream, the outputs of the engine pass through here on their way to vLLM's
server:

- Each output is added to the stream's *record* (`replicas`), which is sent to another front end,
  the *buddy*. The output may go to vLLM's server when the buddy has confirmed it.
- vLLM's server gets the outputs one by one, each when it asks for more after the one before. It
  would merge outputs that come faster than it takes them, so its events would depend on its speed.
  Outputs that come much faster are joined here, before they are recorded.

When this front end dies, the buddy runs the request again. It hands the outputs of the record to
its vLLM's server in the same way and order, which gives the same events; new outputs of engines
follow after them.

Without a buddy nothing waits; a new buddy gets all records. Streams do not wait for a slow buddy
(`replica_link`), since they must not stop because another front end does. If this front end dies in
that time, the events that clients have and the buddy has not are lost; `CaughtUp` shows the
successor where each record of a takeover ends.

**Order within vLLM's server.** Of all engine requests of a stream (several prompts or choices),
vLLM's code has one output at a time. An engine request *asks* when vLLM's code waits for its next
output; it is *handed* one, *takes* it, and asks again when that has become events. An output for a
choice that vLLM's code has ended by itself, at a stop string, vanishes: the abort of that choice
shows it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sterna.engine import payload_parts
from sterna.frontend.requests.request_ids import client_id, name_of_slot, slot_of
from sterna.frontend.resumable.paced_stream import (
    MAX_WAITING,
    ConsumerState,
    Gathered,
    PacedStream,
    Waiting,
)
from sterna.frontend.resumable.replica_link import ReplicaLink, ToBuddy
from sterna.frontend.resumable.replicas import Payloads, Record
from sterna.messages.streams import (
    DropStream,
    Group,
    KeepStream,
    StreamHead,
    StreamOver,
)
from sterna.types import FrontendId, RequestId


@dataclass(frozen=True, slots=True)
class Hand:
    """Hand this output to vLLM's server."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The events so far are all those of a record that was taken over. The front end that had the
    stream then did not know the later ones.

    Attributes:
        num_groups: of that record, as in one of `Record.takeovers`.
    """

    stream_id: str
    num_groups: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """vLLM's server has all outputs of the record that was taken over."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class ReplicaDropped:
    """A fact for the log: the stream no longer has a replica.

    Attributes:
        reason: in words.
    """

    stream_id: str
    reason: str


PacingEffect = Hand | ToBuddy | Replayed | CaughtUp | ReplicaDropped


@dataclass(frozen=True, slots=True)
class Begun:
    """An engine request of a stream has begun.

    Attributes:
        output_token_ids: the tokens that its client has already.
        has_ended: all its outputs are in the record; no instance is needed.
    """

    output_token_ids: tuple[int, ...]
    has_ended: bool


class Pacing:
    """The streams of one front end.

    Call `flush` after every change; it returns the effects.

    Args:
        max_bytes: limit for all records together; a stream beyond it gets no replica.
        timeout_s: see `replica_link`.
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        max_bytes: int,
        timeout_s: float,
        payloads: Payloads = payload_parts,
    ) -> None:
        self._frontend_id = frontend_id
        self._max_bytes = max_bytes
        self._payloads = payloads
        self._streams: dict[str, PacedStream] = {}
        self._by_name: dict[str, PacedStream] = {}
        self._by_request: dict[RequestId, PacedStream] = {}
        self._num_bytes = 0
        self._next_serial = 1
        self._link = ReplicaLink(frontend_id, timeout_s)
        # Streams that `flush` must look at, and those that wait for the buddy.
        self._touched: dict[str, PacedStream] = {}
        self._held: dict[str, PacedStream] = {}
        self._effects: list[PacingEffect] = []

    @property
    def buddy(self) -> FrontendId | None:
        """The front end that has the replicas."""
        return self._link.buddy

    @property
    def num_bytes(self) -> int:
        """Size of all records."""
        return self._num_bytes

    @property
    def next_deadline_s(self) -> float | None:
        """When `flush` is due without another event; None while no confirmation is awaited."""
        return self._link.next_deadline_s

    # ------------------------------------------------------------------------------ streams

    def begin(self, head: StreamHead, body: bytes, now_s: float) -> None:
        """A stream begins here."""
        self._enter(PacedStream(Record(head, body), self._next_serial), now_s)

    def take_over(self, record: Record, now_s: float) -> None:
        """A stream whose front end died goes on here."""
        stream = PacedStream(record, self._next_serial, is_replaying=True, is_behind=True)
        stream.takeovers_ahead = sorted({num_groups for _, num_groups in record.takeovers})
        stream.waiting.extend(
            Waiting(group.slot, payload, 0, is_old=True)
            for group, payload in zip(record.groups, record.payloads, strict=True)
        )
        self._enter(stream, now_s)

    def over(self, stream_id: str, now_s: float) -> None:
        """The answer has ended; it can still be read. No effect if the stream is not known."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._release(stream)
        if stream.is_replicated and not stream.record.is_over:
            stream.record.is_over = True
            self._link.send(lambda n: StreamOver(self._frontend_id, n, stream_id), [], now_s)

    def drop(self, stream_id: str, now_s: float) -> None:
        """The stream is no longer kept; no effect if it is not known."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._release(stream)
        self._drop_replica(stream, now_s)
        del self._streams[stream_id]

    def _enter(self, stream: PacedStream, now_s: float) -> None:
        stream_id = stream.record.head.stream_id
        assert stream_id not in self._streams
        self._next_serial += 1
        self._streams[stream_id] = stream
        self._num_bytes += stream.record.num_bytes
        self._touched[stream_id] = stream
        if self._num_bytes > self._max_bytes:
            self._drop_replica(stream, now_s, "its record takes too much memory")
        else:
            self._send_whole(stream, now_s)

    # --------------------------------------------------------------------- engine requests

    def expect(self, stream_id: str, name: str, now_s: float, *, is_repeatable: bool) -> int | None:
        """vLLM's server begins an engine request of this name for the stream.

        Returns the serial for the events of this engine request, or None if it is not paced. It is
        not paced if it could not be run again: its outputs do not become events one by one, or
        another engine request has the name.
        """
        stream = self._streams.get(stream_id)
        if stream is None or not stream.is_paced:
            return None
        if not is_repeatable or name in self._by_name or name in stream.consumers:
            stream.is_paced = False
            self._drop_replica(stream, now_s, "its events cannot be repeated")
            return None
        self._by_name[name] = stream
        stream.consumers[name] = ConsumerState.WORKING
        return stream.serial

    def on_sent(self, stream_id: str, request_id: RequestId) -> None:
        """vLLM's code sends this engine request for the stream. Others may have the same name:
        clients can choose it."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.is_paced:
            stream.sent.add(request_id)

    def on_begun(self, request_id: RequestId) -> Begun | None:
        """An engine request of vLLM's code has come; returns None if it is not paced."""
        name, slot = client_id(request_id), slot_of(request_id)
        stream = self._by_name.get(name)
        if stream is None or request_id not in stream.sent or slot in stream.slots:
            return None
        stream.sent.discard(request_id)
        stream.slots[slot] = request_id
        self._by_request[request_id] = stream
        self._touch(stream)
        if not stream.is_behind:
            return Begun((), False)
        record = stream.record
        return Begun(record.token_ids(slot, self._payloads), record.has_ended(slot))

    def on_asked(self, name: str, serial: int) -> None:
        """vLLM's code waits for the next output of the engine request of this name; its last output
        has become events."""
        stream = self._of(name, serial)
        if stream is not None:
            stream.consumers[name] = ConsumerState.ASKING
            self._settle(stream, name)

    def on_taken(self, name: str, serial: int) -> None:
        """vLLM's code has taken an output."""
        stream = self._of(name, serial)
        if stream is not None:
            stream.consumers[name] = ConsumerState.WORKING

    def on_left(self, name: str, serial: int) -> None:
        """vLLM's code has stopped reading the engine request of this name."""
        stream = self._of(name, serial)
        if stream is None:
            return
        del self._by_name[name]
        for slot in stream.slots:
            if name_of_slot(slot) == name:
                self._close(stream, slot)
        self._settle(stream, name)

    def on_abort(self, request_ids: Iterable[RequestId]) -> None:
        """vLLM's code has ended these engine requests."""
        for request_id in request_ids:
            stream = self._by_request.get(request_id)
            if stream is None:
                continue
            slot = slot_of(request_id)
            self._close(stream, slot)
            name = name_of_slot(slot)
            if stream.pending == slot and stream.consumers[name] is ConsumerState.HANDED:
                # The output that it was handed came after its end, and vanished.
                stream.consumers[name] = ConsumerState.ASKING
                self._settle(stream, name)

    def on_output(self, request_id: RequestId, payload: bytes, *, is_finished: bool) -> bool:
        """The engine request's next output has arrived; returns False if it is not paced."""
        stream = self._by_request.get(request_id)
        if stream is None:
            return False
        slot = slot_of(request_id)
        if stream.gathered or len(stream.waiting) >= MAX_WAITING:
            stream.gather(Gathered(slot, payload, is_finished), self._payloads)
        else:
            self._let_wait(stream, slot, payload, is_finished)
        self._touch(stream)
        return True

    def _let_wait(self, stream: PacedStream, slot: str, payload: bytes, is_finished: bool) -> None:
        number = 0
        if stream.is_replicated:
            group = Group(stream.record.head.stream_id, slot, is_finished)
            self._num_bytes += stream.record.extend(group, payload)
            number = self._link.extend(group, payload)
        stream.waiting.append(Waiting(slot, payload, number))

    def _of(self, name: str, serial: int) -> PacedStream | None:
        """Return the stream of the engine request, if no later one has its name."""
        stream = self._by_name.get(name)
        return stream if stream is not None and stream.serial == serial else None

    def _settle(self, stream: PacedStream, name: str) -> None:
        if stream.pending is not None and name_of_slot(stream.pending) == name:
            stream.pending = None
        self._touch(stream)

    def _close(self, stream: PacedStream, slot: str) -> None:
        stream.closed.add(slot)
        self._by_request.pop(stream.slots[slot], None)

    def _touch(self, stream: PacedStream) -> None:
        self._touched[stream.record.head.stream_id] = stream

    def _release(self, stream: PacedStream) -> None:
        """vLLM's code has nothing of the stream from now on."""
        for name in stream.consumers:
            if self._by_name.get(name) is stream:
                del self._by_name[name]
        for slot in stream.slots:
            self._close(stream, slot)
        stream.sent.clear()
        stream.waiting.clear()
        stream.gathered.clear()
        stream.is_paced = False

    # --------------------------------------------------------------------------- the buddy

    def on_buddy(self, buddy: FrontendId | None, now_s: float) -> None:
        """This front end has the replicas from now on; the previous one has died."""
        if buddy == self._link.buddy:
            return
        self._link.on_buddy(buddy)
        for stream in self._streams.values():
            if stream.is_replicated:
                self._send_whole(stream, now_s)
        self._touch_held()

    def on_kept(self, sender: FrontendId, number: int, now_s: float) -> None:
        """The buddy has all messages up to this number."""
        if self._link.on_kept(sender, number, now_s):
            self._touch_held()

    def _touch_held(self) -> None:
        self._touched.update(self._held)
        self._held.clear()

    def _send_whole(self, stream: PacedStream, now_s: float) -> None:
        record, own_id = stream.record, self._frontend_id
        groups = tuple(record.groups)
        number = self._link.send(
            lambda n: KeepStream(own_id, n, record.head, groups, record.is_over, record.takeovers),
            [record.body, *record.payloads],
            now_s,
        )
        for each in stream.waiting:
            # Clients may have the events of a record that was taken over.
            each.number = 0 if each.is_old else number

    def _drop_replica(self, stream: PacedStream, now_s: float, reason: str | None = None) -> None:
        """Remove the stream's replica; it gets no other one."""
        if not stream.is_replicated:
            return
        stream.is_replicated = False
        stream_id = stream.record.head.stream_id
        self._num_bytes -= stream.record.num_bytes
        self._link.send(lambda n: DropStream(self._frontend_id, n, stream_id), [], now_s)
        for each in stream.waiting:
            each.number = 0
        if not stream.is_behind:
            stream.record = Record(stream.record.head, b"")
        if reason is not None:
            self._effects.append(ReplicaDropped(stream_id, reason))

    # ------------------------------------------------------------------------------ effects

    def flush(self, now_s: float) -> list[PacingEffect]:
        """Return the effects of all changes since the last call, in order."""
        while True:
            touched, self._touched = self._touched, {}
            for stream in touched.values():
                while stream.gathered and len(stream.waiting) < MAX_WAITING:
                    each = stream.gathered.pop(0)
                    self._let_wait(stream, each.slot, each.payload, each.is_finished)
                if self._num_bytes > self._max_bytes:
                    self._drop_replica(stream, now_s, "its record takes too much memory")
            messages, has_become_slow = self._link.flush(now_s)
            self._effects += messages
            if has_become_slow:
                touched.update(self._held)
                self._held.clear()
            for stream in touched.values():
                self._advance(stream)
            if not self._touched:
                break
        effects, self._effects = self._effects, []
        return effects

    def _advance(self, stream: PacedStream) -> None:
        self._effects += self._due(stream)
        # Outputs of the record that was taken over come before all others.
        has_old = stream.waiting and stream.waiting[0].is_old
        if stream.is_replaying and not has_old:
            stream.is_replaying = False
            self._effects.append(Replayed(stream.record.head.stream_id))
        if stream.gathered and not stream.waiting:
            # The waiting outputs belonged to a closed slot, and were removed: there is room.
            self._touch(stream)

    def _due(self, stream: PacedStream) -> Iterator[PacingEffect]:
        """Hand the stream's next output to vLLM's server, if it may have it."""
        while stream.waiting and stream.pending is None:
            first = stream.waiting[0]
            if first.slot in stream.closed:
                stream.waiting.popleft()
                stream.num_replayed += first.is_old
                continue
            if self._link.is_waited_for(first.number):
                self._held[stream.record.head.stream_id] = stream
                return
            name, request_id = name_of_slot(first.slot), stream.slots.get(first.slot)
            if request_id is None or stream.consumers.get(name) is not ConsumerState.ASKING:
                return
            while stream.takeovers_ahead and stream.takeovers_ahead[0] <= stream.num_replayed:
                yield CaughtUp(stream.record.head.stream_id, stream.takeovers_ahead.pop(0))
            stream.waiting.popleft()
            stream.consumers[name] = ConsumerState.HANDED
            stream.pending = first.slot
            payload = first.payload
            if first.is_old:
                stream.num_replayed += 1
                payload = self._payloads.renamed_output(payload, request_id)
            else:
                stream.is_behind = False
            yield Hand(payload)
