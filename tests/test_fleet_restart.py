"""A rolling restart, instance by instance."""

import pytest

from sterna.errors import FleetError
from sterna.fleet import Announce, CancelStart, Fleet, GiveUpGeneration, Phase, Start
from tests.fleets import I0, I1, I2, I3, closed, phases, serving, started


def test_a_rolling_restart_replaces_one_instance_after_the_other() -> None:
    fleet = serving()
    assert started(fleet.on_restart(2.0)) == [I2]
    assert fleet.members[I2].generation == 1
    fleet.on_started(I2, 3.0)
    assert phases(fleet) == {I0: Phase.TERMINATING, I1: Phase.SERVING, I2: Phase.SERVING}
    assert closed(fleet.on_emptied(I0, 4.0)) == [I0]
    assert started(fleet.on_gone(I0, 5.0)) == [I3]
    fleet.on_started(I3, 6.0)
    assert phases(fleet)[I1] is Phase.TERMINATING
    fleet.on_emptied(I1, 7.0)
    fleet.on_gone(I1, 8.0)
    assert phases(fleet) == {I2: Phase.SERVING, I3: Phase.SERVING}
    assert not fleet.is_restarting
    assert fleet.wanted == 2


def test_without_a_surge_an_instance_ends_before_its_successor_starts() -> None:
    fleet = serving()
    assert started(fleet.on_restart(2.0, has_surge=False)) == []
    assert phases(fleet)[I0] is Phase.TERMINATING
    assert started(fleet.on_emptied(I0, 3.0)) == []
    assert started(fleet.on_gone(I0, 4.0)) == [I2]
    # Until that is up, the other one is all there is.
    assert phases(fleet)[I1] is Phase.SERVING
    fleet.on_started(I2, 5.0)
    assert phases(fleet)[I1] is Phase.TERMINATING


def test_a_lone_instance_has_its_successor_first_even_without_a_surge() -> None:
    fleet = serving(1)
    assert started(fleet.on_restart(2.0, has_surge=False)) == [I1]
    assert phases(fleet)[I0] is Phase.SERVING


def test_options_with_which_nothing_starts_cost_no_instance() -> None:
    fleet = serving()
    fleet.on_restart(2.0)
    assert fleet.on_start_failed(I2, "no such model", 3.0) == [
        Announce(),
        GiveUpGeneration(1, "no such model"),
    ]
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SERVING}
    assert fleet.generation == 0
    # Another attempt has a number of its own.
    fleet.on_restart(4.0)
    assert fleet.generation == 2


def test_a_restart_whose_surge_finds_no_place_can_go_on_without_one() -> None:
    fleet = serving()
    fleet.on_restart(2.0)
    fleet.on_pending(I2, "no node has a GPU")
    effects = fleet.on_restart(3.0, has_surge=False)
    assert CancelStart(I2) in effects
    assert phases(fleet) == {I0: Phase.TERMINATING, I1: Phase.SERVING}
    fleet.on_emptied(I0, 4.0)
    assert started(fleet.on_gone(I0, 5.0)) == [I3]


def with_two_that_find_no_place() -> Fleet:
    """Auto-scaling wants four, and the machine has room for two."""
    fleet = serving(2, max_instances=4)
    fleet.on_needed(2, 2.0)
    fleet.on_pending(I2, "no node has a GPU")
    fleet.on_pending(I3, "no node has a GPU")
    return fleet


def test_what_waits_for_a_place_with_the_old_options_is_begun_anew_with_the_new_ones() -> None:
    fleet = with_two_that_find_no_place()
    effects = fleet.on_restart(3.0, has_surge=False)
    assert [each for each in effects if isinstance(each, CancelStart)] == [
        CancelStart(I2),
        CancelStart(I3),
    ]
    begun = [each for each in effects if isinstance(each, Start)]
    assert [each.generation for each in begun] == [1, 1]


@pytest.mark.parametrize("has_surge", [True, False])
def test_a_restart_without_a_surge_goes_on_with_as_many_as_there_is_room_for(
    has_surge: bool,
) -> None:
    """Where it was asked for with a surge first, there is no place for that one either."""
    fleet = with_two_that_find_no_place()
    waiting = started(fleet.on_restart(3.0, has_surge=has_surge))
    for instance_id in waiting:
        fleet.on_pending(instance_id, "no node has a GPU")
    if has_surge:
        assert phases(fleet)[I0] is Phase.SERVING
        fleet.on_restart(4.0, has_surge=False)
    for old in (I0, I1):
        assert fleet.in_phase(Phase.TERMINATING) == (old,)
        fleet.on_emptied(old, 5.0)
        fleet.on_gone(old, 6.0)
        # It leaves a place, which is that of whoever waits first. One at a time:
        assert not fleet.in_phase(Phase.TERMINATING)
        begun = fleet.in_phase(Phase.STARTING)[0]
        fleet.on_pending(begun, None)
        fleet.on_started(begun, 7.0)
    assert not fleet.is_restarting
    assert len(fleet.in_phase(Phase.SERVING)) == len(fleet.in_phase(Phase.STARTING)) == 2


def test_a_successor_whose_place_is_not_free_yet_keeps_the_next_instance_serving() -> None:
    """Without a surge: of three, never fewer than two serve."""
    fleet = serving(3)
    fleet.on_restart(2.0, has_surge=False)
    fleet.on_emptied(I0, 3.0)
    (successor,) = started(fleet.on_gone(I0, 4.0))
    fleet.on_pending(successor, "no node has a GPU")
    fleet.on_time(5.0)
    assert fleet.in_phase(Phase.SERVING) == (I1, I2)


def test_a_second_restart_waits_for_the_first() -> None:
    fleet = serving()
    fleet.on_restart(2.0)
    with pytest.raises(FleetError, match="under way"):
        fleet.on_restart(3.0)


def test_what_a_restart_replaces_cannot_be_told_to_serve_on() -> None:
    fleet = serving()
    fleet.on_restart(2.0)
    fleet.on_started(I2, 3.0)
    with pytest.raises(FleetError, match="rolling restart"):
        fleet.on_undo(I0, 4.0)


def test_warm_instances_of_old_options_end_at_once() -> None:
    fleet = serving(1)
    fleet.on_pool(1, 2.0)
    fleet.on_started(I1, 3.0)
    assert closed(fleet.on_restart(4.0)) == [I1]
