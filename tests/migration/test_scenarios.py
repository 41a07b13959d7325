"""Scripted plays of several instances: crossing, concurrent and chained migrations, and the two
rare coincidences that the numbers of reservations and the wait for Released are there for."""

from collections.abc import Callable

import pytest

from sterna.migration.coordinator import MigrationCoordinator
from sterna.migration.destination import DestinationMessage, MigrationDestination
from sterna.migration.messages import Aborted, Commit, Committed, Message, Mode, Reserve
from sterna.types import InstanceId, RequestId
from tests.migration.engine import Where
from tests.migration.machines import A, B
from tests.migration.test_mutations import world_of
from tests.migration.world import World

C = InstanceId("C")


def run_until(
    world: World, is_reached: Callable[[], bool], *held: type[Message], is_copying: bool = True
) -> None:
    """Play without faults until something is reached; messages of some kinds are held back."""
    for _ in range(1000):
        if is_reached():
            return
        for node in world.alive():
            if node.commands:
                world.run_command(node)
            elif node.outcomes:
                world.deliver_outcome(node, 0)
        for transfer in world.transfers[:1] if is_copying else ():
            world.copy_one_block(transfer)
        for packet in world.network:
            if not isinstance(packet.message, held):
                world.deliver(world.taken(packet))
                break
        world.check()
    raise AssertionError("not reached")


def under_way(world: World, kind: type[Message]) -> Callable[[], bool]:
    return lambda: any(isinstance(packet.message, kind) for packet in world.network)


def where(world: World, request_id: RequestId) -> dict[InstanceId, Where]:
    return {
        node.engine.instance_id: request.where
        for node in world.alive()
        if (request := node.engine.requests.get(request_id))
    }


def test_two_migrations_that_cross_both_commit() -> None:
    world = World("AB")
    east = world.add_request(A, 8, 20)
    west = world.add_request(B, 8, 20)
    world.order(east, A, B, Mode.LIVE)
    world.order(west, B, A, Mode.LIVE)
    world.heal()
    assert where(world, east) == {B: Where.RUNNING}
    assert where(world, west) == {A: Where.RUNNING}


def test_two_full_instances_that_cross_refuse_each_other_and_lose_nothing() -> None:
    world = World("AB", num_blocks=5)
    east = world.add_request(A, 8, 20)
    west = world.add_request(B, 8, 20)
    world.order(east, A, B, Mode.LIVE)
    world.order(west, B, A, Mode.LIVE)
    world.heal()
    assert where(world, east) == {A: Where.RUNNING}
    assert where(world, west) == {B: Where.RUNNING}


def test_several_migrations_of_one_pair_go_on_at_once() -> None:
    world = World("AB")
    requests = [world.add_request(A, 4, 20) for _ in range(2)]
    for request_id in requests:
        world.order(request_id, A, B, Mode.LIVE)
    run_until(world, under_way(world, Commit), Commit)
    assert len(world.nodes[B].engine.reservations) == 2
    world.heal()
    assert all(where(world, request_id) == {B: Where.RUNNING} for request_id in requests)


def test_a_request_can_go_there_and_back_again() -> None:
    world = World("AB")
    request_id = world.add_request(A, 8, 20)
    for source, destination in ((A, B), (B, A), (A, B)):
        world.order(request_id, source, destination, Mode.LIVE)
        world.heal()
        assert where(world, request_id) == {destination: Where.RUNNING}


def test_a_client_abort_finds_a_request_that_moved_twice() -> None:
    world = World("ABC")
    request_id = world.add_request(A, 8, 20)
    for source, destination in ((A, B), (B, C)):
        world.order(request_id, source, destination, Mode.LIVE)
        world.heal()
    world.home[request_id] = A
    world.abort_by_client(request_id)
    world.heal()
    assert where(world, request_id) == {}


def test_a_client_abort_finds_a_request_that_came_back() -> None:
    world = World("AB")
    request_id = world.add_request(A, 8, 20)
    for source, destination in ((A, B), (B, A)):
        world.order(request_id, source, destination, Mode.LIVE)
        world.heal()
    world.home[request_id] = A
    world.abort_by_client(request_id)
    world.heal()
    assert where(world, request_id) == {}


def play_a_chain_whose_middle_dies(world: World) -> None:
    """A -> B, whose verdict does not reach A; B -> C, if B begins it; then B dies."""
    request_id = world.add_request(A, 8, 20)
    world.order(request_id, A, B, Mode.LIVE)
    run_until(world, lambda: where(world, request_id).get(B) is Where.RUNNING, Committed)
    run_until(world, under_way(world, Committed), Committed)
    verdict = next(p for p in world.network if isinstance(p.message, Committed))
    world.network.remove(verdict)
    world.order(request_id, B, C, Mode.LIVE)
    world.settle()
    world.kill(B)
    world.heal()


def test_a_chain_whose_middle_dies_leaves_one_owner() -> None:
    play_a_chain_whose_middle_dies(World("ABC"))


def test_an_instance_that_moves_a_request_on_before_its_source_knows_is_noticed() -> None:
    class MovesOnAtOnce(MigrationCoordinator):
        def requests(self) -> frozenset[RequestId]:
            return frozenset(s.request_id for s in self._sources.values() if not s.is_settled)

    with pytest.raises(AssertionError, match="two owners"):
        play_a_chain_whose_middle_dies(world_of(MovesOnAtOnce)())


def play_a_late_copy_of_the_first_reserve(world: World) -> None:
    """B gives a reservation up while the Commit is on its way, and a copy of the Reserve that had
    opened it arrives before the Commit: the last stage's blocks then come to a new reservation.
    """
    request_id = world.add_request(A, 8, 20)
    world.order(request_id, A, B, Mode.STOP_AND_COPY)
    run_until(world, under_way(world, Reserve), Reserve)
    world.network.append(world.network[0])
    world.deliver(world.network.pop(0))
    run_until(world, lambda: bool(world.transfers), Reserve, Commit, is_copying=False)
    b = world.nodes[B]
    world.now_s = b.llumlet.next_deadline_s or 0.0
    world.carry_out(b, b.llumlet.on_tick(world.now_s))
    while b.commands or b.outcomes:
        while b.commands:
            world.run_command(b)
        while b.outcomes:
            world.deliver_outcome(b, 0)
    verdict = next(p for p in world.network if isinstance(p.message, Aborted))
    world.network.remove(verdict)
    copy = next(p for p in world.network if isinstance(p.message, Reserve))
    world.deliver(world.taken(copy))
    world.run_command(b)
    world.deliver_outcome(b, 0)
    commit = next(p for p in world.network if isinstance(p.message, Commit))
    world.deliver(world.taken(commit))
    world.network.append(verdict)
    world.heal()


def test_a_late_copy_of_the_first_reserve_leaves_one_owner() -> None:
    play_a_late_copy_of_the_first_reserve(World("AB"))


def test_a_destination_that_ignores_the_numbers_of_reservations_is_noticed() -> None:
    class Gullible(MigrationDestination):
        def _concerns(self, message: DestinationMessage) -> bool:
            return True

    class Coordinator(MigrationCoordinator):
        def _new_destination(self, migration_id, request_id, peer, reservation):  # type: ignore[no-untyped-def]
            return Gullible(migration_id, request_id, peer, reservation, self._config)

    with pytest.raises(AssertionError, match="two owners"):
        play_a_late_copy_of_the_first_reserve(world_of(Coordinator)())
