"""Fleet: the effects of each event on the instances, by example."""

import msgspec
import pytest

from sterna.errors import FleetError, UnknownInstanceError
from sterna.supervisor.fleet import (
    RETRY_DELAYS_S,
    Announce,
    CancelStart,
    Cause,
    Close,
    Fleet,
    Member,
    Phase,
    Start,
)
from sterna.types import InstanceId
from tests.supervisor.fleets import I0, I1, I2, I3, closed, phases, serving, started

NODE = "10.0.0.1"


def test_as_many_are_started_as_are_wanted() -> None:
    assert started(Fleet(2).begin(0.0)) == [I0, I1]


def test_an_instance_that_is_up_serves_and_everybody_is_told() -> None:
    fleet = Fleet(1)
    fleet.begin(0.0)
    assert Announce() in fleet.on_started(I0, 1.0)
    assert phases(fleet) == {I0: Phase.SERVING}


def test_one_that_dies_is_replaced_under_a_name_that_was_never_used() -> None:
    fleet = serving()
    assert fleet.on_gone(I0, 2.0) == [Announce(), Start(I2, 0)]


def test_a_drained_instance_ends_when_it_is_empty_and_is_not_replaced() -> None:
    fleet = serving()
    assert fleet.on_terminate(I0, Cause.OPERATOR, 2.0) == [Announce()]
    assert phases(fleet)[I0] is Phase.TERMINATING
    assert fleet.on_emptied(I0, 3.0) == [Announce(), Close(I0)]
    assert fleet.on_gone(I0, 4.0) == [Announce()]
    assert phases(fleet) == {I1: Phase.SERVING}


def test_a_drain_can_be_undone_until_the_instance_is_empty() -> None:
    fleet = serving()
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    assert fleet.on_undo(I0, 3.0) == [Announce()]
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SERVING}
    assert fleet.wanted == 2
    fleet.on_terminate(I0, Cause.OPERATOR, 4.0)
    fleet.on_emptied(I0, 5.0)
    with pytest.raises(FleetError, match="too late"):
        fleet.on_undo(I0, 6.0)


def test_what_an_instance_says_of_an_emptying_that_was_undone_is_void() -> None:
    fleet = serving()
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_undo(I0, 3.0)
    assert fleet.on_emptied(I0, 4.0) == []


def test_a_terminating_instance_that_dies_is_not_replaced() -> None:
    fleet = serving()
    fleet.on_terminate(I0, Cause.SCALING, 2.0)
    assert fleet.on_gone(I0, 3.0) == [Announce()]


def test_below_the_minimum_a_drained_instance_has_a_successor() -> None:
    fleet = serving(2, min_instances=2)
    assert started(fleet.on_terminate(I0, Cause.OPERATOR, 2.0)) == [I2]


@pytest.mark.parametrize(
    ("instance_id", "error", "words"),
    [
        (InstanceId("i9"), UnknownInstanceError, "no instance is called i9; there are: i0, i1"),
        (I1, FleetError, "i1 is the last instance that takes requests"),
    ],
)
def test_a_drain_that_cannot_be_is_refused_in_words(
    instance_id: InstanceId, error: type[Exception], words: str
) -> None:
    fleet = serving()
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    before = phases(fleet)
    with pytest.raises(error, match=words):
        fleet.on_terminate(instance_id, Cause.OPERATOR, 3.0)
    assert phases(fleet) == before


def test_a_second_drain_of_an_operators_goes_on_with_the_first() -> None:
    """The first command may have been interrupted, and is given again."""
    fleet = serving()
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    wanted = fleet.wanted
    assert fleet.on_terminate(I0, Cause.OPERATOR, 3.0) == []
    assert phases(fleet)[I0] is Phase.TERMINATING
    fleet.on_emptied(I0, 4.0)
    assert fleet.on_terminate(I0, Cause.OPERATOR, 5.0) == []
    assert fleet.wanted == wanted


def test_what_a_rolling_restart_replaces_is_not_drained_besides() -> None:
    fleet = serving()
    fleet.on_restart(2.0, has_surge=False)
    (replaced,) = fleet.in_phase(Phase.TERMINATING)
    with pytest.raises(FleetError, match="is being emptied already: a rolling restart replaces it"):
        fleet.on_terminate(replaced, Cause.OPERATOR, 3.0)


