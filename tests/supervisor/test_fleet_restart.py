"""A rolling restart, instance by instance."""

import pytest

from sterna.errors import FleetError
from sterna.supervisor.fleet import (
    Announce,
    CancelStart,
    Cause,
    Fleet,
    GiveUpGeneration,
    Member,
    Phase,
    Start,
)
from sterna.types import InstanceId
from tests.supervisor.fleets import I0, I1, I2, I3, closed, phases, serving, started


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


def test_a_start_that_its_options_did_not_prevent_is_tried_again_with_them() -> None:
    """Ray's GCS was away."""
    fleet = serving()
    fleet.on_restart(2.0)
    failed = fleet.on_start_failed(I2, "Ray's GCS does not answer", 3.0, is_of_options=False)
    assert failed == [Announce()]
    assert fleet.next_deadline_s is not None
    (again,) = started(fleet.on_time(fleet.next_deadline_s))
    assert fleet.members[again].generation == fleet.generation == 1


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


def test_everybody_is_told_before_starts_with_old_options_are_called_off() -> None:
    """A successor of the supervisor must not wait for them."""
    effects = with_two_that_find_no_place().on_restart(3.0)
    called_off = [CancelStart(I2), CancelStart(I3)]
    assert effects == [Announce(), *called_off, *[Start(InstanceId(f"i{k}"), 1) for k in (4, 5, 6)]]


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
        fleet.on_placed(begun, None)
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


def test_a_restart_goes_on_without_a_surge_only_where_that_has_found_no_place() -> None:
    """A surge that starts, or is up, is worth having; and one that was not asked for needs no
    second order."""
    fleet = serving()
    fleet.on_restart(2.0)
    with pytest.raises(FleetError, match="under way"):
        fleet.on_restart(3.0, has_surge=False)
    fleet.on_pending(I2, "no node has a GPU")
    with pytest.raises(FleetError, match="under way"):
        fleet.on_restart(3.0, has_surge=True)
    fleet.on_placed(I2, None)
    fleet.on_started(I2, 4.0)
    with pytest.raises(FleetError, match="under way"):
        fleet.on_restart(5.0, has_surge=False)


@pytest.mark.parametrize("has_surge", [True, False])
@pytest.mark.parametrize("num_wanted", [1, 2])
def test_a_restart_of_the_last_instance_can_be_given_up(num_wanted: int, has_surge: bool) -> None:
    """Its successor finds no place, and it cannot be emptied before that one serves."""
    fleet = serving(num_wanted, max_instances=2)
    if num_wanted == 2:
        fleet.on_gone(I1, 1.5)
        fleet.on_pending(I2, "no node has a GPU")
    for instance_id in started(fleet.on_restart(2.0, has_surge=has_surge)):
        fleet.on_pending(instance_id, "no node has a GPU")
    effects = fleet.on_restart(3.0, has_surge=False)
    assert [each.generation for each in effects if isinstance(each, GiveUpGeneration)] == [1]
    assert fleet.in_phase(Phase.SERVING) == (I0,)
    assert (fleet.generation, fleet.is_restarting) == (0, False)
    # What is still wanted starts with the options before, and the next restart is one.
    assert {each.generation for each in fleet.members.values()} == {0}
    assert len(fleet.members) == num_wanted
    assert [fleet.members[each].generation for each in started(fleet.on_restart(4.0))][:1] == [2]


def test_a_restart_keeps_its_surge_where_some_of_what_it_has_begun_has_a_place() -> None:
    fleet = with_two_that_find_no_place()
    first, *_ = started(fleet.on_restart(3.0))
    fleet.on_pending(first, "no node has a GPU")
    with pytest.raises(FleetError, match="under way"):
        fleet.on_restart(4.0, has_surge=False)


def test_a_restart_without_a_surge_needs_as_many_as_serve_when_it_is_ordered() -> None:
    """One of four has died since the first order, and has no successor: three are enough, and no
    fewer."""
    fleet = serving(4)
    waiting = started(fleet.on_restart(2.0))
    waiting += started(fleet.on_gone(I3, 3.0))
    for instance_id in waiting:
        fleet.on_pending(instance_id, "no node has a GPU")
    fleet.on_restart(4.0, has_surge=False)
    assert fleet.in_phase(Phase.TERMINATING) == (I0,)
    fleet.on_emptied(I0, 5.0)
    fleet.on_gone(I0, 6.0)
    assert fleet.in_phase(Phase.SERVING) == (I1, I2)
    assert fleet.in_phase(Phase.TERMINATING) == ()


def test_a_restart_before_anything_has_found_a_place_is_a_restart() -> None:
    fleet = Fleet(1)
    fleet.begin(0.0)
    fleet.on_pending(I0, "no node has a GPU")
    assert fleet.on_restart(1.0, has_surge=False) == [Announce(), CancelStart(I0), Start(I1, 1)]


