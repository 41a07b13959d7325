"""What the supervisor has done about its instances, by example and at random."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sterna.errors import FleetError, UnknownInstanceError
from sterna.fleet import (
    RETRY_DELAYS_S,
    Announce,
    CancelStart,
    Cause,
    Close,
    Fleet,
    FleetEffect,
    GiveUpGeneration,
    Phase,
    Start,
)
from sterna.types import InstanceId

I0, I1, I2, I3 = (InstanceId(f"i{k}") for k in range(4))


def started(effects: list[FleetEffect]) -> list[InstanceId]:
    return [each.instance_id for each in effects if isinstance(each, Start)]


def closed(effects: list[FleetEffect]) -> list[InstanceId]:
    return [each.instance_id for each in effects if isinstance(each, Close)]


def serving(wanted: int = 2, **options: int) -> Fleet:
    """A fleet whose first instances are up."""
    fleet = Fleet(wanted, **options)
    for instance_id in started(fleet.begin(0.0)):
        fleet.on_started(instance_id, 1.0)
    return fleet


def phases(fleet: Fleet) -> dict[InstanceId, Phase]:
    return {each: member.phase for each, member in fleet.members.items()}


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


# ------------------------------------------------------------------------------ rolling restart


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


# ------------------------------------------------------------------------------------ at random


class FleetUnderWeather(RuleBasedStateMachine):
    """Whatever happens, in whatever order: the fleet comes to what is wanted, and never empties
    the last instance that takes requests."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(2, max_instances=4)
        self.now_s = 0.0
        self.ids: set[InstanceId] = set()
        self.take(self.fleet.begin(0.0))

    def take(self, effects: list[FleetEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Start):
                assert effect.instance_id not in self.ids, "an id is used once"
                self.ids.add(effect.instance_id)

    def time(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def pick(self, data: st.DataObject, *among: Phase) -> InstanceId:
        return data.draw(st.sampled_from(self.fleet.in_phase(*among)))

    @precondition(lambda self: self.fleet.in_phase(Phase.STARTING))
    @rule(data=st.data(), comes_up=st.booleans())
    def start_ends(self, data: st.DataObject, comes_up: bool) -> None:
        instance_id = self.pick(data, Phase.STARTING)
        if comes_up:
            self.take(self.fleet.on_started(instance_id, self.time()))
        else:
            self.take(self.fleet.on_start_failed(instance_id, "bad luck", self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.TERMINATING))
    @rule(data=st.data())
    def is_emptied(self, data: st.DataObject) -> None:
        self.take(self.fleet.on_emptied(self.pick(data, Phase.TERMINATING), self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.CLOSING))
    @rule(data=st.data())
    def has_closed(self, data: st.DataObject) -> None:
        self.take(self.fleet.on_gone(self.pick(data, Phase.CLOSING), self.time()))

    @precondition(lambda self: self.fleet.members)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        phases = (Phase.SPARE, Phase.SERVING, Phase.TERMINATING, Phase.CLOSING)
        if self.fleet.in_phase(*phases):
            self.take(self.fleet.on_gone(self.pick(data, *phases), self.time()))

    @precondition(lambda self: self.fleet.members)
    @rule(data=st.data(), cause=st.sampled_from([Cause.OPERATOR, Cause.SCALING]))
    def terminate(self, data: st.DataObject, cause: Cause) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.fleet.members)))
        num_serving = len(self.fleet.in_phase(Phase.SERVING))
        was_serving = self.fleet.members[instance_id].phase is Phase.SERVING
        try:
            self.take(self.fleet.on_terminate(instance_id, cause, self.time()))
        except FleetError:
            assert not was_serving or num_serving == 1

    @precondition(lambda self: self.fleet.in_phase(Phase.TERMINATING))
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        instance_id = self.pick(data, Phase.TERMINATING)
        is_replaced = self.fleet.members[instance_id].cause is Cause.RESTART
        try:
            self.take(self.fleet.on_undo(instance_id, self.time()))
            assert not is_replaced
        except FleetError:
            assert is_replaced

    @rule(num=st.integers(1, 3))
    def add(self, num: int) -> None:
        self.take(self.fleet.on_add(num, self.time()))

    @rule(num=st.integers(1, 3))
    def is_needed(self, num: int) -> None:
        self.take(self.fleet.on_needed(num, self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.STARTING))
    @rule(data=st.data())
    def waits_for_a_place(self, data: st.DataObject) -> None:
        self.take(self.fleet.on_pending(self.pick(data, Phase.STARTING), "no place"))

    @rule(num=st.integers(0, 2))
    def pool(self, num: int) -> None:
        self.take(self.fleet.on_pool(num, self.time()))

    @rule(data=st.data())
    def supervisor_dies(self, data: st.DataObject) -> None:
        """Its successor has its state, and finds who lives."""
        self.fleet = msgspec.msgpack.decode(msgspec.msgpack.encode(self.fleet), type=Fleet)
        found = [each for each in self.fleet.members if data.draw(st.booleans())]
        self.take(self.fleet.on_takeover(found, self.time()))

    @precondition(lambda self: not self.fleet.is_restarting)
    @rule(has_surge=st.booleans())
    def restart(self, has_surge: bool) -> None:
        self.take(self.fleet.on_restart(self.time(), has_surge=has_surge))

    @invariant()
    def what_is_wanted_is_within_the_limits(self) -> None:
        assert 1 <= self.fleet.wanted <= 4

    @invariant()
    def whoever_empties_has_a_cause(self) -> None:
        for member in self.fleet.members.values():
            is_leaving = member.phase in (Phase.TERMINATING, Phase.CLOSING)
            assert (member.cause is not None) == is_leaving

    def teardown(self) -> None:
        """With luck from here on, all comes to what is wanted, of the newest options."""
        fleet = self.fleet
        for _ in range(200):
            self.now_s += 100.0
            self.take(fleet.on_time(self.now_s))
            for instance_id in fleet.in_phase(Phase.STARTING):
                # What one start brings may call off another.
                if instance_id in fleet.members:
                    self.take(fleet.on_started(instance_id, self.now_s))
            for instance_id in fleet.in_phase(Phase.TERMINATING):
                self.take(fleet.on_emptied(instance_id, self.now_s))
            for instance_id in fleet.in_phase(Phase.CLOSING):
                self.take(fleet.on_gone(instance_id, self.now_s))
        assert not fleet.is_restarting
        num_surplus = len(fleet.in_phase(Phase.SERVING)) - fleet.wanted
        assert num_surplus >= 0
        assert len(fleet.in_phase(Phase.SPARE)) == max(0, fleet.num_spares - num_surplus)
        assert not fleet.in_phase(Phase.STARTING, Phase.TERMINATING, Phase.CLOSING)


TestFleetUnderWeather = FleetUnderWeather.TestCase
TestFleetUnderWeather.settings = settings(max_examples=100, stateful_step_count=40)