def test_an_instance_that_does_not_serve_yet_cannot_be_drained() -> None:
    fleet = serving()
    fleet.on_add(1, 2.0)
    with pytest.raises(FleetError, match="i2 does not serve yet"):
        fleet.on_terminate(I2, Cause.OPERATOR, 3.0)
    fleet.on_pool(1, 4.0)
    fleet.on_started(I2, 5.0)
    fleet.on_started(I3, 5.0)
    assert phases(fleet)[I3] is Phase.WARM
    with pytest.raises(FleetError, match="i3 does not serve yet"):
        fleet.on_terminate(I3, Cause.OPERATOR, 6.0)


def test_an_instance_that_is_empty_and_ends_cannot_be_drained_again() -> None:
    fleet = serving()
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_emptied(I0, 3.0)
    with pytest.raises(FleetError, match="i0 is being emptied already: an operator drains it"):
        fleet.on_terminate(I0, Cause.SCALING, 4.0)


def test_an_instance_that_an_operator_drains_is_emptied_whatever_waits_for_a_place() -> None:
    """The operator wants that one to end, and not just one less."""
    fleet = serving(2)
    fleet.on_add(1, 2.0)
    fleet.on_pending(I2, "no node has a GPU")
    assert fleet.on_terminate(I0, Cause.OPERATOR, 3.0) == [Announce()]
    assert phases(fleet) == {I0: Phase.TERMINATING, I1: Phase.SERVING, I2: Phase.STARTING}


def test_scaling_ends_nothing_where_no_more_than_the_minimum_serve() -> None:
    """One that died is being replaced, or a restart's further one starts, and waits for a place:
    the scheduler counts it as one that comes."""
    fleet = serving(3, min_instances=3)
    fleet.on_gone(I2, 2.0)
    fleet.on_pending(I3, "no node has a GPU")
    restarting = serving(2, min_instances=2, max_instances=4)
    restarting.on_restart(2.0)
    restarting.on_pending(I2, "no node has a GPU")
    for each in (fleet, restarting):
        before = phases(each)
        with pytest.raises(FleetError, match="i0 stays: no more than --min-instances serve"):
            each.on_terminate(I0, Cause.SCALING, 3.0)
        assert phases(each) == before


def test_each_end_lowers_what_is_wanted_by_one_down_to_the_minimum() -> None:
    fleet = serving(4, min_instances=2)
    wanted = []
    for instance_id in (I0, I1, I2):
        fleet.on_terminate(instance_id, Cause.OPERATOR, 2.0)
        wanted.append(fleet.wanted)
    assert wanted == [3, 2, 2]


def test_an_undone_drain_leaves_nothing_of_itself_behind() -> None:
    fleet = serving(3, min_instances=2)
    before = msgspec.msgpack.encode(fleet)
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_undo(I0, 3.0)
    assert msgspec.msgpack.encode(fleet) == before


def test_the_undo_of_a_drain_takes_back_what_that_one_has_lowered() -> None:
    """At the minimum it has lowered nothing, and its instance has a successor, which the undo makes
    needless."""
    fleet = serving(3, min_instances=2)
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_undo(I0, 3.0)
    fleet.on_terminate(I1, Cause.OPERATOR, 4.0)
    assert started(fleet.on_terminate(I0, Cause.OPERATOR, 5.0)) == [I3]
    fleet.on_pending(I3, "no node has a GPU")
    assert fleet.on_undo(I0, 6.0) == [Announce(), Announce(), CancelStart(I3)]
    assert fleet.wanted == 2


def test_an_undone_drain_wants_no_more_than_the_maximum() -> None:
    fleet = serving(2, max_instances=2)
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_add(1, 3.0)
    fleet.on_undo(I0, 4.0)
    assert fleet.wanted == 2


def test_where_there_is_no_instance_none_can_be_drained() -> None:
    with pytest.raises(UnknownInstanceError, match="no instance is called i0; there are: none"):
        Fleet(1).on_terminate(I0, Cause.OPERATOR, 0.0)


def test_what_was_never_there_says_and_ends_nothing() -> None:
    fleet = serving()
    assert fleet.on_emptied(I3, 2.0) == []
    assert fleet.on_gone(I3, 2.0) == []
    assert fleet.on_pending(I3, "no node has a GPU") == []


