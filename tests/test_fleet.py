"""What the supervisor has done about its instances."""

import msgspec
import pytest

from sterna.errors import FleetError, UnknownInstanceError
from sterna.fleet import RETRY_DELAYS_S, Announce, CancelStart, Cause, Close, Fleet, Phase, Start
from sterna.types import InstanceId
from tests.fleets import I0, I1, I2, I3, closed, phases, serving, started


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
        (I0, FleetError, "i0 is being emptied already: an operator drains it"),
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


def test_an_instance_that_starts_cannot_be_drained() -> None:
    fleet = serving()
    fleet.on_add(1, 2.0)
    with pytest.raises(FleetError, match="i2 does not serve yet"):
        fleet.on_terminate(I2, Cause.OPERATOR, 3.0)


def test_an_undo_without_a_drain_is_refused() -> None:
    with pytest.raises(FleetError, match="i0 is not being drained"):
        serving().on_undo(I0, 2.0)


def test_no_more_are_added_than_the_maximum() -> None:
    fleet = serving(2, max_instances=3)
    assert started(fleet.on_add(5, 2.0)) == [I2]


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
    fleet.num_spares = 0
    effects = fleet.on_takeover({I0, I1, I2, I3}, 4.0)
    assert not any(isinstance(each, CancelStart) for each in effects)
    assert closed(effects) == [I3]


def test_what_is_not_needed_any_more_and_has_no_place_yet_is_given_up_first() -> None:
    fleet = serving(2, max_instances=4)
    fleet.on_add(2, 2.0)
    fleet.on_pending(I3, "no node has a GPU")
    assert fleet.on_terminate(I0, Cause.SCALING, 3.0) == [Announce(), CancelStart(I3)]
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SERVING, I2: Phase.STARTING}
    assert fleet.on_terminate(I0, Cause.SCALING, 4.0) == [Announce()]
    assert phases(fleet)[I0] is Phase.TERMINATING


def test_a_start_without_a_place_is_given_up_before_the_last_instance_that_serves() -> None:
    fleet = serving(1, max_instances=4)
    fleet.on_needed(1, 2.0)
    fleet.on_pending(I1, "no node has a GPU")
    assert fleet.on_terminate(I0, Cause.SCALING, 3.0) == [Announce(), CancelStart(I1)]
    assert phases(fleet) == {I0: Phase.SERVING}


def test_where_a_start_is_to_be_tried_again_none_that_serves_ends() -> None:
    """It would be started instead of the one that ends."""
    fleet = serving(2, max_instances=4)
    fleet.on_add(1, 2.0)
    fleet.on_start_failed(I2, "no memory", 3.0)
    fleet.on_terminate(I1, Cause.SCALING, 3.5)
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
    fleet.on_started(I1, 3.0)
    assert phases(fleet) == {I0: Phase.SERVING, I1: Phase.SPARE}
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
