"""The actors but the supervisor: production cores, interpreted in virtual time."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sterna.frontend.core import RequestMessage
from sterna.frontend.effects import Deliver, Fail, Failure, SendAgain, ToInstance, ToScheduler
from sterna.frontend.effects import Effect as FrontendEffect
from sterna.frontend.names import client_id
from sterna.hostile.answers import Ask, decode_ask, decode_output, encode, encode_output
from sterna.hostile.leases import Guard
from sterna.hostile.settings import ENGINE, FRONTEND, LLUMLET, POLICY
from sterna.hostile.streams import FrontendStreams
from sterna.hostile.timeline import Crashed, Process
from sterna.hostile.violations import Violation
from sterna.hostile.world import World
from sterna.instance_core import (
    AddToEngine,
    CallEngine,
    FrontendGone,
    InstanceEffect,
    MovedOut,
    SetTerminating,
)
from sterna.messages import (
    AbortRequests,
    AddRequest,
    DispatchRequest,
    HeartbeatAnswer,
    Membership,
    MigrationMessage,
    TokenBatch,
    TokenSpan,
    WireMessage,
)
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    CopyBlocks,
    Drain,
    Effect,
    Ended,
    Event,
    FreeReservation,
    Inspect,
    Release,
    ReserveBlocks,
    Resume,
    Send,
    StopCopying,
)
from sterna.migration.source import SourceState
from sterna.sending import KeepOnly, ToMailbox, Unexpected
from sterna.stream_messages import StreamMessage
from sterna.types import FrontendId, InstanceId, InstanceView, MigrationId, RequestId

LAST_STAGE = (SourceState.DRAINING, SourceState.COMMITTING)


class Actor(Process, ABC):
    """A process with a mailbox, effects and one timer."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        self.world = world
        self._tick_s: float | None = None
        world.network.join(self, self.receive)

    @abstractmethod
    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        """A message has arrived."""

    @abstractmethod
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, or None."""

    @abstractmethod
    def on_time(self) -> None:
        """Time has passed."""

    @property
    def now_s(self) -> float:
        """The time of the world."""
        return self.world.timeline.now_s

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        """Let something happen to this process."""
        self.world.timeline.push(delay_s, self, what, action)

    def send(self, address: str | None, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        """Send, unless nobody is there to send to."""
        if address is not None:
            self.world.network.send(self, address, message, frames)

    def begin_effect(self) -> None:
        """Die in place of the next effect, if that was decided.

        Raises:
            Crashed: it has been.
        """
        if self.crash_after is not None:
            if self.crash_after == 0:
                raise Crashed(self)
            self.crash_after -= 1

    def schedule_tick(self) -> None:
        """See to it that `on_time` is called when it is due; earlier is no harm."""
        deadline_s = self.next_deadline_s()
        if deadline_s is None or (self._tick_s is not None and self._tick_s <= deadline_s):
            return
        self._tick_s = deadline_s
        self.world.timeline.push_at(deadline_s, self, "time", lambda: self._tick(deadline_s))

    def _tick(self, set_for_s: float) -> None:
        if self._tick_s != set_for_s:
            return  # An earlier one has been set since.
        self._tick_s = None
        deadline_s = self.next_deadline_s()
        if deadline_s is not None and deadline_s <= self.now_s:
            self.on_time()
        self.schedule_tick()


class InstanceProcess(Actor):
    """An instance: its core and an engine.

    Attributes:
        told_to_end: of the requests that its engine has, those that somebody has told it to end.
    """

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self.instance_id = InstanceId(name)
        self.core = world.cores.instance(self.instance_id, LLUMLET)
        self.engine = world.cores.engine(self, self, world.timeline, world.rng)
        world.copies.join(self.engine)
        # Effects of one migration wait for each other's outcomes, as in `runtime.effects`.
        self._waiting: dict[MigrationId, deque[Effect]] = {}
        self._guard: Guard | None = None
        self.told_to_end: set[RequestId] = set()
        self.engine.start()
        self._carry_out(self.core.on_tick(self.now_s))
        if world.nodes.is_away(name):
            self._guard = Guard(self)

    @property
    def membership(self) -> Membership:
        """The newest that it has heard of."""
        return self.core.membership

    @property
    def gone_frontends(self) -> set[FrontendId]:
        """The front ends of whose death it has heard."""
        return self.core._gone_frontends

    def peers_at_the_last_stage(self) -> set[InstanceId]:
        """To whom requests are leaving that are, or are about to be, suspended."""
        sources = self.core._llumlet._coordinator._sources.values()
        return {each.peer for each in sources if each.state in LAST_STAGE}

    @property
    def may_act(self) -> bool:
        """Whether it acts on others: not when it is dead, nor when its lease has ended."""
        return self.is_alive and not (self._guard is not None and self._guard.has_ended)

    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        if isinstance(message, HeartbeatAnswer):
            if self._guard is not None:
                self._guard.on_answer(message)
            return
        if isinstance(message, AbortRequests):
            here = {each.request_id for each in self.engine.core.requests()}
            self.told_to_end |= here.intersection(message.request_ids)
        self._carry_out(self.core.on_message(message, frames, self.now_s))

    def send(self, address: str | None, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        """Send, unless its lease has ended."""
        if self._guard is not None:
            self._guard.check()
        super().send(address, message, frames)

    def next_deadline_s(self) -> float | None:
        return self.core.next_deadline_s

    def on_time(self) -> None:
        self._carry_out(self.core.on_tick(self.now_s))

    def _carry_out(self, effects: Iterable[InstanceEffect]) -> None:
        for effect in effects:
            self.begin_effect()
            match effect:
                case ToMailbox(address, message, frames):
                    self.send(address, message, frames)
                case KeepOnly(addresses):
                    self.world.network.keep_only(self, addresses)
                case AddToEngine(_, message, frames):
                    self.engine.add(decode_ask(frames[0]), message.output_token_ids)
                case SetTerminating(is_terminating):
                    self.engine.set_terminating(is_terminating)
                case Unexpected(message):
                    raise Violation(f"{self.name} got what is not for an instance: {message}")
                case MovedOut(ended):
                    reason = "" if ended.aborted is None else f": {ended.aborted.value}"
                    what = "committed" if ended.aborted is None else "aborted"
                    self.world.counts[f"migration {what}{reason}"] += 1
                case FrontendGone() | CallEngine():
                    pass
                case _:
                    self._run(effect)
        self.schedule_tick()

    # ------------------------------------------------------------------ effects of migrations

    def _run(self, effect: Effect) -> None:
        migration_id = _migration_id(effect)
        waiting = None if migration_id is None else self._waiting.get(migration_id)
        if waiting is not None:
            waiting.append(effect)
        elif self._begin(effect) and migration_id is not None:
            self._waiting[migration_id] = deque()

    def _begin(self, effect: Effect) -> bool:
        """Carry the effect out; returns whether an outcome is to come."""
        engine = self.engine
        match effect:
            case Send(peer, message):
                self.send(self.core.address_of(peer), MigrationMessage(self.instance_id, message))
            case CopyBlocks():
                self.world.copies.begin(self, self.engine, effect)
            case StopCopying(migration_id):
                self.world.copies.stop(self.instance_id, migration_id)
            case Resume(_, request_id):
                engine.resume(request_id)
            case Release(_, request_id) | AbortDrained(_, request_id):
                if isinstance(effect, AbortDrained):
                    self.world.ledger.on_engine_abort(request_id)
                engine.release(request_id)
            case AbortRequest(request_id):
                self.world.ledger.on_engine_abort(request_id)
                engine.abort(request_id)
            case Ended(migration_id):
                engine.forget_migration(migration_id)
            case Inspect() | Drain() | ReserveBlocks() | FreeReservation() | Adopt():
                engine.carry_out(effect)
                return True
        return False

    def on_effect_done(self, migration_id: MigrationId, event: Event) -> None:
        self._carry_out(self.core.on_outcome(migration_id, event, self.now_s))
        waiting = self._waiting[migration_id]
        while waiting:
            if self._begin(waiting.popleft()):
                return
        del self._waiting[migration_id]

    # -------------------------------------------------------------------------- from the engine

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        self._carry_out(self.core.on_outputs(frontend_id, spans, payloads, self.now_s))

    def on_view(self, view: InstanceView) -> None:
        self._carry_out(self.core.on_view(view, self.now_s))

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        self.world.ledger.on_sent(request_id, self.instance_id)
        self._carry_out(self.core.on_adopted(frontend_id, request_id, first_index, self.now_s))

    def on_transfer(self, migration_id: MigrationId, event: Event) -> None:
        self._carry_out(self.core.on_outcome(migration_id, event, self.now_s))


class SchedulerProcess(Actor):
    """The scheduler."""

    def __init__(self, name: str, world: World, number: int) -> None:
        super().__init__(name, world)
        self.number = number
        self.core = world.cores.scheduler(
            POLICY,
            now_s=self.now_s,
            scaling=world.scaling,
            first_dispatch_number=int(self.now_s * 1e6) + 1,
        )
        self.schedule_tick()

    @property
    def membership(self) -> Membership:
        """The newest that it has heard of."""
        return self.core.membership

    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        self._carry_out(self.core.on_message(message, self.now_s))

    def next_deadline_s(self) -> float | None:
        return self.core.next_deadline_s

    def on_time(self) -> None:
        self._carry_out(self.core.on_tick(self.now_s))

    def _carry_out(self, effects: Iterable[object]) -> None:
        for effect in effects:
            self.begin_effect()
            match effect:
                case ToMailbox(address, message):
                    self.send(address, message)
                case KeepOnly(addresses):
                    self.world.network.keep_only(self, addresses)
                case Unexpected(message):
                    raise Violation(f"{self.name} got what is not for a scheduler: {message}")
        self.schedule_tick()


class FrontendProcess(Actor):
    """A front end, with its clients behind it."""

    def __init__(self, name: str, world: World, frontend_id: FrontendId) -> None:
        super().__init__(name, world)
        self.frontend_id = frontend_id
        self.core = world.cores.frontend(frontend_id, FRONTEND)
        self.membership = Membership(-1, (), (), None)
        self._addresses: dict[InstanceId, str] = {}
        self._frontends: dict[FrontendId, str] = {}
        self.streams: FrontendStreams | None = None
        if world.streams is not None:
            self.streams = FrontendStreams(self, world.streams)

    @property
    def is_served(self) -> bool:
        """Whether it knows of an instance."""
        return bool(self._addresses)

    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        if isinstance(message, Membership) and not self._on_membership(message):
            return
        if isinstance(message, RequestMessage):
            unawaited = self._unawaited(message)
            effects = self.core.on_message(message, frames, self.now_s)
            self._check_told(unawaited, effects)
            self._carry_out(effects)
        if self.streams is not None:
            if isinstance(message, Membership):
                self.streams.on_frontends([each.frontend_id for each in message.frontends])
            elif isinstance(message, StreamMessage):
                self.streams.on_message(message, frames)

    def _unawaited(self, message: RequestMessage) -> set[tuple[InstanceId, RequestId]]:
        """The attempts of which these are tokens, that go on, and for which no client waits."""
        if not isinstance(message, TokenBatch):
            return set()
        going_on = {each.request_id for each in message.spans if not each.is_finished}
        is_awaited = self.world.ledger.is_awaited
        return {(message.instance_id, each) for each in going_on if not is_awaited(each)}

    def _check_told(
        self,
        unawaited: set[tuple[InstanceId, RequestId]],
        effects: Iterable[FrontendEffect],
    ) -> None:
        """Whoever steps what no client waits for is told to end it.

        Raises:
            Violation: it is not.
        """
        for effect in effects:
            match effect:
                case ToInstance(instance_id, AbortRequests(request_ids)):
                    unawaited = unawaited - {(instance_id, each) for each in request_ids}
        if unawaited:
            instance_id, attempt_id = min(unawaited)
            raise Violation(
                f"{instance_id} steps {attempt_id}, for which nobody waits, and {self.name} does "
                "not tell it to end it"
            )

    def _on_membership(self, membership: Membership) -> bool:
        """As `frontend.peers`: returns whether it is news."""
        if membership.version <= self.membership.version:
            return False
        self.membership = membership
        self._addresses = {each.instance_id: each.address for each in membership.instances}
        self._frontends = {each.frontend_id: each.address for each in membership.frontends}
        others = (membership.scheduler, membership.supervisor)
        addresses = {
            *self._addresses.values(),
            *self._frontends.values(),
            *(each for each in others if each is not None),
        }
        self.world.network.keep_only(self, frozenset(addresses))
        return True

    def next_deadline_s(self) -> float | None:
        if self.streams is None:
            return self.core.next_deadline_s
        deadlines_s = (self.core.next_deadline_s, self.streams.next_deadline_s)
        return min((each for each in deadlines_s if each is not None), default=None)

    def on_time(self) -> None:
        self._carry_out(self.core.on_time(self.now_s), is_by_time=True)
        if self.streams is not None:
            self.streams.on_time()

    # ------------------------------------------------------------------------------- clients

    def on_client(self, ask: Ask) -> None:
        """A client's request is accepted."""
        self.submit(ask, ())

    def submit(self, ask: Ask, output_token_ids: tuple[int, ...]) -> None:
        """Have the request generated behind the tokens that its client has."""
        size = ENGINE.block_size
        question = DispatchRequest(
            frontend_id=self.frontend_id,
            request_id=ask.request_id,
            demand_tokens=-(-ask.prompt_tokens // size) * size,
            arrival_s=ask.arrival_s,
            scheduling_priority=ask.priority,
            execution_priority=ask.priority,
        )
        effects = self.core.on_request(question, encode(ask), self.now_s, output_token_ids)
        self._carry_out(effects)

    def on_client_gone(self, request_id: RequestId) -> None:
        """A client aborts its request, if that has not ended."""
        if self.world.streams is not None:
            self.world.streams.streams[client_id(request_id)].leave()
        else:
            self.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        """Have the request end, if it has not."""
        if self.world.ledger.on_client_gone(request_id):
            self._carry_out(self.core.on_abort([request_id], self.now_s))

    def _carry_out(self, effects: Sequence[FrontendEffect], *, is_by_time: bool = False) -> None:
        failures = [each for each in effects if isinstance(each, Fail)]
        self.world.ledger.on_judgement(
            [each.request_id for each in failures if each.failure is Failure.KILLED_INSTANCES]
        )
        for effect in effects:
            self.begin_effect()
            match effect:
                case ToScheduler(message):
                    self.send(self.membership.scheduler, message)
                case ToInstance(instance_id, message, payload):
                    frames = () if payload is None else (payload,)
                    if isinstance(message, AddRequest):
                        self.world.ledger.on_sent(message.request_id, instance_id)
                    self.send(self._addresses.get(instance_id), message, frames)
                case Deliver(request_id, payload, num_repeated, is_finished):
                    output = decode_output(payload)
                    token_ids = output.token_ids[num_repeated:]
                    digests = output.digests[num_repeated:]
                    self.world.ledger.on_tokens(
                        request_id, token_ids, digests, is_finished=is_finished
                    )
                    if self.streams is not None:
                        payload = encode_output(request_id, token_ids, digests)
                        self.streams.on_output(request_id, payload, is_finished=is_finished)
                case SendAgain(request_id, attempt_id, num_tokens):
                    self.world.counts["request sent again"] += 1
                    self.world.ledger.on_sent_again(
                        request_id, attempt_id, num_tokens, is_by_time=is_by_time
                    )
                case Fail(request_id, failure):
                    self.world.counts[f"request failed: {failure.value}"] += 1
                    self.world.ledger.on_failure(request_id, failure)
                    if self.streams is not None:
                        self.streams.on_failure(request_id)
        if self.streams is not None:
            self.streams.flush()
        self.schedule_tick()

    def send_to_frontend(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes]
    ) -> None:
        """Send, unless the other one is gone, or not heard of yet."""
        self.send(self._frontends.get(frontend_id), message, frames)


def _migration_id(effect: Effect) -> MigrationId | None:
    if isinstance(effect, Send):
        return effect.message.migration_id
    if isinstance(effect, AbortRequest):
        return None
    return effect.migration_id