def test_everybody_is_told_once_of_what_a_start_waits_for() -> None:
    fleet = Fleet(1)
    fleet.begin(0.0)
    assert fleet.on_placed(I0, None) == []
    assert fleet.on_pending(I0, "no node has a GPU") == [Announce()]
    assert fleet.on_pending(I0, "no node has a GPU") == []
    assert fleet.on_pending(I0, "no node is up") == [Announce()]
    assert fleet.members[I0].pending == "no node is up"
    assert fleet.on_placed(I0, NODE) == [Announce()]
    assert fleet.on_placed(I0, NODE) == []
    assert (fleet.members[I0].pending, fleet.members[I0].node) == (None, NODE)


def test_an_undo_without_a_drain_is_refused() -> None:
    with pytest.raises(FleetError, match="i0 is not being drained"):
        serving().on_undo(I0, 2.0)


def test_no_more_are_added_than_the_maximum() -> None:
    fleet = serving(2, max_instances=3)
    assert started(fleet.on_add(5, 2.0)) == [I2]


def test_what_auto_scaling_needs_comes_on_top_of_what_is_there_or_starts() -> None:
    fleet = serving(1, max_instances=4)
    assert started(fleet.on_needed(1, 2.0)) == [I1]
    assert started(fleet.on_needed(1, 3.0)) == [I2]
    assert started(fleet.on_needed(3, 4.0)) == [I3]
    assert fleet.wanted == 4


def test_warm_instances_are_not_what_auto_scaling_has_already() -> None:
    """They serve, and others are warm in their place."""
    fleet = serving(1)
    for instance_id in started(fleet.on_pool(2, 2.0)):
        fleet.on_started(instance_id, 3.0)
    assert started(fleet.on_needed(1, 4.0)) == [I3]
    assert fleet.wanted == 2
    assert phases(fleet) == {
        I0: Phase.SERVING,
        I1: Phase.SERVING,
        I2: Phase.WARM,
        I3: Phase.STARTING,
    }


def test_a_start_that_only_refills_the_pool_is_known() -> None:
    """It is needed to serve as soon as auto-scaling needs more than are warm."""
    fleet = serving(1)
    for instance_id in started(fleet.on_pool(2, 2.0)):
        assert fleet.starting_for_pool == (I1, I2)[(I1, I2).index(instance_id) :]
        fleet.on_started(instance_id, 3.0)
    fleet.on_needed(1, 4.0)
    assert fleet.starting_for_pool == (I3,)
    refilling = started(fleet.on_needed(2, 5.0))
    assert fleet.in_phase(Phase.SERVING) == (I0, I1, I2)
    assert fleet.in_phase(Phase.STARTING) == (I3, *refilling)
    assert fleet.starting_for_pool == tuple(refilling)


def test_auto_scaling_that_needs_less_than_is_wanted_lowers_nothing() -> None:
    fleet = serving(3)
    again = [each for gone in (I1, I2) for each in started(fleet.on_gone(gone, 2.0))]
    for instance_id in again:
        fleet.on_start_failed(instance_id, "no memory", 2.0)
    assert fleet.on_needed(1, 2.5) == []
    assert fleet.wanted == 3
    # Nothing can start yet, and the front ends show how many are wanted.
    assert fleet.on_needed(3, 2.5) == [Announce()]
    assert fleet.wanted == 4


def test_the_time_between_two_attempts_grows_up_to_half_a_minute() -> None:
    fleet = serving(1)
    fleet.on_gone(I0, 0.0)
    now_s, delays_s = 100.0, []
    for _ in range(7):
        (instance_id,) = fleet.in_phase(Phase.STARTING)
        fleet.on_start_failed(instance_id, "no memory", now_s)
        due_s = fleet.next_deadline_s
        assert due_s is not None
        delays_s.append(due_s - now_s)
        now_s = due_s
        assert len(started(fleet.on_time(now_s))) == 1
    assert delays_s == [1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0]


def test_an_attempt_that_fails_as_soon_as_it_was_due_is_another_failure() -> None:
    fleet = serving(1)
    fleet.on_gone(I0, 0.0)
    fleet.on_start_failed(I1, "no memory", 10.0)
    fleet.on_time(11.0)
    fleet.on_start_failed(I2, "no memory", 11.0)
    assert fleet.next_deadline_s == 13.0


def test_a_start_that_comes_up_ends_the_waiting_for_the_others() -> None:
    fleet = serving(1)
    fleet.on_add(2, 2.0)
    fleet.on_start_failed(I1, "no memory", 3.0)
    assert fleet.next_deadline_s == 4.0
    assert started(fleet.on_started(I2, 3.5)) == [I3]
    assert fleet.next_deadline_s is None


