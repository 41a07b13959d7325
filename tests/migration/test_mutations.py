"""The random walks find what they are there to find: each broken protocol below fails in them.

Several are mistakes of earlier implementations; the others are the steps of the safety argument
in docs/migration_protocol.md, each left out once.
"""

from collections.abc import Callable

from fault_simulation.planted.migrations import WaitsForEver
from sterna.errors import ProtocolError
from sterna.instance.llumlet import Llumlet, LlumletEffect
from sterna.migration.coordinator import MigrationCoordinator
from sterna.migration.destination import DestinationState, MigrationDestination
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    ClientAborted,
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
    RequestPosition,
    Resume,
    Send,
    Tick,
)
from sterna.migration.source import MigrationSource, SourceState
from sterna.types import InstanceId, MigrationId, RequestId
from tests.migration.engine import Engine
from tests.migration.walks import walk
from tests.migration.world import CONFIG, Node, World

NUM_WALKS = 600


def assert_noticed(message: str, make_world: Callable[[], World], *faults: str) -> None:
    """Fail when no walk breaks a rule with this message."""
    others = set()
    for seed in range(NUM_WALKS):
        try:
            walk(make_world(), seed, faults=faults or None)
        except (AssertionError, ProtocolError, KeyError) as error:
            if message in repr(error):
                return
            others.add(repr(error))
    raise AssertionError(f"no walk of {NUM_WALKS} noticed; what they said: {others}")


def world_with(
    source: type[MigrationSource] = MigrationSource,
    destination: type[MigrationDestination] = MigrationDestination,
) -> Callable[[], World]:
    """Worlds in which all migrations are run by these machines."""

    class Coordinator(MigrationCoordinator):
        def _new_source(self, migration_id, request_id, peer, mode):  # type: ignore[no-untyped-def]
            return source(migration_id, request_id, peer, mode, self._config)

        def _new_destination(self, migration_id, request_id, peer, reservation):  # type: ignore[no-untyped-def]
            return destination(migration_id, request_id, peer, reservation, self._config)

    return world_of(Coordinator)


def world_of(coordinator: type[MigrationCoordinator]) -> Callable[[], World]:
    class BrokenLlumlet(Llumlet):
        def __init__(self, instance_id: InstanceId, config: object) -> None:
            super().__init__(instance_id, CONFIG)
            self._coordinator = coordinator(instance_id, CONFIG.migration, 2)

    class BrokenWorld(World):
        llumlet_type = BrokenLlumlet

    return BrokenWorld


# ------------------------------------------------------------------------------- interpreters


def test_freeing_the_source_before_the_last_stage_is_sent_is_noticed() -> None:
    """Mistake 1: source blocks freed before the last stage was sent, silent KV corruption.

    Section 4.2: "After the final stage finishes, the source releases its local blocks and
    notifies the destination to commit".
    """

    class FreesFirst(World):
        def carry_out_one(self, node: Node, effect: LlumletEffect) -> None:
            match effect:
                case Send(_, Commit(migration_id=migration_id, request_id=request_id)):
                    super().carry_out_one(node, Release(migration_id, request_id))
                case Release() | Resume() | AbortDrained():
                    return
            super().carry_out_one(node, effect)

    assert_noticed("KV corrupted", FreesFirst)


def test_an_abort_that_is_never_carried_out_is_noticed() -> None:
    """Mistake 2: aborts created and never awaited."""

    class ForgetsToFree(World):
        def carry_out_one(self, node: Node, effect: LlumletEffect) -> None:
            if not isinstance(effect, FreeReservation):
                super().carry_out_one(node, effect)

    assert_noticed("stay open for ever", ForgetsToFree)


def test_a_client_abort_that_is_never_carried_out_is_noticed() -> None:
    class ForgetsToAbort(World):
        def carry_out_one(self, node: Node, effect: LlumletEffect) -> None:
            if not isinstance(effect, AbortRequest):
                super().carry_out_one(node, effect)

    assert_noticed("goes on without a client", ForgetsToAbort)


def test_an_aborted_last_stage_that_does_not_resume_the_request_is_noticed() -> None:
    """Mistake 8: an abort in the last stage that never puts the request back in the batch."""

    class NeverResumes(World):
        def carry_out_one(self, node: Node, effect: LlumletEffect) -> None:
            if not isinstance(effect, Resume):
                super().carry_out_one(node, effect)

    assert_noticed("nobody can step", NeverResumes)


