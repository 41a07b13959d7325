"""Mistakes in the machines by which a request moves."""

from typing import Any

from sterna.config import LlumletConfig
from sterna.errors import ProtocolError
from sterna.instance.core import InstanceCore
from sterna.instance.llumlet import Llumlet
from sterna.migration.coordinator import MigrationCoordinator
from sterna.migration.destination import DestinationState, MigrationDestination
from sterna.migration.messages import (
    Commit,
    Effect,
    Event,
    Reason,
    Received,
    Reserve,
    Tick,
)
from sterna.migration.source import MigrationSource, SourceState
from sterna.types import MigrationId


class WithMachines(InstanceCore):
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


class ResumesOnTimeOut(WithMachines):
    source = _Impatient


class _Restless(Llumlet):
    @property
    def next_deadline_s(self) -> float | None:
        is_looking = self._num_free_slots() > 0 and self.num_outgoing > 0
        return 0.0 if is_looking else super().next_deadline_s


class LooksWhileASlotIsFree(InstanceCore):
    """Looks for more to move at once, as long as more than it moves may move."""

    def _new_llumlet(self, config: LlumletConfig) -> Llumlet:
        llumlet = super()._new_llumlet(config)
        llumlet.__class__ = _Restless
        return llumlet


class _EndsWhileDraining(MigrationSource):
    def _undo(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
        return self._abort(reason, is_peer_told=is_peer_told)


class DoesNotAwaitDrains(WithMachines):
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


class NeverAsksForTheVerdict(WithMachines):
    source = _NeverAsks
    destination = _NeverRepeats


class _Forgetful(MigrationDestination):
    @property
    def is_over(self) -> bool:
        return self.is_settled


class ForgetsThatItAdopted(WithMachines):
    destination = _Forgetful


class _Hasty(MigrationDestination):
    def _between_stages(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Received(Commit() as commit):
                return self._adopt(commit)
        return super()._between_stages(event, now_s)


class AdoptsBeforeTheLastBlocks(WithMachines):
    destination = _Hasty


class _Talkative(MigrationDestination):
    def _between_stages(self, event: Event, now_s: float) -> list[Effect]:
        is_last_in_place = self.state is DestinationState.RECEIVED and self._is_last
        match event:
            case Received(Reserve(stage=stage)) if is_last_in_place and stage == self._stage:
                return [self._answer_copied()]
        return super()._between_stages(event, now_s)


class TellsOfALastStage(WithMachines):
    destination = _Talkative


class _Changeable(MigrationDestination):
    def _give_up(self, reason: Reason) -> list[Effect]:
        if self.state is DestinationState.COMMITTING:
            self._lease_ends_s = float("inf")
            return [self._answer_aborted(reason)]
        return super()._give_up(reason)


class AdoptsAfterItSaidAborted(WithMachines):
    destination = _Changeable


class WaitsForEver(MigrationDestination):
    """Never ends a migration because its peer is silent."""

    @property
    def next_deadline_s(self) -> float | None:
        return super().next_deadline_s if self.is_settled else None

    def on_event(self, event: Event, now_s: float) -> list[Effect]:
        if isinstance(event, Tick) and not self.is_settled:
            return []
        return super().on_event(event, now_s)


class HasNoLease(WithMachines):
    destination = WaitsForEver