def test_what_is_called_off_waits_for_no_attempt() -> None:
    """The start that failed is not to be tried again."""
    fleet = serving(2)
    fleet.on_pool(1, 2.0)
    fleet.on_start_failed(I2, "no memory", 3.0)
    assert fleet.next_deadline_s == 4.0
    fleet.on_pool(0, 3.5)
    assert fleet.next_deadline_s is None


def test_options_with_which_a_cluster_begins_are_never_given_up() -> None:
    """There are no others to go back to."""
    fleet = Fleet(1)
    fleet.begin(0.0)
    assert fleet.on_start_failed(I0, "no such model", 1.0) == [Announce()]
    assert started(fleet.on_time(2.0)) == [I1]


def test_a_failed_start_is_tried_again_later_and_later() -> None:
    fleet = serving(1)
    fleet.on_gone(I0, 2.0)
    assert started(fleet.on_start_failed(I1, "no memory", 10.0)) == []
    assert fleet.next_deadline_s == 10.0 + RETRY_DELAYS_S[0]
    assert started(fleet.on_time(10.0)) == []
    assert started(fleet.on_time(11.0)) == [I2]
    fleet.on_start_failed(I2, "no memory", 20.0)
    assert fleet.next_deadline_s == 20.0 + RETRY_DELAYS_S[1]
    assert started(fleet.on_time(22.0)) == [I3]
    fleet.on_started(I3, 23.0)
    assert fleet.next_deadline_s is None


def test_starts_that_fail_together_are_one_failure() -> None:
    fleet = serving(1)
    starts = started(fleet.on_add(3, 2.0))
    for instance_id, at_s in zip(starts, (10.0, 10.2, 10.4), strict=True):
        fleet.on_start_failed(instance_id, "no memory", at_s)
    assert fleet.next_deadline_s == 10.0 + RETRY_DELAYS_S[0]
    (again, *_) = started(fleet.on_time(11.0))
    fleet.on_start_failed(again, "no memory", 20.0)
    assert fleet.next_deadline_s == 20.0 + RETRY_DELAYS_S[1]


def test_a_successor_goes_on_with_what_it_finds() -> None:
    """A start that has ended meanwhile, an order to end that may have been lost, a death."""
    fleet = serving(3)
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_emptied(I0, 3.0)
    fleet.on_add(1, 4.0)
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(fleet), type=Fleet)
    assert restored == fleet
    effects = restored.on_takeover({I0, I2, I3}, 5.0)
    assert closed(effects) == [I0]
    assert started(effects) == [InstanceId("i4")]
    assert phases(restored)[I3] is Phase.SERVING


def test_a_start_that_has_ended_is_not_called_off_by_what_a_successor_finds_besides() -> None:
    """It waited for its place when its supervisor died, and is up when the successor looks."""
    fleet = serving(2)
    fleet.on_pool(1, 2.0)
    fleet.on_add(1, 3.0)
    fleet.on_pending(I3, "no node has a GPU")
    fleet.num_warm = 0
    effects = fleet.on_takeover({I0, I1, I2, I3}, 4.0)
    assert not any(isinstance(each, CancelStart) for each in effects)
    assert closed(effects) == [I3]


@pytest.mark.parametrize(("stranger", "next_one"), [("i7", "i8"), ("i2", "i4"), ("i3", "i4")])
def test_a_successor_uses_no_name_of_a_stranger_and_none_that_was_used_before(
    stranger: str, next_one: str
) -> None:
    """Of four that were begun, `i2` and `i3` have ended; `i7` nobody has told of."""
    fleet = serving(4)
    for instance_id in (I2, I3):
        fleet.on_terminate(instance_id, Cause.SCALING, 2.0)
        fleet.on_gone(instance_id, 3.0)
    effects = fleet.on_takeover({I0, InstanceId(stranger)}, 4.0)
    assert effects == [Announce(), Start(InstanceId(next_one), 0)]
    assert phases(fleet) == {I0: Phase.SERVING, InstanceId(next_one): Phase.STARTING}


def test_what_is_not_needed_any_more_and_has_no_place_yet_is_given_up_first() -> None:
    fleet = serving(2, max_instances=4)
    fleet.on_add(2, 2.0)
    fleet.on_pending(I3, "no node has a GPU")
    assert fleet.on_terminate(I0, Cause.SCALING, 3.0) == [Announce(), Announce(), CancelStart(I3)]
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SERVING, I2: Phase.STARTING}
    assert fleet.on_terminate(I0, Cause.SCALING, 4.0) == [Announce()]
    assert phases(fleet)[I0] is Phase.TERMINATING


