"""A measurement waits for a machine that others slow down."""

import pytest

from bench.common.pace import MAX_ATTEMPTS, WAIT_TIMEOUT_S, Pace, at_one_speed, speed


class Machine:
    """Has these speeds, one after the other, and then the last one."""

    def __init__(self, *speeds: float) -> None:
        self._speeds = list(speeds)
        self.said: list[str] = []
        self.waited_s = 0.0

    def speed(self) -> float:
        return self._speeds.pop(0) if len(self._speeds) > 1 else self._speeds[0]

    def wait(self, seconds: float) -> None:
        self.waited_s += seconds

    def pace(self, first: float | None = None) -> Pace:
        return Pace(first, self.said.append, speed=self.speed, wait=self.wait)


def test_the_first_speed_is_measured_or_given() -> None:
    assert Machine(50.0).pace().first == 50.0
    assert Machine(50.0).pace(40.0).first == 40.0


@pytest.mark.parametrize(
    ("now", "is_kept"), [(100.0, True), (81.0, True), (119.0, True), (79.0, False), (121.0, False)]
)
def test_a_fifth_more_or_less_is_as_fast(now: float, is_kept: bool) -> None:
    machine = Machine(now)
    assert machine.pace(100.0).is_kept() is is_kept
    assert bool(machine.said) is not is_kept


@pytest.mark.parametrize(("now", "is_kept"), [(60.0, True), (50.0, False), (90.0, False)])
def test_runs_of_a_pair_are_held_to_its_beginning(now: float, is_kept: bool) -> None:
    """Not to that of the measurement: what matters is that they are equally fast."""
    machine = Machine(70.0, now)
    pace = machine.pace(100.0)
    assert pace.wait_until_kept()
    assert not machine.said
    assert pace.is_kept() is is_kept


def test_a_slow_machine_is_waited_for_and_said_to_be_slow() -> None:
    machine = Machine(50.0, 60.0, 90.0)
    assert machine.pace(100.0).wait_until_kept()
    assert machine.said == [
        "the machine is 0.50 times as fast as at first",
        "the machine is 0.60 times as fast as at first",
    ]
    assert machine.waited_s > 0.0


def test_patience_has_an_end() -> None:
    machine = Machine(50.0)
    assert not machine.pace(100.0).wait_until_kept()
    assert machine.waited_s == WAIT_TIMEOUT_S


def test_where_only_pairs_are_compared_another_speed_is_not_waited_for() -> None:
    machine = Machine(150.0, 150.0, 150.0, 50.0, 50.0, 50.0)
    pace = Pace(100.0, machine.said.append, is_held=False, speed=machine.speed, wait=machine.wait)
    for _ in range(2):
        runs, is_steady = at_one_speed(pace, ["a", "b"], lambda side, _: side, machine.said.append)
        assert (runs, is_steady) == (["a", "b"], True)
    assert (machine.said, machine.waited_s) == ([], 0.0)


@pytest.mark.slow
def test_the_speed_is_that_of_this_machine() -> None:
    """A toaster is slower, and no two cores do 100,000 billions a second."""
    assert 0.01 < speed() < 100_000.0


@pytest.mark.parametrize(
    ("speeds", "runs", "is_steady"),
    [
        # Before both, after each.
        ([100.0, 100.0, 100.0], ["a1", "b1"], True),
        # Slower after the first run: b does not run, and both are measured again.
        ([100.0, 50.0, 100.0, 100.0, 100.0], ["a1", "a2", "b2"], True),
        # Slower after the first run of each attempt: both runs of the last one are kept.
        ([100.0, 50.0] * MAX_ATTEMPTS, ["a1", "a2", "a3", "b3"], False),
    ],
)
def test_runs_at_two_speeds_are_measured_again(
    speeds: list[float], runs: list[str], is_steady: bool
) -> None:
    machine = Machine(*speeds)
    done: list[str] = []

    def run(side: str, attempt: int) -> str:
        done.append(f"{side}{attempt}")
        return done[-1]

    kept, found = at_one_speed(machine.pace(100.0), ["a", "b"], run, machine.said.append)
    assert (done, kept, found) == (runs, runs[-2:], is_steady)
    assert at_one_speed(None, ["a", "b"], run, machine.said.append) == (["a1", "b1"], True)
