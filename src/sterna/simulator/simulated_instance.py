"""One instance of the simulated cluster: the production llumlet over an emulated engine.

It carries out the llumlet's effects in virtual time, as `instance.effect_runner` does on a real
engine: effects on the engine between two steps.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol, assert_never

from sterna.config import LlumletConfig
from sterna.engine.drains import Left
from sterna.engine.emulated import outcomes
from sterna.instance.llumlet import ForwardAbort, Llumlet, LlumletEffect, PrefixCopied, Report
from sterna.migration.effect_queue import EffectQueue
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    Adopted,
    CopyBlocks,
    Drain,
    Effect,
    EffectWithOutcome,
    Ended,
    Event,
    FreeReservation,
    Inspect,
    KeepPrefix,
    Message,
    Outcome,
    Release,
    ReservationFreed,
    ReserveBlocks,
    Resume,
    Send,
    StageReceived,
    StopCopying,
)
from sterna.simulator.engines import Engines, index_of
from sterna.types import InstanceId, MigrationId, RequestId, whose_prefix

EngineEffect = EffectWithOutcome | KeepPrefix | Resume | Release | AbortDrained
"""Effects that the engine carries out between two of its steps."""

IMPOSSIBLE = (Report, ForwardAbort, AbortRequest)
"""Effects that cannot occur in a simulation: no client aborts, and the simulation reads the loads
itself."""


class Environment(Protocol):
    """Interface of an instance to the rest of the simulated cluster."""

    def send(self, sender: InstanceId, peer: InstanceId, message: Message, now_s: float) -> None:
        """Deliver the message to the peer's llumlet, later."""

    def begin_copy(self, source: InstanceId, effect: CopyBlocks, now_s: float) -> None:
        """Copy blocks to the migration's destination, and notify it of the end."""

    def stop_copy(self, migration_id: MigrationId, now_s: float) -> None:
        """Drop the migration's copy, if there is one."""

    def on_drained(self, migration_id: MigrationId, now_s: float) -> None:
        """A running request has left its batch; its downtime begins."""

    def on_adopted(self, migration_id: MigrationId, now_s: float) -> None:
        """The request runs or queues on its destination from the next step on."""

    def on_ended(self, ended: Ended) -> None:
        """A migration is over for one of its sides."""

    def on_prefix_done(self, request_id: RequestId, now_s: float) -> None:
        """The request's prefix has been copied, or will not be."""

    def on_activity(self, instance: "SimulatedInstance", now_s: float) -> None:
        """The instance has handled an event and carried out the effects."""