def test_of_starts_without_a_place_the_newest_is_given_up() -> None:
    """The oldest is the first to get one."""
    fleet = serving(1, max_instances=4)
    for instance_id in started(fleet.on_add(3, 2.0)):
        fleet.on_pending(instance_id, "no node has a GPU")
    given_up = [
        each
        for _ in range(3)
        for each in fleet.on_terminate(I0, Cause.SCALING, 3.0)
        if isinstance(each, CancelStart)
    ]
    assert given_up == [CancelStart(I3), CancelStart(I2), CancelStart(I1)]


def test_starts_without_a_place_are_kept_where_others_are_to_be_tried_again() -> None:
    fleet = serving(1, max_instances=4)
    fleet.on_add(3, 2.0)
    for instance_id in (I1, I2):
        fleet.on_pending(instance_id, "no node has a GPU")
    assert fleet.on_start_failed(I3, "no memory", 3.0) == [Announce()]
    assert fleet.in_phase(Phase.STARTING) == (I1, I2)


def test_what_a_start_waited_for_is_forgotten_when_it_is_up() -> None:
    fleet = serving(1)
    fleet.on_pool(1, 2.0)
    fleet.on_pending(I1, "no node has a GPU")
    # Nobody could say that it has a place: the supervisor had died.
    fleet.on_takeover({I0, I1}, 3.0)
    assert fleet.members[I1] == Member(0, Phase.WARM)


def test_a_start_without_a_place_is_given_up_before_the_last_instance_that_serves() -> None:
    fleet = serving(1, max_instances=4)
    fleet.on_needed(1, 2.0)
    fleet.on_pending(I1, "no node has a GPU")
    assert fleet.on_terminate(I0, Cause.SCALING, 3.0) == [Announce(), Announce(), CancelStart(I1)]
    assert phases(fleet) == {I0: Phase.SERVING}


def test_where_a_start_is_to_be_tried_again_none_that_serves_ends() -> None:
    """It would be started instead of the one that ends."""
    fleet = serving(2, max_instances=4)
    fleet.on_add(1, 2.0)
    fleet.on_start_failed(I2, "no memory", 3.0)
    # The front ends show how many are wanted.
    assert fleet.on_terminate(I1, Cause.SCALING, 3.5) == [Announce()]
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SERVING}
    assert fleet.next_deadline_s is None
    assert started(fleet.on_time(60.0)) == []
    # The next time it is one that serves.
    fleet.on_terminate(I1, Cause.SCALING, 70.0)
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.TERMINATING}
    assert started(fleet.on_gone(I1, 80.0)) == []


def test_a_warm_one_that_does_not_start_keeps_no_instance_from_ending() -> None:
    fleet = serving(2, max_instances=4)
    for instance_id in started(fleet.on_pool(1, 2.0)):
        fleet.on_start_failed(instance_id, "no memory", 3.0)
    fleet.on_terminate(I1, Cause.SCALING, 3.5)
    assert phases(fleet)[I1] is Phase.TERMINATING


def test_auto_scaling_that_asks_again_while_starts_fail_does_not_raise_what_is_wanted() -> None:
    fleet = serving(1, max_instances=8)
    for at_s in (2.0, 2.2, 2.4):
        starts = started(fleet.on_needed(1, at_s))
        for instance_id in starts:
            fleet.on_start_failed(instance_id, "no memory", at_s)
    assert fleet.wanted == 2


def test_a_successor_that_an_undone_drain_makes_needless_ends() -> None:
    fleet = serving(2, min_instances=2)
    assert started(fleet.on_terminate(I0, Cause.OPERATOR, 2.0)) == [I2]
    fleet.on_undo(I0, 3.0)
    assert closed(fleet.on_started(I2, 4.0)) == [I2]
    assert phases(fleet)[I0] is Phase.SERVING


def test_one_whose_drain_is_undone_when_it_has_been_replaced_takes_a_warm_ones_place() -> None:
    fleet = serving(2, min_instances=2, max_instances=2)
    assert started(fleet.on_terminate(I0, Cause.OPERATOR, 2.0)) == [I2]
    fleet.on_started(I2, 3.0)
    fleet.on_undo(I0, 4.0)
    assert list(phases(fleet).values()) == [Phase.SERVING] * 3
    # It serves until it is drained again, beyond what is wanted, and no more than that is up.
    assert started(fleet.on_pool(1, 5.0)) == []
    assert started(fleet.on_gone(I0, 6.0)) == [I3]


