"""Instances: the production core and an engine, interpreted in virtual time."""

from collections.abc import Sequence, Set

from fault_simulation.oracle.token_oracle import decode_ask
from fault_simulation.processes.actors import Actor
from fault_simulation.processes.held_leases import Guard
from fault_simulation.processes.world import World
from fault_simulation.virtual.timeline import Violation
from sterna.engine.cache_changes import CacheChanges
from sterna.instance.core import (
    AddToEngine,
    CallEngine,
    FrontendGone,
    InstanceEffect,
    OutgoingMigrationEnded,
    SetTerminating,
)
from sterna.messages.actors import (
    AbortRequests,
    HandedBack,
    HeartbeatAnswer,
    Membership,
    MigrationMessage,
    RequestsMoved,
    TokenBatch,
    TokenSpan,
    WireMessage,
)
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.migration.effect_queue import EffectQueue
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    CopyBlocks,
    CopyEvent,
    Drain,
    Effect,
    Ended,
    FreeReservation,
    Inspect,
    KeepPrefix,
    Outcome,
    Release,
    ReserveBlocks,
    Resume,
    Send,
    StopCopying,
)
from sterna.migration.source import SourceState
from sterna.scheduler.sessions import AHEAD
from sterna.types import (
    FrontendId,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    whose_prefix,
)

LAST_STAGE = (SourceState.DRAINING, SourceState.COMMITTING)


class InstanceProcess(Actor):
    """An instance: its core and an engine.

    Attributes:
        told_to_end: the requests of its engine that it was told to end.
        up_since_s: when it came up.
    """

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self.instance_id = InstanceId(name)
        self.core = world.cores.instance(self.instance_id, world.immovables.llumlet)
        reports_cache = world.policy.looks_at_prefixes
        if reports_cache:
            self.core.report_cache(world.kind.cache_layout)
        self.engine = world.cores.engine(
            self, self, world.timeline, world.rng, world.kind, reports_cache
        )
        world.copies.join(self.engine)
        self._effects = EffectQueue()
        self._guard: Guard | None = None
        self.told_to_end: set[RequestId] = set()
        # What it hands back to front ends that it does not know yet.
        self._kept_back: list[HandedBack] = []
        # Those that have left, of which a mailbox has refused the last news.
        self._untold: set[RequestId] = set()
        self.up_since_s = self.now_s
        self.engine.start()
        self._carry_out(self.core.on_tick(self.now_s))
        if world.nodes.is_away(name):
            self._guard = Guard(self, lambda: self.membership.supervisor)

    @property
    def membership(self) -> Membership:
        """The newest that it has heard of."""
        return self.core.membership

    @property
    def gone_frontends(self) -> Set[FrontendId]:
        """The front ends of whose death it has heard."""
        return self.core.gone_frontends

    def peers_at_the_last_stage(self) -> set[InstanceId]:
        """The destinations of requests that are, or are about to be, suspended."""
        sources = self.core.llumlet.coordinator.sources
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

    def send(self, address: str | None, message: WireMessage, frames: Sequence[bytes] = ()) -> bool:
        """Send, unless its lease has ended."""
        if self._guard is not None:
            self._guard.check()
        return super().send(address, message, frames)

    def on_unsent(self, address: str, message: WireMessage) -> None:
        match message:
            case TokenBatch(_, spans):
                self.world.ledger.on_tokens_unsent([each.request_id for each in spans])
                ended = [each.request_id for each in spans if each.is_finished]
                self.world.ledger.on_untold(ended)
                self._untold.update(ended)
            case RequestsMoved(_, request_ids):
                # Their first tokens here are taken for later ones.
                self.world.ledger.on_tokens_unsent(request_ids)
            case HandedBack(_, request_ids):
                self.world.ledger.on_untold(request_ids)
                self._untold.update(request_ids)
        self.core.on_unsent(address, message)

    def next_deadline_s(self) -> float | None:
        return self.core.next_deadline_s

    def on_time(self) -> None:
        self._carry_out(self.core.on_tick(self.now_s))

    def _carry_out(self, effects: Sequence[InstanceEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ToMailbox) and isinstance(effect.message, HandedBack):
                if effect.message in self._kept_back:
                    # Its front end has become known.
                    self._kept_back.remove(effect.message)
                else:
                    self._hand_back(effect.message)
        for message in self.core.kept_messages:
            if isinstance(message, HandedBack) and message not in self._kept_back:
                self._hand_back(message)
                self._kept_back.append(message)
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
                case OutgoingMigrationEnded(ended):
                    reason = "" if ended.aborted is None else f": {ended.aborted.value}"
                    what = "committed" if ended.aborted is None else "aborted"
                    self.world.counts[f"migration {what}{reason}"] += 1
                case FrontendGone() | CallEngine():
                    pass
                case _:
                    if self._effects.push(effect):
                        self._begin(effect)
        self.schedule_tick()

    def _hand_back(self, message: HandedBack) -> None:
        """Raises Violation: the instance is not being emptied, and its front end might know that
        the requests have left."""
        members = {each.instance_id: each for each in self.membership.instances}
        is_told_again = self._untold.issuperset(message.request_ids)
        if not (is_told_again or members[self.instance_id].is_terminating):
            raise Violation(f"{self.name} hands back {message.request_ids}, and is not emptied")
        self.world.counts["request handed back"] += 1
        self.world.ledger.on_handed_back(message.request_ids)

    # ------------------------------------------------------------------ effects of migrations

    def _begin(self, effect: Effect) -> None:
        engine = self.engine
        match effect:
            case Send(peer, message):
                self.send(self.core.address_of(peer), MigrationMessage(self.instance_id, message))
            case KeepPrefix(_, request_id):
                is_ahead = str(whose_prefix(request_id)).startswith(AHEAD)
                self.world.counts[f"prefix to be copied{' ahead' * is_ahead}"] += 1
                engine.keep_prefix(effect)
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
                if isinstance(effect, Adopt) and whose_prefix(effect.request_id) is not None:
                    self.world.counts["prefix copied"] += 1
                engine.carry_out(effect)

    def on_effect_done(self, migration_id: MigrationId, outcome: Outcome) -> None:
        self._carry_out(self.core.on_outcome(migration_id, outcome, self.now_s))
        for effect in self._effects.done(migration_id):
            self._begin(effect)

    # -------------------------------------------------------------------------- from the engine

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        self._carry_out(self.core.on_outputs(frontend_id, spans, payloads, self.now_s))

    def on_view(self, view: InstanceView) -> None:
        self._carry_out(self.core.on_view(view, self.now_s))

    def on_cache(self, changes: CacheChanges) -> None:
        self.core.on_cache(changes)

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        self.world.ledger.on_sent(request_id, self.instance_id)
        self._carry_out(self.core.on_adopted(frontend_id, request_id, first_index, self.now_s))

    def on_transfer(self, migration_id: MigrationId, event: CopyEvent) -> None:
        self._carry_out(self.core.on_outcome(migration_id, event, self.now_s))
