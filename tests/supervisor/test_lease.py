"""An instance whose lease has ended for its supervisor has ended by itself, whatever the network
and the clocks do."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.supervisor.lease import DRIFT, MARGIN_S, GrantedLeases, HeldLease

LEASE_S = 20.0
BEAT_S = 0.25


def test_a_lease_counts_from_when_the_instance_asked() -> None:
    lease = HeldLease(LEASE_S, 100.0)
    lease.on_answer(103.0)
    assert lease.ends_s == 123.0
    assert not lease.has_ended(122.9)
    assert lease.has_ended(123.0)


def test_an_answer_that_comes_late_or_twice_extends_nothing() -> None:
    lease = HeldLease(LEASE_S, 100.0)
    for asked_s in (110.0, 103.0, 110.0, 99.0):
        lease.on_answer(asked_s)
        assert lease.ends_s == 130.0


def test_a_lease_has_ended_for_certain_a_little_later_than_it_lasts() -> None:
    leases = GrantedLeases(LEASE_S)
    leases.grant("i0", 0.0)
    assert leases.may_answer("i0", 5.0)
    certain_s = 5.0 + LEASE_S * (1 + DRIFT) + MARGIN_S
    assert leases.certain_s("i0") == certain_s
    assert round(certain_s, 6) == 25.7, "a hundredth and half a second more"
    assert leases.ended(certain_s - 0.01) == []
    assert leases.ended(certain_s) == ["i0"]


def test_who_is_to_end_is_not_answered_any_more() -> None:
    leases = GrantedLeases(LEASE_S)
    leases.grant("i0", 0.0)
    leases.end("i0")
    assert not leases.may_answer("i0", 5.0)
    assert leases.certain_s("i0") < 5.0 + LEASE_S


def test_who_is_not_known_is_not_answered() -> None:
    """It may be dead to everybody else: a lease would let it act."""
    leases = GrantedLeases(LEASE_S)
    assert not leases.may_answer("i0", 0.0)
    leases.grant("i0", 0.0)
    leases.forget("i0")
    assert not leases.may_answer("i0", 1.0)
    assert leases.ended(1000.0) == []


def test_of_who_is_dead_nothing_is_remembered() -> None:
    leases = GrantedLeases(LEASE_S)
    leases.grant("i0", 0.0)
    leases.end("i0")
    leases.forget("i0")
    leases.forget("i0")
    leases.grant("i0", 10.0)
    assert leases.may_answer("i0", 15.0)


class World:
    """An instance and supervisors over a bad network, in one true time that nobody knows.

    Args:
        offset_s: what the instance's clock shows at the true time 0.
        pace: how fast it runs; the supervisor's runs at 1.
    """

    def __init__(self, offset_s: float, pace: float) -> None:
        self._offset_s, self._pace = offset_s, pace
        self.lease = HeldLease(LEASE_S, self.instance_s(0.0))
        self.leases = GrantedLeases(LEASE_S)
        self.leases.grant("i0", 0.0)
        self._to_supervisor: list[tuple[float, float]] = []
        self._to_instance: list[tuple[float, float]] = []

    def instance_s(self, true_s: float) -> float:
        return self._offset_s + self._pace * true_s

    def acts(self, true_s: float) -> bool:
        return not self.lease.has_ended(self.instance_s(true_s))

    def acts_until_s(self) -> float:
        """When, in true time, its lease ends unless it is extended."""
        return (self.lease.ends_s - self._offset_s) / self._pace

    def is_given_up(self, true_s: float) -> bool:
        return self.leases.ended(true_s) == ["i0"]

    def ask(self, true_s: float, arrives_s: float) -> None:
        if self.acts(true_s):
            self._to_supervisor.append((arrives_s, self.instance_s(true_s)))

    def succeed(self, true_s: float) -> None:
        """The supervisor dies, and another takes over; what was sent is still under way."""
        if not self.is_given_up(true_s):
            self.leases = GrantedLeases(LEASE_S)
            self.leases.grant("i0", true_s)

    def deliver(self, true_s: float, answer_takes_s: float) -> None:
        due = sorted(each for each in self._to_supervisor if each[0] <= true_s)
        self._to_supervisor = [each for each in self._to_supervisor if each[0] > true_s]
        for _, asked_s in due:
            if not self.is_given_up(true_s) and self.leases.may_answer("i0", true_s):
                self._to_instance.append((true_s + answer_takes_s, asked_s))
        for arrives_s, asked_s in list(self._to_instance):
            # One that has ended has no ears any more.
            if arrives_s <= true_s and self.acts(true_s):
                self.lease.on_answer(asked_s)
        self._to_instance = [each for each in self._to_instance if each[0] > true_s]


DELAYS_S = st.one_of(st.floats(0.0, 0.5), st.floats(0.0, 60.0), st.just(float("inf")))


@given(
    offset_s=st.floats(-1e6, 1e6),
    pace=st.floats(1 / (1 + DRIFT), 1 + DRIFT),
    steps=st.lists(
        st.tuples(st.floats(0.0, 30.0), DELAYS_S, DELAYS_S, st.integers(0, 9)), max_size=60
    ),
)
def test_who_is_given_up_never_acts(
    offset_s: float, pace: float, steps: list[tuple[float, float, float, int]]
) -> None:
    """Whatever is lost, late or twice, and however often the supervisor is replaced."""
    world, true_s, is_given_up = World(offset_s, pace), 0.0, False
    for pause_s, there_s, back_s, chance in steps:
        true_s += pause_s
        world.deliver(true_s, back_s)
        assert world.acts_until_s() < world.leases.certain_s("i0")
        is_given_up = is_given_up or world.is_given_up(true_s)
        if is_given_up:
            assert not world.acts(true_s)
        if chance == 0:
            world.succeed(true_s)
        world.ask(true_s, true_s + there_s)


@given(offset_s=st.floats(-1e6, 1e6), cut_s=st.floats(0.0, LEASE_S - 2.0))
def test_a_cut_that_is_shorter_than_the_lease_ends_nobody(offset_s: float, cut_s: float) -> None:
    world = World(offset_s, 1.0)
    true_s = 0.0
    while true_s < 100.0:
        is_cut = 30.0 <= true_s < 30.0 + cut_s
        world.ask(true_s, float("inf") if is_cut else true_s + 0.01)
        true_s += BEAT_S
        world.deliver(true_s, 0.0)
        assert world.acts(true_s)
        assert not world.is_given_up(true_s)


@given(offset_s=st.floats(-1e6, 1e6))
def test_who_is_cut_off_for_good_ends_and_is_given_up_soon_after(offset_s: float) -> None:
    world = World(offset_s, 1.0)
    assert world.acts(LEASE_S - 0.1)
    assert not world.acts(LEASE_S + 0.1)
    assert not world.is_given_up(LEASE_S)
    assert world.is_given_up(LEASE_S + 1.0)
