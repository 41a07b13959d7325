"""Checks of a fleet by the simulator under faults, when the faults are over."""

import pytest

from fault_simulation.oracle.fleet_checks import DRAIN_LIMIT_S, Drains, unsettled
from fault_simulation.virtual.timeline import Violation
from sterna.supervisor.fleet import Cause, Fleet
from sterna.types import InstanceId

I0, I1, I2 = (InstanceId(f"i{number}") for number in range(3))


def fleet() -> Fleet:
    """One with two instances, which serve."""
    fleet = Fleet(2)
    fleet.begin(0.0)
    for instance_id in (I0, I1):
        fleet.on_started(instance_id, 0.0)
    return fleet


def test_a_fleet_that_has_what_it_wants_is_settled() -> None:
    assert unsettled(fleet(), {I0, I1}, has_place=True) is None


def test_an_instance_that_acts_and_is_no_member_is_found() -> None:
    assert unsettled(fleet(), {I0, I1, I2}, has_place=True) is not None
    assert unsettled(fleet(), {I0}, has_place=True) is not None


def test_an_instance_that_is_being_emptied_is_waited_for_until_it_is_gone() -> None:
    under_test = fleet()
    under_test.on_add(1, 0.0)
    under_test.on_started(I2, 0.0)
    under_test.on_terminate(I0, Cause.OPERATOR, 0.0)
    assert unsettled(under_test, {I0, I1, I2}, has_place=True) == "the fleet is still emptying i0"
    under_test.on_emptied(I0, 0.0)
    assert unsettled(under_test, {I1, I2}, has_place=True) == "the fleet is still emptying i0"
    under_test.on_gone(I0, 0.0)
    assert unsettled(under_test, {I1, I2}, has_place=True) is None


def test_a_start_is_waited_for_unless_it_waits_for_a_place() -> None:
    under_test = fleet()
    under_test.on_add(1, 0.0)
    assert unsettled(under_test, {I0, I1}, has_place=False) == "the fleet is still starting i2"
    under_test.on_pending(I2, "no place")
    assert unsettled(under_test, {I0, I1}, has_place=True) == "the fleet is still starting i2"
    assert unsettled(under_test, {I0, I1}, has_place=False) is None


def test_a_start_that_is_to_be_tried_again_is_waited_for() -> None:
    under_test = fleet()
    under_test.on_add(1, 0.0)
    under_test.on_start_failed(I2, "failed", 0.0)
    assert unsettled(under_test, {I0, I1}, has_place=True) == "2 instances serve, and 3 are wanted"


def test_a_restart_is_waited_for_unless_its_surge_has_no_place() -> None:
    under_test = fleet()
    under_test.on_restart(0.0)
    assert unsettled(under_test, {I0, I1}, has_place=True) == "the fleet is still starting i2"
    under_test.on_pending(I2, "no place")
    assert unsettled(under_test, {I0, I1}, has_place=False) is None


@pytest.mark.parametrize("calm_s", [0.0, 100.0])
def test_a_drain_may_take_some_time_without_faults(calm_s: float) -> None:
    under_test, drains = fleet(), Drains()
    under_test.on_terminate(I0, Cause.OPERATOR, 0.0)
    drains.check(under_test, 0.0, calm_s)
    drains.check(under_test, calm_s + DRAIN_LIMIT_S, calm_s)
    under_test.on_emptied(I0, 0.0)
    under_test.on_gone(I0, 0.0)
    with pytest.raises(Violation, match=r"i0 has been emptied for 15\.1 s"):
        drains.check(under_test, calm_s + DRAIN_LIMIT_S + 0.1, calm_s)


def test_a_drain_that_is_undone_and_ordered_again_begins_anew() -> None:
    under_test, drains = fleet(), Drains()
    for now_s in (0.0, DRAIN_LIMIT_S):
        under_test.on_terminate(I0, Cause.OPERATOR, now_s)
        drains.check(under_test, now_s, 0.0)
        under_test.on_undo(I0, now_s)
        drains.check(under_test, now_s, 0.0)
    drains.check(under_test, 10 * DRAIN_LIMIT_S, 0.0)