# ------------------------------------------------------------------------------- warm instances


def test_a_warm_instance_is_up_and_serves_as_soon_as_it_is_needed() -> None:
    fleet = serving(1)
    assert started(fleet.on_pool(1, 2.0)) == [I1]
    assert fleet.on_started(I1, 3.0) == [Announce()]
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.WARM}
    # It serves at once, and the pool is filled again.
    effects = fleet.on_add(1, 4.0)
    assert phases(fleet)[I1] is Phase.SERVING
    assert Announce() in effects
    assert started(effects) == [I2]


def test_a_warm_instance_takes_the_place_of_one_that_died() -> None:
    fleet = serving(1)
    fleet.on_pool(1, 2.0)
    fleet.on_started(I1, 3.0)
    fleet.on_gone(I0, 4.0)
    assert phases(fleet)[I1] is Phase.SERVING


def pool_of(*, up: int, pending: int = 0) -> Fleet:
    """One instance that serves, so many warm ones, and starts of some that wait for a place."""
    fleet = serving(1)
    starts = started(fleet.on_pool(up + pending, 2.0))
    for instance_id in starts[:up]:
        fleet.on_started(instance_id, 3.0)
    for instance_id in starts[up:]:
        fleet.on_pending(instance_id, "no node has a GPU")
    return fleet


def test_a_smaller_pool_gives_up_starts_without_a_place_and_then_the_newest_warm_ones() -> None:
    fleet = pool_of(up=2, pending=1)
    assert fleet.on_pool(2, 4.0) == [Announce(), CancelStart(I3)]
    assert fleet.on_pool(1, 5.0) == [Announce(), Close(I2)]
    assert fleet.members[I2].cause is Cause.SCALING
    assert fleet.on_pool(0, 6.0) == [Announce(), Close(I1)]
    fleet = pool_of(up=2, pending=1)
    assert fleet.on_pool(0, 4.0) == [Announce(), CancelStart(I3), Close(I1), Close(I2)]


def test_a_smaller_pool_gives_up_no_more_starts_than_it_must() -> None:
    fleet = pool_of(up=0, pending=3)
    assert fleet.on_pool(1, 4.0) == [Announce(), CancelStart(I3), CancelStart(I2)]
    assert pool_of(up=1, pending=1).on_time(4.0) == []


def test_a_larger_pool_is_filled() -> None:
    assert pool_of(up=1).on_pool(3, 4.0) == [Start(I2, 0), Start(I3, 0)]


def test_no_more_warm_ones_serve_than_are_wanted() -> None:
    fleet = pool_of(up=2)
    fleet.on_add(1, 4.0)
    assert phases(fleet)[I1] is Phase.SERVING
    assert phases(fleet)[I2] is Phase.WARM


def test_warm_ones_stay_warm_while_more_serve_than_are_wanted() -> None:
    """A drain was undone when its instance had been replaced."""
    fleet = serving(2, min_instances=2)
    fleet.on_terminate(I0, Cause.OPERATOR, 2.0)
    fleet.on_started(I2, 3.0)
    fleet.on_pool(2, 4.0)
    for instance_id in fleet.in_phase(Phase.STARTING):
        fleet.on_started(instance_id, 5.0)
    fleet.on_undo(I0, 6.0)
    assert fleet.in_phase(Phase.SERVING) == (I0, I1, I2)


def test_a_warm_one_that_dies_is_replaced() -> None:
    fleet = pool_of(up=1)
    assert fleet.on_gone(I1, 4.0) == [Announce(), Start(I2, 0)]


def test_an_undone_drain_whose_instance_was_replaced_takes_the_place_of_a_warm_one() -> None:
    """More instances serve than are wanted: they count for the warm pool."""
    fleet = serving(2, max_instances=2)
    fleet.on_pool(1, 2.0)
    fleet.on_started(I2, 3.0)
    fleet.on_terminate(I0, Cause.OPERATOR, 4.0)
    fleet.on_add(1, 5.0)
    fleet.on_started(I3, 6.0)
    assert fleet.in_phase(Phase.SERVING, Phase.WARM) == (I1, I2, I3)
    assert closed(fleet.on_undo(I0, 7.0)) == [I3]
    assert fleet.in_phase(Phase.SERVING) == (I0, I1, I2)
