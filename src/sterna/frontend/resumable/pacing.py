"""Streams and their replicas in step: a client knows no event that only one front end does. Pure.

For each stream that can be read on, the outputs of the engine go through here on their way to
vLLM's server:

- each is added to the stream's *record* (`records`), which is sent on to another front end, the
  *buddy*; it may go to vLLM's server when the buddy has confirmed that it has it;
- vLLM's server gets them one by one: the next when it has asked for more behind the one before.
  It would merge those that come faster than it takes them, and its events would depend on how
  fast it was. Those that come much faster are joined here, before they are recorded.

When this front end dies, the buddy runs the request again. There the outputs of the record go to
vLLM's server in the same way, in the same order, so that it comes to the same events; what engines
produce behind them comes after them.

While there is no buddy, nothing waits for one; a new buddy is sent all records. A slow one is not
waited for (`telling`): streams must not stop because a front end does. What the clients know and it
does not is lost if this front end dies in that time; `CaughtUp` lets its successor say so.

**Order within vLLM's server.** Of all engine requests of a stream, of several prompts or choices,
one output at a time is in its hands. An engine request *asks* when vLLM's code waits for its next
output; it is *handed* one, *takes* it, and asks again when that has become events. An output that
comes for a choice that vLLM's code has ended by itself, at a stop string, vanishes: then the abort
of that choice says so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sterna.engine import payload_parts
from sterna.frontend.requests.request_ids import client_id, name_of_slot, slot_of
from sterna.frontend.resumable.paced_stream import (
    MAX_WAITING,
    Asker,
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
    """Give vLLM's server this output."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The events so far are all those of the record that was taken over; what follows was not
    known to the front end that had the stream."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class RunAgain:
    """All outputs of the record that was taken over are with vLLM's server."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class Parted:
    """A fact for the log: the stream has no replica any more.

    Attributes:
        reason: in words.
    """

    stream_id: str
    reason: str


PacingEffect = Hand | ToBuddy | RunAgain | CaughtUp | Parted


@dataclass(frozen=True, slots=True)
class Begun:
    """An engine request of a stream has come.

    Attributes:
        output_token_ids: what its client has already.
        has_ended: all its outputs are there; no instance is needed.
    """

    output_token_ids: tuple[int, ...]
    has_ended: bool


class Pacing:
    """The streams of one front end.

    Every change is followed by `flush`, which says what is to be done.

    Args:
        max_bytes: of all records together; a stream for which there is no room has no replica.
        patience_s: see `telling`.
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        max_bytes: int,
        patience_s: float,
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
        self._telling = ReplicaLink(frontend_id, patience_s)
        # Streams of which something may be due, and those that wait for the buddy.
        self._touched: dict[str, PacedStream] = {}
        self._held: dict[str, PacedStream] = {}
        self._effects: list[PacingEffect] = []

    @property
    def buddy(self) -> FrontendId | None:
        """The front end that has the replicas."""
        return self._telling.buddy

    @property
    def num_bytes(self) -> int:
        """Of all records."""
        return self._num_bytes

    @property
    def next_deadline_s(self) -> float | None:
        """When `flush` is due although nothing has happened; None while nothing is waited for."""
        return self._telling.next_deadline_s

    # ------------------------------------------------------------------------------ streams

    def begin(self, head: StreamHead, body: bytes, now_s: float) -> None:
        """A stream begins here."""
        self._enter(PacedStream(Record(head, body), self._next_serial), now_s)

    def take_over(self, record: Record, now_s: float) -> None:
        """A stream goes on here whose front end died."""
        stream = PacedStream(record, self._next_serial, is_running_again=True, is_behind=True)
        stream.waiting.extend(
            Waiting(group.slot, payload, 0, is_old=True)
            for group, payload in zip(record.groups, record.payloads, strict=True)
        )
        self._enter(stream, now_s)

    def over(self, stream_id: str, now_s: float) -> None:
        """The answer has ended; it can still be read. No effect when the stream is not known."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._release(stream)
        if stream.is_replicated and not stream.record.is_over:
            stream.record.is_over = True
            self._telling.tell(lambda n: StreamOver(self._frontend_id, n, stream_id), [], now_s)

    def drop(self, stream_id: str, now_s: float) -> None:
        """The stream is not kept any more; no effect when it is not known."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._release(stream)
        self._part(stream, now_s)
        del self._streams[stream_id]

    def _enter(self, stream: PacedStream, now_s: float) -> None:
        stream_id = stream.record.head.stream_id
        assert stream_id not in self._streams
        self._next_serial += 1
        self._streams[stream_id] = stream
        self._num_bytes += stream.record.num_bytes
        self._touched[stream_id] = stream
        if self._num_bytes > self._max_bytes:
            self._part(stream, now_s, "its record takes too much memory")
        else:
            self._send_whole(stream, now_s)

    # --------------------------------------------------------------------- engine requests

    def expect(self, stream_id: str, name: str, now_s: float, *, is_repeatable: bool) -> int | None:
        """vLLM's server begins an engine request of this name for the stream.

        Returns by what the request's own news are known, or None: it is not paced. So it is where
        it could not be run again: its outputs do not become events one by one, or another one has
        the name.
        """
        stream = self._streams.get(stream_id)
        if stream is None or not stream.is_paced:
            return None
        if not is_repeatable or name in self._by_name or name in stream.askers:
            stream.is_paced = False
            self._part(stream, now_s, "its events cannot be repeated")
            return None
        self._by_name[name] = stream
        stream.askers[name] = Asker.WORKS
        return stream.serial

    def on_begun(self, request_id: RequestId) -> Begun | None:
        """vLLM's server sends an engine request; None: it is not paced."""
        name, slot = client_id(request_id), slot_of(request_id)
        stream = self._by_name.get(name)
        if stream is None or slot in stream.slots:
            return None
        stream.slots[slot] = request_id
        self._by_request[request_id] = stream
        self._touch(stream)
        if not stream.is_behind:
            return Begun((), False)
        record = stream.record
        return Begun(record.token_ids(slot, self._payloads), record.has_ended(slot))

    def on_asked(self, name: str, serial: int) -> None:
        """vLLM's code waits for the next output of the engine request of this name; what it had
        has become events."""
        stream = self._of(name, serial)
        if stream is not None:
            stream.askers[name] = Asker.ASKS
            self._settle(stream, name)

    def on_taken(self, name: str, serial: int) -> None:
        """vLLM's code has got an output."""
        stream = self._of(name, serial)
        if stream is not None:
            stream.askers[name] = Asker.WORKS

    def on_left(self, name: str, serial: int) -> None:
        """vLLM's code wants no more of the engine request of this name."""
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
            if stream.pending == slot and stream.askers[name] is Asker.HANDED:
                # What it was handed came behind its end, and vanished.
                stream.askers[name] = Asker.ASKS
                self._settle(stream, name)

    def on_output(self, request_id: RequestId, payload: bytes, *, is_finished: bool) -> bool:
        """The engine request's next output is there; False: it is not paced."""
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
            number = self._telling.extend(group, payload)
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
        """Nothing of the stream is in vLLM's hands any more."""
        for name in stream.askers:
            if self._by_name.get(name) is stream:
                del self._by_name[name]
        for slot in stream.slots:
            self._close(stream, slot)
        stream.waiting.clear()
        stream.gathered.clear()
        stream.is_paced = False

    # --------------------------------------------------------------------------- the buddy

    def on_buddy(self, buddy: FrontendId | None, now_s: float) -> None:
        """This front end has the replicas from now on; the one before has died."""
        if buddy == self._telling.buddy:
            return
        self._telling.on_buddy(buddy)
        for stream in self._streams.values():
            if stream.is_replicated:
                self._send_whole(stream, now_s)
        self._touch_held()

    def on_kept(self, sender: FrontendId, number: int, now_s: float) -> None:
        """The buddy has all up to the message of this number."""
        if self._telling.on_kept(sender, number, now_s):
            self._touch_held()

    def _touch_held(self) -> None:
        self._touched.update(self._held)
        self._held.clear()

    def _send_whole(self, stream: PacedStream, now_s: float) -> None:
        record, own_id = stream.record, self._frontend_id
        groups = tuple(record.groups)
        number = self._telling.tell(
            lambda n: KeepStream(own_id, n, record.head, groups, record.is_over),
            [record.body, *record.payloads],
            now_s,
        )
        for each in stream.waiting:
            # Clients may know what was taken over.
            each.number = 0 if each.is_old else number

    def _part(self, stream: PacedStream, now_s: float, reason: str | None = None) -> None:
        """The stream has no replica any more."""
        if not stream.is_replicated:
            return
        stream.is_replicated = False
        stream_id = stream.record.head.stream_id
        self._num_bytes -= stream.record.num_bytes
        self._telling.tell(lambda n: DropStream(self._frontend_id, n, stream_id), [], now_s)
        for each in stream.waiting:
            each.number = 0
        if not stream.is_behind:
            stream.record = Record(stream.record.head, b"")
        if reason is not None:
            self._effects.append(Parted(stream_id, reason))

    # -------------------------------------------------------------------------- what is due

    def flush(self, now_s: float) -> list[PacingEffect]:
        """Return what is to be done after what has happened, in order."""
        while True:
            touched, self._touched = self._touched, {}
            for stream in touched.values():
                while stream.gathered and len(stream.waiting) < MAX_WAITING:
                    each = stream.gathered.pop(0)
                    self._let_wait(stream, each.slot, each.payload, each.is_finished)
                if self._num_bytes > self._max_bytes:
                    self._part(stream, now_s, "its record takes too much memory")
            messages, has_become_slow = self._telling.flush(now_s)
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
        # What was taken over comes before everything else.
        has_old = stream.waiting and stream.waiting[0].is_old
        if stream.is_running_again and not has_old:
            stream.is_running_again = False
            self._effects.append(RunAgain(stream.record.head.stream_id))
        if stream.gathered and not stream.waiting:
            # Those of a choice that takes no more have gone.
            self._touch(stream)

    def _due(self, stream: PacedStream) -> Iterator[PacingEffect]:
        """Hand vLLM's server the stream's next output, if it may have it."""
        while stream.waiting and stream.pending is None:
            first = stream.waiting[0]
            if first.slot in stream.closed:
                stream.waiting.popleft()
                continue
            if self._telling.is_waited_for(first.number):
                self._held[stream.record.head.stream_id] = stream
                return
            name, request_id = name_of_slot(first.slot), stream.slots.get(first.slot)
            if request_id is None or stream.askers.get(name) is not Asker.ASKS:
                return
            stream.waiting.popleft()
            stream.askers[name] = Asker.HANDED
            stream.pending = first.slot
            payload = first.payload
            if first.is_old:
                payload = self._payloads.renamed_output(payload, request_id)
            elif stream.is_behind:
                stream.is_behind = False
                yield CaughtUp(stream.record.head.stream_id)
            yield Hand(payload)