def test_an_engine_that_tells_presence_but_not_preemption_is_noticed() -> None:
    class TellsPresenceOnly(Engine):
        def inspect(self, request_id: RequestId) -> Inspected:
            outcome = super().inspect(request_id)
            progress = outcome.progress
            if progress is None:
                return outcome
            hidden = RequestPosition(
                progress.is_queuing, progress.num_full_blocks, progress.num_blocks, 0
            )
            return Inspected(hidden, outcome.request)

        def drain(self, effect: Drain) -> Drained | DrainRefused:
            request = self.requests.get(effect.request_id)
            if request is not None:
                request.num_preemptions = 0
            return super().drain(effect)

    def make_world() -> World:
        world = World()
        for node in world.nodes.values():
            node.engine.__class__ = TellsPresenceOnly
        return world

    assert_noticed("KV corrupted", make_world, "preempt")


# ------------------------------------------------------------------------------------ sources


def test_a_source_that_resumes_because_nothing_was_heard_is_noticed() -> None:
    class Impatient(MigrationSource):
        def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
            if isinstance(event, Tick):
                return self._keep_drained(Reason.PEER_SILENT)
            return super()._until_verdict(event, now_s)

    assert_noticed("two owners", world_with(source=Impatient))


def test_a_source_that_does_not_wait_for_a_drain_under_way_is_noticed() -> None:
    class EndsAtOnce(MigrationSource):
        def _undo(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
            return self._abort(reason, is_peer_told=is_peer_told)

        def _after_end(self, event: Event) -> list[Effect]:
            return []

    class IgnoresLateDrains(MigrationCoordinator):
        def _new_source(self, migration_id, request_id, peer, mode):  # type: ignore[no-untyped-def]
            return EndsAtOnce(migration_id, request_id, peer, mode, self._config)

        def on_outcome(self, migration_id: MigrationId, event: Event, now_s: float) -> list[Effect]:
            try:
                return super().on_outcome(migration_id, event, now_s)
            except ProtocolError:
                return []

    assert_noticed("nobody can step", world_of(IgnoresLateDrains))


def test_a_source_that_forgets_a_clients_abort_after_commit_is_noticed() -> None:
    class Forgetful(MigrationSource):
        def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
            return [] if isinstance(event, ClientAborted) else super()._until_verdict(event, now_s)

    assert_noticed("goes on without a client", world_with(source=Forgetful), "abort")


def test_a_source_that_never_asks_for_the_verdict_again_is_noticed() -> None:
    class NeverAsks(MigrationSource):
        @property
        def next_deadline_s(self) -> float | None:
            deadline_s = super().next_deadline_s
            return None if self.state is SourceState.COMMITTING else deadline_s

        def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
            return [] if isinstance(event, Tick) else super()._until_verdict(event, now_s)

    assert_noticed("stay open for ever", world_with(source=NeverAsks), "lose")


# ------------------------------------------------------------------------------- destinations


def test_a_destination_that_forgets_that_it_adopted_is_noticed() -> None:
    class Forgetful(MigrationDestination):
        @property
        def is_over(self) -> bool:
            return self.is_settled

    assert_noticed("two owners", world_with(destination=Forgetful))


def test_a_destination_that_adopts_before_the_last_blocks_came_is_noticed() -> None:
    class Hasty(MigrationDestination):
        def _between_stages(self, event: Event, now_s: float) -> list[Effect]:
            match event:
                case Received(Commit() as commit):
                    return self._adopt(commit)
            return super()._between_stages(event, now_s)

    assert_noticed("KV corrupted", world_with(destination=Hasty))


def test_a_destination_that_adopts_after_it_said_aborted_is_noticed() -> None:
    class Changeable(MigrationDestination):
        def _give_up(self, reason: Reason) -> list[Effect]:
            if self.state is DestinationState.COMMITTING:
                return [self._answer_aborted(reason)]
            return super()._give_up(reason)

    assert_noticed("two owners", world_with(destination=Changeable), "time")


def test_a_destination_that_does_not_wait_for_what_is_being_reserved_is_noticed() -> None:
    class EndsAtOnce(MigrationDestination):
        def _give_up(self, reason: Reason) -> list[Effect]:
            if self.state is DestinationState.RESERVING:
                return self._end(reason)
            return super()._give_up(reason)

    class IgnoresLateReservations(MigrationCoordinator):
        def _new_destination(self, migration_id, request_id, peer, reservation):  # type: ignore[no-untyped-def]
            return EndsAtOnce(migration_id, request_id, peer, reservation, self._config)

        def on_outcome(self, migration_id: MigrationId, event: Event, now_s: float) -> list[Effect]:
            try:
                return super().on_outcome(migration_id, event, now_s)
            except ProtocolError:
                return []

    assert_noticed("outlived its migration", world_of(IgnoresLateReservations))


def test_a_destination_without_a_lease_is_noticed() -> None:
    assert_noticed("stay open for ever", world_with(destination=WaitsForEver), "lose", "preempt")
