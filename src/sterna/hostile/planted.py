"""Mistakes planted on purpose, to show that the simulator finds them.

Some are mistakes of earlier implementations of the paper; the others leave out one step of our own
arguments. Each replaces a class whose code decides; production code knows nothing of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sterna.config import LlumletConfig
from sterna.errors import ProtocolError
from sterna.frontend.core import FrontendCore
from sterna.frontend.dispatch import Dispatcher
from sterna.frontend.effects import Deliver
from sterna.frontend.effects import Effect as FrontendEffect
from sterna.frontend.streams import Streams
from sterna.hostile.answers import EMPTY
from sterna.hostile.engine import HostileEngine
from sterna.hostile.world import Cores
from sterna.instance_core import InstanceCore, InstanceEffect
from sterna.llumlet import Llumlet, LlumletEffect
from sterna.messages import Emptied, Membership, WireMessage
from sterna.migration.coordinator import MigrationCoordinator
from sterna.migration.destination import DestinationState, MigrationDestination
from sterna.migration.messages import (
    AbortDrained,
    Adopt,
    Adopted,
    AdoptFailed,
    Commit,
    Drain,
    Drained,
    DrainRefused,
    Effect,
    Event,
    FreeReservation,
    Inspected,
    Reason,
    Received,
    Release,
    Reserve,
    Resume,
    Send,
    Tick,
)
from sterna.migration.source import MigrationSource, SourceState
from sterna.supervisor_core import SupervisorCore, SupervisorEffect
from sterna.types import FrontendId, InstanceId, MigrationId, RequestId


@dataclass(frozen=True, slots=True)
class Mistake:
    """A planted mistake.

    Attributes:
        name: what is wrong, in words.
    """

    name: str
    cores: Cores


# ---------------------------------------------------------------------------- effects left out


class _Without(InstanceCore):
    """Does not carry out some effects."""

    left_out: tuple[type, ...] = ()

    def _translate(self, effects: Iterable[LlumletEffect], now_s: float) -> list[InstanceEffect]:
        kept = [each for each in effects if not isinstance(each, self.left_out)]
        return super()._translate(kept, now_s)


class FreesFirst(InstanceCore):
    """Frees the source's blocks before the last stage was sent."""

    def _translate(self, effects: Iterable[LlumletEffect], now_s: float) -> list[InstanceEffect]:
        changed: list[LlumletEffect] = []
        for effect in effects:
            match effect:
                case Send(_, Commit(migration_id=migration_id, request_id=request_id)):
                    changed += [Release(migration_id, request_id), effect]
                case Release() | Resume() | AbortDrained():
                    pass
                case _:
                    changed.append(effect)
        return super()._translate(changed, now_s)


class NeverFreesReservations(_Without):
    left_out = (FreeReservation,)


class NeverResumes(_Without):
    left_out = (Resume,)


class NeverReleases(_Without):
    left_out = (Release,)


class SaysEmptiedTooSoon(InstanceCore):
    """Does not wait for the front ends' farewells."""

    def _tell_if_emptied(self) -> list[InstanceEffect]:
        for frontend_id in self._frontends:
            self._emptying.on_farewell(frontend_id, self._own_emptying())
        return super()._tell_if_emptied()

    def _own_emptying(self) -> int:
        for each in self._membership.instances:
            if each.instance_id == self._instance_id:
                return each.emptied_since
        return 0


