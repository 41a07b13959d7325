"""A drained node: its instances leave it, and no others come."""

import msgspec
import pytest

from sterna.errors import FleetError
from sterna.supervisor.fleet import Announce, Cause, Close, Fleet, Phase, Start
from tests.supervisor.fleets import I0, I1, I2, I3, closed, phases, started

A, B = "10.0.0.1", "10.0.0.2"


def serving_on(*nodes: str, **options: int) -> Fleet:
    """A fleet with an instance on each of these nodes."""
    fleet = Fleet(len(nodes), **options)
    for instance_id, node in zip(started(fleet.begin(0.0)), nodes, strict=True):
        fleet.on_placed(instance_id, node)
        fleet.on_started(instance_id, 1.0)
    return fleet


def test_the_instances_of_a_drained_node_are_emptied_and_as_many_are_wanted_as_before() -> None:
    fleet = serving_on(A, B, B)
    begun = [Start(I3, 0), Start("i4", 0)]
    assert fleet.on_drain_node(B, 2.0) == [Announce(), *begun]
    assert phases(fleet) == {
        **{I0: Phase.SERVING, I1: Phase.TERMINATING, I2: Phase.TERMINATING},
        **{I3: Phase.STARTING, "i4": Phase.STARTING},
    }
    assert (fleet.members[I1].cause, fleet.wanted) == (Cause.NODE, 3)
    assert fleet.on_emptied(I1, 3.0) == [Announce(), Close(I1)]
    assert fleet.on_gone(I1, 4.0) == [Announce()]


def test_the_last_instance_that_takes_requests_leaves_when_another_one_serves() -> None:
    fleet = serving_on(B, B)
    assert started(fleet.on_drain_node(B, 2.0)) == [I2]
    assert phases(fleet)[I0] is Phase.SERVING
    assert phases(fleet)[I1] is Phase.TERMINATING
    fleet.on_placed(I2, A)
    assert started(fleet.on_started(I2, 3.0)) == [I3]
    assert phases(fleet)[I0] is Phase.TERMINATING


def test_a_lone_instance_has_its_successor_first() -> None:
    fleet = serving_on(B)
    assert fleet.on_drain_node(B, 2.0) == [Start(I1, 0)]
    assert phases(fleet)[I0] is Phase.SERVING
    fleet.on_placed(I1, A)
    assert started(fleet.on_started(I1, 3.0)) == []
    assert phases(fleet) == {I0: Phase.TERMINATING, I1: Phase.SERVING}
    assert fleet.wanted == 1


def test_a_drained_node_stays_drained_when_its_instances_have_gone() -> None:
    """One that is placed there before the order, and comes up after it, ends at once."""
    fleet = serving_on(A, A)
    assert started(fleet.on_add(1, 2.0)) == [I2]
    fleet.on_placed(I2, B)
    assert fleet.on_drain_node(B, 3.0) == []
    effects = fleet.on_started(I2, 4.0)
    assert (closed(effects), started(effects)) == ([I2], [I3])
    assert fleet.members[I2].cause is Cause.NODE


def test_warm_instances_of_a_drained_node_end_at_once() -> None:
    fleet = serving_on(A)
    (spare,) = started(fleet.on_pool(1, 2.0))
    fleet.on_placed(spare, B)
    fleet.on_started(spare, 3.0)
    effects = fleet.on_drain_node(B, 4.0)
    assert (closed(effects), started(effects)) == ([spare], [I2])


def test_an_undone_drain_lets_what_is_there_serve_and_calls_off_what_waits() -> None:
    fleet = serving_on(A, B)
    fleet.on_drain_node(B, 2.0)
    fleet.on_pending(I2, "no node but drained ones has a GPU")
    fleet.on_undo_node(B, 3.0)
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SERVING}
    assert fleet.members[I1].cause is None
    assert fleet.drained_nodes == set()


def test_an_undo_changes_nothing_of_other_nodes_and_other_drains() -> None:
    fleet = serving_on(A, B, "10.0.0.3", B)
    fleet.on_terminate(I3, Cause.OPERATOR, 2.0)
    fleet.on_drain_node(B, 3.0)
    fleet.on_drain_node("10.0.0.3", 4.0)
    fleet.on_emptied(I1, 5.0)
    fleet.on_undo_node(B, 6.0)
    assert phases(fleet)[I1] is Phase.CLOSING
    assert phases(fleet)[I2] is Phase.TERMINATING
    assert phases(fleet)[I3] is Phase.TERMINATING


def test_one_instance_of_a_drained_node_cannot_be_told_to_serve_on() -> None:
    fleet = serving_on(A, B)
    fleet.on_drain_node(B, 2.0)
    with pytest.raises(FleetError, match=rf"i1 is on {B}, which is drained; undo that first: "):
        fleet.on_undo(I1, 3.0)


def test_an_undo_of_a_node_that_is_not_drained_is_refused() -> None:
    fleet = serving_on(A, B)
    with pytest.raises(FleetError, match=f"{B} is not drained; drained nodes are: none"):
        fleet.on_undo_node(B, 2.0)
    fleet.on_drain_node(B, 3.0)
    with pytest.raises(FleetError, match=f"{A} is not drained; drained nodes are: {B}"):
        fleet.on_undo_node(A, 4.0)


def test_a_second_order_to_drain_a_node_changes_nothing() -> None:
    fleet = serving_on(A, B)
    fleet.on_drain_node(B, 2.0)
    assert fleet.on_drain_node(B, 3.0) == []


def test_a_successor_of_the_supervisor_knows_which_nodes_are_drained() -> None:
    fleet = serving_on(A, B)
    fleet.on_drain_node(B, 2.0)
    successor = msgspec.msgpack.decode(msgspec.msgpack.encode(fleet), type=Fleet)
    assert successor == fleet
    assert started(successor.on_takeover([I0, I1], 3.0)) == [I3]
    assert phases(successor)[I1] is Phase.TERMINATING


def test_auto_scaling_ends_none_beside_those_that_leave_a_drained_node() -> None:
    """It needs one less, and the start in place of one of them is called off."""
    fleet = serving_on(A, B, min_instances=1, max_instances=4)
    fleet.on_drain_node(B, 2.0)
    fleet.on_pending(I2, "no node but drained ones has a GPU")
    fleet.on_terminate(I0, Cause.SCALING, 3.0)
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.TERMINATING}
    assert fleet.wanted == 1