def test_a_restart_that_has_begun_to_replace_keeps_its_surge() -> None:
    """Its first successor is up; the second waits for the place that the first one's predecessor
    leaves."""
    fleet = serving()
    fleet.on_restart(2.0)
    fleet.on_started(I2, 3.0)
    assert fleet.in_phase(Phase.TERMINATING) == (I0,)
    fleet.on_gone(I2, 4.0)
    (again,) = fleet.in_phase(Phase.STARTING)
    fleet.on_pending(again, "no node has a GPU")
    with pytest.raises(FleetError, match="under way"):
        fleet.on_restart(5.0, has_surge=False)


def test_a_restart_begins_where_no_instance_is_outdated_and_starts_wait() -> None:
    """It is the first one, and has the number of the next generation."""
    fleet = serving()
    fleet.on_add(1, 2.0)
    fleet.on_pending(I2, "no node has a GPU")
    fleet.on_restart(3.0, has_surge=False)
    assert fleet.generation == 1
    assert fleet.is_restarting


def test_a_late_start_with_old_options_proves_nothing_of_the_new_ones() -> None:
    """Those have: a failure after that is one like any other, and is tried again."""
    fleet = serving(2)
    fleet.on_add(1, 2.0)
    (new,) = started(fleet.on_restart(3.0))
    fleet.on_started(new, 4.0)
    assert closed(fleet.on_started(I2, 5.0)) == [I2]
    (again,) = started(fleet.on_gone(I2, 6.0))
    assert fleet.on_start_failed(again, "no memory", 7.0) == [Announce()]
    assert fleet.generation == 1
    assert [fleet.members[each].generation for each in started(fleet.on_time(8.0))] == [1]


def test_options_that_fail_twice_are_given_up_once() -> None:
    """Two begin with them at once; the second failure is one of the old options' time."""
    fleet = with_two_that_find_no_place()
    begun = started(fleet.on_restart(3.0, has_surge=False))
    assert len(begun) == 2
    effects = fleet.on_start_failed(begun[0], "no such model", 4.0)
    assert effects[:2] == [Announce(), GiveUpGeneration(1, "no such model")]
    # What is begun instead has the old options.
    assert [fleet.members[each].generation for each in started(effects)] == [0]
    assert fleet.on_start_failed(begun[1], "no such model", 5.0) == [Announce()]
    assert fleet.generation == 0


def test_what_is_begun_while_old_warm_ones_end_is_no_more_than_is_needed() -> None:
    """They hold what their successors need."""
    fleet = serving(1)
    fleet.on_pool(1, 2.0)
    fleet.on_started(I1, 3.0)
    effects = fleet.on_restart(4.0)
    assert fleet.members[I1] == Member(0, Phase.CLOSING, cause=Cause.RESTART)
    assert started(effects) == [I2]
    assert started(fleet.on_gone(I1, 5.0)) == [I3]


def test_nobody_is_emptied_while_an_old_warm_one_ends() -> None:
    """One at a time."""
    fleet = serving(1)
    fleet.on_pool(1, 2.0)
    fleet.on_started(I1, 3.0)
    fleet.on_restart(4.0)
    fleet.on_started(I2, 5.0)
    assert phases(fleet)[I0] is Phase.SERVING
    fleet.on_gone(I1, 6.0)
    assert phases(fleet)[I0] is Phase.TERMINATING


def test_without_a_surge_two_serve_until_one_of_them_may_be_emptied() -> None:
    """Of three that are wanted one has no place: two serve, and one of these goes at a time."""
    fleet = serving(3)
    (again,) = started(fleet.on_gone(I2, 2.0))
    fleet.on_pending(again, "no node has a GPU")
    fleet.on_restart(3.0, has_surge=False)
    assert fleet.in_phase(Phase.TERMINATING) == (I0,)
    assert fleet.in_phase(Phase.SERVING) == (I1,)


def test_without_a_surge_no_more_need_serve_than_are_wanted_by_now() -> None:
    """Four served at its beginning; three are enough since one was drained."""
    fleet = serving(4)
    assert fleet.on_restart(2.0, has_surge=False) == [Announce()]
    assert fleet.in_phase(Phase.TERMINATING) == (I0,)
    fleet.on_terminate(I1, Cause.OPERATOR, 3.0)
    fleet.on_emptied(I0, 4.0)
    (successor,) = started(fleet.on_gone(I0, 5.0))
    fleet.on_started(successor, 6.0)
    assert fleet.in_phase(Phase.SERVING) == (I3, successor)
    assert fleet.in_phase(Phase.TERMINATING) == (I1, I2)


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