class ForgetsUnknownFrontends(InstanceCore):
    """Drops what is for a front end that it does not know yet."""

    def _to_frontend(
        self, frontend_id: FrontendId, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> list[InstanceEffect]:
        if frontend_id not in self._frontends:
            return []
        return super()._to_frontend(frontend_id, message, frames)


# ------------------------------------------------------------------------------------- machines


class _WithMachines(InstanceCore):
    """Runs migrations by other machines."""

    source: type[MigrationSource] = MigrationSource
    destination: type[MigrationDestination] = MigrationDestination

    def _new_llumlet(self, config: LlumletConfig) -> Llumlet:
        llumlet = super()._new_llumlet(config)
        coordinator = _Coordinator(
            self._instance_id, config.migration, config.policy.num_concurrent_migrations
        )
        coordinator.source, coordinator.destination = self.source, self.destination
        llumlet._coordinator = coordinator
        return llumlet


class _Coordinator(MigrationCoordinator):
    source: type[MigrationSource]
    destination: type[MigrationDestination]

    def _new_source(self, migration_id: Any, request_id: Any, peer: Any, mode: Any) -> Any:
        return self.source(migration_id, request_id, peer, mode, self._config)

    def _new_destination(
        self, migration_id: Any, request_id: Any, source: Any, reservation: Any
    ) -> Any:
        return self.destination(migration_id, request_id, source, reservation, self._config)

    def on_outcome(self, migration_id: MigrationId, event: Event, now_s: float) -> list[Effect]:
        try:
            return super().on_outcome(migration_id, event, now_s)
        except ProtocolError:
            # What such a mistake leads to is to be found, not the mistake's own complaint.
            return []


class _Impatient(MigrationSource):
    def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
        if isinstance(event, Tick):
            return self._keep_drained(Reason.PEER_SILENT)
        return super()._until_verdict(event, now_s)


class ResumesOnTimeOut(_WithMachines):
    source = _Impatient


class _EndsWhileDraining(MigrationSource):
    def _undo(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
        return self._abort(reason, is_peer_told=is_peer_told)


class DoesNotAwaitDrains(_WithMachines):
    source = _EndsWhileDraining


class _NeverAsks(MigrationSource):
    @property
    def next_deadline_s(self) -> float | None:
        return None if self.state is SourceState.COMMITTING else super().next_deadline_s

    def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
        return [] if isinstance(event, Tick) else super()._until_verdict(event, now_s)


class _NeverRepeats(MigrationDestination):
    @property
    def next_deadline_s(self) -> float | None:
        is_committed = self.state is DestinationState.COMMITTED
        return None if is_committed else super().next_deadline_s

    def _until_released(self, event: Event, now_s: float) -> list[Effect]:
        return [] if isinstance(event, Tick) else super()._until_released(event, now_s)


class NeverAsksForTheVerdict(_WithMachines):
    source = _NeverAsks
    destination = _NeverRepeats


class _Forgetful(MigrationDestination):
    @property
    def is_over(self) -> bool:
        return self.is_settled


class ForgetsThatItAdopted(_WithMachines):
    destination = _Forgetful


class _Hasty(MigrationDestination):
    def _between_stages(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Received(Commit() as commit):
                return self._adopt(commit)
        return super()._between_stages(event, now_s)


class AdoptsBeforeTheLastBlocks(_WithMachines):
    destination = _Hasty


class _Talkative(MigrationDestination):
    def _between_stages(self, event: Event, now_s: float) -> list[Effect]:
        is_last_in_place = self.state is DestinationState.RECEIVED and self._is_last
        match event:
            case Received(Reserve(stage=stage)) if is_last_in_place and stage == self._stage:
                return [self._answer_copied()]
        return super()._between_stages(event, now_s)


class TellsOfALastStage(_WithMachines):
    destination = _Talkative


class _Changeable(MigrationDestination):
    def _give_up(self, reason: Reason) -> list[Effect]:
        if self.state is DestinationState.COMMITTING:
            return [self._answer_aborted(reason)]
        return super()._give_up(reason)


class AdoptsAfterItSaidAborted(_WithMachines):
    destination = _Changeable


class _WaitsForEver(MigrationDestination):
    @property
    def next_deadline_s(self) -> float | None:
        return super().next_deadline_s if self.is_settled else None

    def on_event(self, event: Event, now_s: float) -> list[Effect]:
        if isinstance(event, Tick) and not self.is_settled:
            return []
        return super().on_event(event, now_s)


class HasNoLease(_WithMachines):
    destination = _WaitsForEver


# -------------------------------------------------------------------------------------- engines


class TellsPresenceOnly(HostileEngine):
    """Does not tell that a request was preempted since."""

    def _outcome(self, effect: Any) -> Event:
        outcome = super()._outcome(effect)
        if isinstance(outcome, Inspected) and outcome.progress is not None:
            return replace(outcome, progress=replace(outcome.progress, num_preemptions=0))
        return outcome

    def _drain(self, effect: Drain) -> Drained | DrainRefused:
        request = self.request(effect.request_id)
        if request is not None:
            request.num_preemptions = 0
        return super()._drain(effect)


class LosesState(HostileEngine):
    """Goes on with a migrated request as if it had said nothing yet (grammar, generator)."""

    def _adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        outcome = super()._adopt(effect)
        if isinstance(outcome, Adopted):
            self.streams[effect.request_id].digest = EMPTY
        return outcome


# ------------------------------------------------------------------------------------ front ends


class _NeverBypasses(Dispatcher):
    @property
    def next_deadline_s(self) -> float | None:
        return self._ownership.next_deadline_s

    def _ask_again(self, now_s: float) -> list[FrontendEffect]:
        return []


class WaitsForTheScheduler(FrontendCore):
    """Waits for an answer of the scheduler that it asked, though that may have died."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher.__class__ = _NeverBypasses


class _Repeating(Streams):
    @staticmethod
    def _deliver(stream: Any, request_id: RequestId, span: Any, outcome: Any) -> bool:
        _, end, is_finished, payload = span
        outcome.deliveries.append(Deliver(request_id, payload, 0, is_finished))
        stream.next_index = max(stream.next_index, end)
        return not is_finished


class DeliversRepeats(FrontendCore):
    """Delivers tokens that the client has already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams.__class__ = _Repeating


class _Unordered(Streams):
    def _take(self, stream: Any, span: Any, *args: Any) -> None:
        stream.next_index = max(stream.next_index, span.first_index)
        super()._take(stream, span, *args)


class DeliversOutOfOrder(FrontendCore):
    """Does not wait for what is missing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams.__class__ = _Unordered


class SaysFarewellTooSoon(FrontendCore):
    """Says farewell to an instance that still has requests of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher.__class__ = _Hurried


class _Hurried(Dispatcher):
    def farewells(self) -> list[FrontendEffect]:
        num_owned = self._ownership.num_owned
        self._ownership.num_owned = _none  # type: ignore[method-assign]
        effects = super().farewells()
        self._ownership.num_owned = num_owned  # type: ignore[method-assign]
        return effects


def _none(instance_id: InstanceId) -> int:
    return 0


class SendsToTerminating(FrontendCore):
    """Sends new requests to an instance to which it has said farewell."""

    def on_message(self, message: Any, *args: Any) -> list[FrontendEffect]:
        effects = super().on_message(message, *args)
        if isinstance(message, Membership):
            for each in self._dispatcher._instances:
                self._dispatcher._instances[each] = False
        return effects


# ----------------------------------------------------------------------------------- supervisor


class BelievesOldEmptyings(SupervisorCore):
    """Ends an instance that was empty once, before it was told to serve on."""

    def on_message(self, message: WireMessage, now_s: float) -> list[SupervisorEffect]:
        if isinstance(message, Emptied):
            return [*self.fleet.on_emptied(message.instance_id, now_s)]
        return super().on_message(message, now_s)


# ----------------------------------------------------------------------------------------- all


def _on_instances(name: str, core: type[InstanceCore]) -> Mistake:
    return Mistake(name, Cores(instance=core))


MISTAKES = (
    _on_instances("source blocks freed before the last stage was sent", FreesFirst),
    _on_instances("reservations of aborted migrations not freed", NeverFreesReservations),
    _on_instances("an abort in the last stage does not put the request back", NeverResumes),
    _on_instances("the source keeps its copy after the verdict", NeverReleases),
    _on_instances("the source resumes because nothing was heard", ResumesOnTimeOut),
    _on_instances("the source does not wait for a drain under way", DoesNotAwaitDrains),
    _on_instances("nobody asks for a lost verdict again", NeverAsksForTheVerdict),
    _on_instances("the destination forgets that it adopted", ForgetsThatItAdopted),
    _on_instances("the destination adopts before the last blocks came", AdoptsBeforeTheLastBlocks),
    _on_instances("the destination adopts after it said aborted", AdoptsAfterItSaidAborted),
    _on_instances("the destination tells of a last stage that it was copied", TellsOfALastStage),
    _on_instances("the destination has no lease", HasNoLease),
    _on_instances("the instance does not wait for farewells", SaysEmptiedTooSoon),
    _on_instances("what is for unknown front ends is dropped", ForgetsUnknownFrontends),
    Mistake("the engine does not tell of preemptions", Cores(engine=TellsPresenceOnly)),
    Mistake("state of the request does not move along", Cores(engine=LosesState)),
    Mistake("a stream waits for a scheduler that died", Cores(frontend=WaitsForTheScheduler)),
    Mistake("the front end does not cut repeats", Cores(frontend=DeliversRepeats)),
    Mistake("the front end does not wait for missing tokens", Cores(frontend=DeliversOutOfOrder)),
    Mistake("the front end says farewell too soon", Cores(frontend=SaysFarewellTooSoon)),
    Mistake("the front end sends to a terminating instance", Cores(frontend=SendsToTerminating)),
    Mistake("the supervisor believes an old emptying", Cores(supervisor=BelievesOldEmptyings)),
    Mistake("a silent instance is given up and not killed", Cores(is_fenced=False)),
)
"""All of them."""
