"""The streams of one front end that outlive it: the interpreter of `Pacing` and `Replicas`.

As `frontend.resumable.exchange` and `middleware`, over a server that makes one event of each
output: it asks for an output, is handed one, takes it, and asks again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from fault_simulation.oracle.replica_oracle import Confirmations, Given
from fault_simulation.oracle.stream_ledger import Excuse, Loss, StreamLedger
from fault_simulation.oracle.token_oracle import (
    Ask,
    Event,
    StreamPayloads,
    decode_ask,
    decode_output,
    encode,
    encode_event,
    encode_output,
)
from fault_simulation.processes.stream_readers import (
    NOT_FOUND,
    OK,
    OWNER,
    Connection,
    Reader,
    Reading,
)
from fault_simulation.processes.world import World
from fault_simulation.virtual.settings import REPLICA_TIMEOUT_S, WINDOW_S
from fault_simulation.virtual.timeline import Violation
from sterna.frontend.requests.request_ids import client_id
from sterna.frontend.resumable.event_log import EventId, EventLog, EventLogs
from sterna.frontend.resumable.pacing import CaughtUp, Hand, Replayed, ReplicaDropped
from sterna.frontend.resumable.replica_link import ToBuddy
from sterna.frontend.resumable.replicas import Record, buddy_of
from sterna.frontend.resumable.resume_validity import ResumeValidity, Validity
from sterna.messages.streams import ReplicaMessage, ReplicasKept, StreamHead, StreamMessage
from sterna.types import FrontendId, RequestId, earliest

MAX_BYTES = 1 << 30
PACE_S = 0.001
"""Mean time that the server takes for each thing that it does."""


class Host(Protocol):
    """The front end."""

    name: str
    world: World
    frontend_id: FrontendId

    @property
    def now_s(self) -> float:
        """The time of the world."""

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        """Let something happen to this process."""

    def begin_effect(self) -> None:
        """Die in place of the next effect, if the adversary wants that."""

    def schedule_tick(self) -> None:
        """Have `on_time` called when it is due."""

    def submit(self, ask: Ask, output_token_ids: tuple[int, ...]) -> None:
        """The server sends an engine request."""

    def abort(self, request_id: RequestId) -> None:
        """The server ends an engine request."""

    def send_to_frontend(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes]
    ) -> None:
        """Send, unless it is not there."""


@dataclass(slots=True, eq=False)
class Served:
    """A stream that is here.

    Attributes:
        record: that of a stream that was taken over and is over, until a client reads it.
        given: the events that were given out.
        followers: its readers, with the number of events that each has.
        waiting: readers that are not answered yet, with the last event that each has.
    """

    ask: Ask
    log: EventLog
    horizon: ResumeValidity
    given: Given
    record: Record | None = None
    serial: int = 0
    request_id: RequestId | None = None
    num_tokens: int = 0
    is_over: bool = False
    followers: dict[Reader, int] = field(default_factory=dict)
    waiting: dict[Reader, EventId] = field(default_factory=dict)

    @property
    def stream_id(self) -> str:
        """The id by which all front ends know it."""
        return self.ask.request_id


class FrontendStreams:
    """All streams of one front end."""

    def __init__(self, host: Host, ledger: StreamLedger) -> None:
        self._host = host
        self._world = host.world
        self._ledger = ledger
        self._frontend_id = own_id = host.frontend_id
        self.pacing = host.world.cores.pacing(
            own_id, MAX_BYTES, REPLICA_TIMEOUT_S, StreamPayloads()
        )
        self.replicas = host.world.cores.replicas(own_id)
        host.world.replicas[own_id] = self.replicas
        self.reading = Reading(own_id, self, host.send_to_frontend, host.later)
        self._logs = EventLogs(WINDOW_S, MAX_BYTES)
        self._served: dict[str, Served] = {}
        # Records of dead front ends, while they are neither a replica nor served.
        self._to_take_over: deque[Record] = deque()
        self._num_begun = 0
        self._connections: list[Connection] = []
        self._confirmations = Confirmations(host.world, own_id, self.pacing)

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, or None."""
        return earliest((self.pacing.next_deadline_s, self._logs.next_deadline_s()))

    def on_time(self) -> None:
        """Time has passed."""
        for stream_id in self._logs.expired(self._host.now_s):
            self._give_up(self._served.pop(stream_id))
        self.flush()

    def check_rest(self) -> None:
        """Check the streams after all have ended, and the time for clients to come back.

        Raises:
            Violation: something is left of them.
        """
        replicas = [each for records in self.replicas.records.values() for each in records]
        left = [*self._served, *replicas]
        if left or self.pacing.num_bytes or not self.reading.is_idle:
            raise Violation(f"{self._host.name} still has of streams: {left}")

    # ------------------------------------------------------------------------- its clients

    def connect(self, connection: Connection) -> None:
        """A client has connected, and is about to send a request."""
        self._connections = [each for each in self._connections if not each.is_closed]
        self._connections.append(connection)

    def begin(self, ask: Ask, connection: Connection) -> None:
        """A client's stream begins here."""
        log = self._logs.open(ask.request_id, OWNER)
        assert log is not None
        horizon, given = ResumeValidity(()), Given(ask.request_id)
        served = self._served[ask.request_id] = Served(ask, log, horizon, given)
        head = StreamHead(ask.request_id, OWNER, "/v1/completions", b"", (), 0)
        self.pacing.begin(head, encode(ask), self._host.now_s)
        self.flush()
        self._run(served)
        self.answer(ask.request_id, EventId(0), connection)

    def has(self, stream_id: str) -> bool:
        """See `Streams`."""
        return stream_id in self._served

    def has_replica(self, stream_id: str) -> bool:
        """See `Streams`."""
        return self.replicas.holder(stream_id, OWNER) is not None

    def answer(self, stream_id: str, last: EventId, reader: Reader) -> None:
        """See `Streams`."""
        served = self._served.get(stream_id)
        if served is None:
            reader.start(NOT_FOUND)
            return
        if served.record is not None:
            served.record = None
            self._run(served)
        served.waiting[reader] = last
        self._settle(served)

    def leave(self, reader: Reader) -> None:
        """See `Streams`."""
        for served in self._served.values():
            served.waiting.pop(reader, None)
            self._unfollow(served, reader)

    def _unfollow(self, served: Served, reader: Reader) -> None:
        if served.followers.pop(reader, None) is not None:
            self._logs.on_left(served.log, self._host.now_s)
            self._host.schedule_tick()

    def _settle(self, served: Served) -> None:
        """Answer the readers whose answer is known, and send them the events that there are."""
        num_events = len(served.log.events)
        for reader, last in list(served.waiting.items()):
            knowledge = served.horizon.of(last, num_events)
            if knowledge is None:
                continue
            del served.waiting[reader]
            if knowledge is Validity.VALID:
                self._ledger.on_read_on(served.stream_id)
                self._logs.on_follower(served.log)
                served.followers[reader] = last.number
                reader.start(OK)
            elif knowledge is Validity.LOST:
                reader.start(NOT_FOUND)
            else:
                raise Violation(f"{served.stream_id} has no event {last}, and its client has it")
        for reader, number in list(served.followers.items()):
            if number < num_events:
                served.followers[reader] = num_events
                reader.send(b"".join(served.log.events[number:]), is_last=False)
            if served.is_over and reader in served.followers:
                reader.send(b"", is_last=True)
                self._unfollow(served, reader)

    # ------------------------------------------------------------------------- the server

    def _run(self, served: Served) -> None:
        """Have the server answer the request."""
        stream_id = served.stream_id
        serial = self.pacing.expect(stream_id, stream_id, self._host.now_s, is_repeatable=True)
        if serial is None:
            raise Violation(f"{stream_id} is not paced")
        served.serial = serial
        self.flush()
        self._soon(served, "sends", self._send)
        self._soon(served, "asks", self._ask)

    def _soon(self, served: Served, what: str, action: Callable[[Served], None]) -> None:
        def act() -> None:
            if self._served.get(served.stream_id) is served:
                action(served)

        delay_s = self._world.rng.expovariate(1.0) * PACE_S
        self._host.later(delay_s, f"the server {what}", act)

    def _send(self, served: Served) -> None:
        self._num_begun += 1
        suffix = f"{self._frontend_id:04x}{self._num_begun:04x}"
        request_id = RequestId(f"{served.stream_id}-{suffix}")
        self.pacing.on_sent(served.stream_id, request_id)
        begun = self.pacing.on_begun(request_id)
        if begun is None:
            raise Violation(f"{request_id} is not paced")
        self.flush()
        if begun.has_ended:
            return
        served.request_id = request_id
        ask = structs.replace(served.ask, request_id=request_id, frontend_id=self._frontend_id)
        token_ids = begun.output_token_ids
        self._world.ledger.accept(ask, self._host.name, self._host.now_s, token_ids)
        self._host.submit(ask, token_ids)

    def _ask(self, served: Served) -> None:
        self.pacing.on_asked(served.stream_id, served.serial)
        self.flush()

    def _hand(self, payload: bytes) -> None:
        output = decode_output(payload)
        served = self._served[client_id(output.request_id)]
        self._confirmations.check(served.given, len(served.log.events) + 1)

        def take(served: Served) -> None:
            self.pacing.on_taken(served.stream_id, served.serial)
            served.num_tokens += len(output.token_ids)
            is_last = not output.token_ids or served.num_tokens == served.ask.output_tokens
            event = encode_event(Event(output.token_ids, output.digests, is_last))
            self._logs.feed(served.stream_id, b"data: " + event + b"\n\n")
            if is_last:
                self._soon(served, "ends", self._on_over)
            else:
                self._soon(served, "asks", self._ask)
            self._settle(served)

        self._soon(served, "takes", take)

    def _on_over(self, served: Served) -> None:
        self.pacing.on_left(served.stream_id, served.serial)
        served.is_over = True
        served.horizon.on_over(len(served.log.events), has_broken_off=False)
        self._logs.on_finished(served.stream_id, self._host.now_s)
        self.pacing.over(served.stream_id, self._host.now_s)
        self.flush()
        self._settle(served)

    def _give_up(self, served: Served) -> None:
        """No client has come back."""
        self.pacing.drop(served.stream_id, self._host.now_s)
        request_id = served.request_id
        if not served.is_over and request_id is not None:
            self._host.later(
                self._world.rng.expovariate(1.0) * PACE_S,
                f"the server ends {request_id}",
                lambda: self._host.abort(request_id),
            )

    def on_output(self, request_id: RequestId, payload: bytes, *, is_finished: bool) -> None:
        """An engine's output came; `flush` is to follow.

        Raises:
            Violation: it belongs to a stream, and is not paced.
        """
        is_paced = self.pacing.on_output(request_id, payload, is_finished=is_finished)
        if not is_paced and client_id(request_id) in self._served:
            raise Violation(f"an output of {request_id} is not paced")

    def on_failure(self, request_id: RequestId) -> None:
        """An engine request has failed; `flush` is to follow."""
        self._ledger.streams[client_id(request_id)].has_failed = True
        self.on_output(request_id, encode_output(request_id, [], []), is_finished=True)

    def flush(self) -> None:
        """Carry out what is due."""
        for effect in self.pacing.flush(self._host.now_s):
            self._host.begin_effect()
            match effect:
                case Hand(payload):
                    self._hand(payload)
                case ToBuddy(buddy, message, frames):
                    self._confirmations.on_sent(message.number)
                    self._host.send_to_frontend(buddy, message, frames)
                case Replayed():
                    self._world.counts["stream has come to its events again"] += 1
                case CaughtUp(stream_id, num_groups):
                    served = self._served[stream_id]
                    served.horizon.on_replayed(num_groups, len(served.log.events))
                    self._settle(served)
                case ReplicaDropped(stream_id, reason):
                    raise Violation(f"the replica of {stream_id} was dropped: {reason}")
        self._host.schedule_tick()

    # ---------------------------------------------------------------------- the other ones

    def on_message(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Another front end has sent this."""
        match message:
            case ReplicasKept(sender, number):
                self._confirmations.on_kept(sender, number)
                self.pacing.on_kept(sender, number, self._host.now_s)
                self.flush()
            case message if isinstance(message, ReplicaMessage):
                answer = self.replicas.on_message(message, frames)
                self._host.begin_effect()
                self._host.send_to_frontend(message.sender, answer, ())
            case _ if not self.replicas.is_dead(message.sender):
                self._host.begin_effect()
                self.reading.on_message(message, frames)

    def on_frontends(self, live: Sequence[FrontendId]) -> None:
        """These front ends live; others are dead for good."""
        buddy = buddy_of(self._frontend_id, live, self.pacing.buddy)
        if buddy != self.pacing.buddy:
            self._confirmations.on_other_buddy()
        self.pacing.on_buddy(buddy, self._host.now_s)
        self.flush()
        self._to_take_over.extend(self.replicas.on_frontends(live))
        if self._to_take_over:
            while self._to_take_over:
                self._take_over(self._to_take_over.popleft())
            self.reading.on_taken_over()
        self.reading.on_frontends(live)

    def _take_over(self, record: Record) -> None:
        stream_id, now_s = record.head.stream_id, self._host.now_s
        log = self._logs.open(stream_id, OWNER, self._frontend_id)
        if log is None:
            raise Violation(f"{self._host.name} takes {stream_id} over and has it already")
        self._world.counts["stream taken over"] += 1
        horizon, given = ResumeValidity(record.takeovers), Given(stream_id, len(record.groups))
        served = Served(decode_ask(record.body), log, horizon, given)
        self._served[stream_id] = served
        self._logs.on_unread(log, now_s)
        self.pacing.take_over(record, now_s)
        self.flush()
        if record.is_over:
            served.record = record
        else:
            self._run(served)

    # -------------------------------------------------------------------------- what is lost

    def on_death(self) -> None:
        """The front end has died."""
        for served in self._served.values():
            loss = self._confirmations.loss(served.given, len(served.log.events))
            self._ledger.on_loss(served.stream_id, loss)
        for holder, records in self.replicas.records.items():
            if not self._world.processes[f"f{holder}"].is_alive:
                for stream_id in records:
                    self._ledger.on_loss(stream_id, Loss(None, Excuse.BUDDY_DIED))
        for record in self._to_take_over:
            self._ledger.on_loss(record.head.stream_id, Loss(None, Excuse.BUDDY_DIED))
        for connection in self._connections:
            if connection.is_new and not connection.is_closed and not connection.has_started:
                self._ledger.on_loss(connection.stream_id, Loss(None, Excuse.UNSAID))
            connection.break_off()