class SimulatedInstance:
    """Shell of one llumlet and its engine."""

    def __init__(
        self,
        instance_id: InstanceId,
        row: int,
        config: LlumletConfig,
        engines: Engines,
        environment: Environment,
    ) -> None:
        self.instance_id = instance_id
        self.row = row
        self.llumlet = Llumlet(instance_id, config)
        self.is_terminating = False
        self.is_between_steps = False
        # The last numbers of migrations in flight from here and to here.
        self.num_migrating = (0, 0)
        self._engines = engines
        self._environment = environment
        self._commands: deque[EngineEffect] = deque()
        self._effects = EffectQueue()
        # The stage whose blocks each incoming migration waits for.
        self._expected: dict[MigrationId, int] = {}

    @property
    def has_commands(self) -> bool:
        """Whether an effect waits for the end of the engine's step."""
        return bool(self._commands)

    # ------------------------------------------------------------------------------- events

    def on_destination(self, destination: InstanceId | None, now_s: float) -> None:
        """The global scheduler has set or unset the destination."""
        self._carry_out(self.llumlet.on_destination(destination, now_s), now_s)
        self._environment.on_activity(self, now_s)

    def on_copy_prefix(
        self, request_id: RequestId, destination: InstanceId, first_token: int, now_s: float
    ) -> None:
        """The global scheduler has a prefix copied."""
        # The engines know the contents of each request of the trace.
        effects = self.llumlet.on_copy_prefix(request_id, destination, b"", first_token, now_s)
        self._carry_out(effects, now_s)
        self._environment.on_activity(self, now_s)

    def on_message(self, sender: InstanceId, message: Message, now_s: float) -> None:
        """A message of another llumlet arrived."""
        self._carry_out(self.llumlet.on_message(sender, message, now_s), now_s)
        self._environment.on_activity(self, now_s)

    def on_stage_copied(self, migration_id: MigrationId, stage: int, now_s: float) -> None:
        """The blocks of a stage have arrived; the migration may have ended before."""
        if self._expected.get(migration_id) == stage:
            del self._expected[migration_id]
            self._on_outcome(migration_id, StageReceived(stage), now_s)
            self._environment.on_activity(self, now_s)

    def on_tick(self, now_s: float) -> None:
        """A deadline of the llumlet has come."""
        self._carry_out(self.llumlet.on_tick(now_s), now_s)
        self._environment.on_activity(self, now_s)

    def on_peer_gone(self, peer: InstanceId, now_s: float) -> None:
        """Another instance has ended."""
        self._carry_out(self.llumlet.on_peer_dead(peer, now_s), now_s)
        self._environment.on_activity(self, now_s)

    def set_terminating(self, now_s: float) -> None:
        """The instance is to be emptied."""
        self.is_terminating = True
        self.llumlet.set_terminating(True, now_s)
        self._engines.set_terminating(self.row)

    def run_commands(self, now_s: float) -> None:
        """The engine is between two steps: carry out the effects that wait for that."""
        if not self._commands:
            return
        self.is_between_steps = True
        while self._commands:
            self._finish(self._commands.popleft(), now_s)
        self._environment.on_activity(self, now_s)
        self.is_between_steps = False

    # ------------------------------------------------------------------------------ effects

    def _finish(self, effect: EngineEffect, now_s: float) -> None:
        """Carry out an effect on the engine, and begin those that waited for its outcome."""
        outcome = self._execute(effect, now_s)
        if outcome is not None:
            self._on_outcome(effect.migration_id, outcome, now_s)
            for each in self._effects.done(effect.migration_id):
                self._begin(each, now_s)

    def _on_outcome(self, migration_id: MigrationId, event: Event, now_s: float) -> None:
        self._carry_out(self.llumlet.on_outcome(migration_id, event, now_s), now_s)

    def _carry_out(self, effects: Iterable[LlumletEffect], now_s: float) -> None:
        self._run(effects, now_s)
        # A real llumlet gets a view after every step; here it gets one when it needs it.
        if self.llumlet.wants_view:
            view = self._engines.view(self.row, now_s)
            self._run(self.llumlet.on_look(view, now_s), now_s)

    def _run(self, effects: Iterable[LlumletEffect], now_s: float) -> None:
        """Carry the effects out, each after all earlier ones of its migration."""
        for effect in effects:
            assert not isinstance(effect, IMPOSSIBLE), f"a simulation has no {effect}"
            if isinstance(effect, PrefixCopied):
                self._environment.on_prefix_done(effect.request_id, now_s)
                continue
            if self._effects.push(effect):
                self._begin(effect, now_s)

    def _begin(self, effect: Effect, now_s: float) -> None:
        match effect:
            case Send(peer, message):
                self._environment.send(self.instance_id, peer, message, now_s)
            case CopyBlocks():
                self._environment.begin_copy(self.instance_id, effect, now_s)
            case StopCopying(migration_id):
                self._environment.stop_copy(migration_id, now_s)
            case Ended():
                self._environment.on_ended(effect)
            case Drain(_, request_id) if whose_prefix(request_id) is not None:
                # A kept prefix is in no step.
                self._finish(effect, now_s)
            case (
                Inspect()
                | Drain()
                | Resume()
                | Release()
                | AbortDrained()
                | ReserveBlocks()
                | FreeReservation()
                | Adopt()
                | KeepPrefix()
            ):
                self._commands.append(effect)
            case AbortRequest():
                raise AssertionError(f"a simulation has no {effect}")
            case _:
                assert_never(effect)

    def _execute(self, effect: EngineEffect, now_s: float) -> Outcome | None:
        """Carry out an effect on the engine; returns its outcome, if it has one."""
        core = self._engines.core(self.row)
        match effect:
            case KeepPrefix(_, request_id, _, first_token):
                self._engines.keep_prefix(self.row, request_id, first_token)
            case Inspect(_, request_id):
                return outcomes.inspect(core, request_id, _encode)
            case Drain():
                outcome = core.begin_drain(effect)
                is_prefix = whose_prefix(effect.request_id) is not None
                if isinstance(outcome, Left) and not outcome.was_queuing and not is_prefix:
                    self._environment.on_drained(effect.migration_id, now_s)
                return outcomes.drained(effect, outcome, self._export)
            case Resume(_, request_id):
                core.resume(request_id)
            case Release(_, request_id) | AbortDrained(_, request_id):
                core.release(request_id)
            case ReserveBlocks():
                return outcomes.reserve(core, effect, self._expect)
            case FreeReservation(migration_id):
                self._expected.pop(migration_id, None)
                core.free_reservation(migration_id)
                return ReservationFreed()
            case Adopt(migration_id, request_id, num_blocks, state):
                self._expected.pop(migration_id, None)
                index = index_of(request_id)
                if whose_prefix(request_id) is not None:
                    self._engines.adopt_prefix(self.row, migration_id, index, state, num_blocks)
                    return Adopted()
                self._engines.adopt(self.row, migration_id, index, state, num_blocks)
                self._environment.on_adopted(migration_id, now_s)
                return Adopted()
            case _:
                assert_never(effect)
        return None

    def _export(self, request_id: RequestId) -> bytes:
        if whose_prefix(request_id) is not None:
            return self._engines.export_prefix(self.row, request_id)
        return self._engines.export(self.row, index_of(request_id))

    def _expect(self, effect: ReserveBlocks) -> tuple[str, ...]:
        if effect.num_blocks > 0:
            self._expected[effect.migration_id] = effect.stage
        return (str(self.instance_id),)

    def on_request_admitted(self, request_id: RequestId, dispatch_number: int) -> None:
        """A dispatched request has reached the engine's queue."""
        self.llumlet.on_request_arrived(request_id)
        self.llumlet.on_request_admitted(dispatch_number)


def _encode(request_id: RequestId) -> bytes:
    """A request has nothing but what the trace says of it."""
    return b""
