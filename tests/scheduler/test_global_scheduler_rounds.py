"""The global scheduler's rounds: pairing and auto-scaling (Sections 4.3 and 4.4.3)."""

from dataclasses import replace

import pytest

from sterna.config import PolicyConfig, ScalingConfig
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import INFAAS_PP, LLUMNIX, ROUND_ROBIN
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.policy.selection import candidates_to_move
from sterna.scheduler.global_scheduler import Effect, GlobalScheduler, SetDestination
from sterna.types import NORMAL, FrontendId, InstanceId, InstanceView, RequestId
from tests.policy.builders import M, evenly_loaded, freeness, instance, queuing, report
from tests.scheduler.test_global_scheduler import ask

OVERLOADED = evenly_loaded("i0", 12_640, 20)
IDLE = instance("i1")
RELIEVED = evenly_loaded("i0", 8_000, 8)


def scheduler(
    *views: InstanceView,
    policy: PolicyConfig = LLUMNIX,
    scaling: ScalingConfig | None = None,
) -> GlobalScheduler:
    """A scheduler at second 0 to which these instances have reported."""
    built = GlobalScheduler(policy, now_s=0.0, scaling=scaling)
    for view in views:
        built.on_load(report(view, policy), 0.0)
    return built


def told(source: str, destination: str | None) -> SetDestination:
    return SetDestination(
        InstanceId(source), None if destination is None else InstanceId(destination)
    )


def next_round(core: GlobalScheduler) -> list[Effect]:
    """What the next round says, held in time."""
    deadline_s = core.next_deadline_s
    assert deadline_s is not None
    return core.on_tick(deadline_s)


# ----------------------------------------------------------------------------------- pairing


def test_pairing_is_triggered_periodically() -> None:
    """Section 4.4.3: "triggers the migration policy periodically." """
    core = scheduler(OVERLOADED, IDLE)
    assert core.next_deadline_s == pytest.approx(0.2)
    assert core.on_tick(0.19) == []
    assert core.on_tick(0.2) == [told("i0", "i1"), told("i1", None)]
    assert core.next_deadline_s == pytest.approx(0.4)


def test_instances_are_told_in_the_order_of_their_ids() -> None:
    core = scheduler(IDLE, OVERLOADED)
    assert next_round(core) == [told("i0", "i1"), told("i1", None)]


def test_a_source_is_told_its_destination_every_round_and_once_that_it_has_none() -> None:
    """Section 4.4.3: "In the next round, if an instance during migration is no longer beyond the
    thresholds, [it] will unset the migration state and the migration will stop." """
    core = scheduler(OVERLOADED, IDLE)
    next_round(core)
    assert next_round(core) == [told("i0", "i1")]
    assert core.destinations == {"i0": "i1"}
    core.on_load(report(RELIEVED, sequence=2), 0.5)
    assert next_round(core) == [told("i0", None)]
    assert core.destinations == {}
    assert next_round(core) == []


def test_a_source_changes_its_destination_with_the_loads() -> None:
    core = scheduler(OVERLOADED, IDLE)
    next_round(core)
    core.on_load(report(evenly_loaded("i1", 6_400, 4), sequence=2), 0.3)
    core.on_load(report(instance("i2")), 0.3)
    assert next_round(core) == [told("i0", "i2"), told("i2", None)]


def test_an_instance_is_told_of_no_destination_once_since_a_predecessor_may_have_named_one() -> (
    None
):
    """A restarted scheduler has not set it, and still must unset it."""
    restarted = scheduler(RELIEVED, IDLE)
    assert next_round(restarted) == [told("i0", None), told("i1", None)]
    assert next_round(restarted) == []


def test_a_source_loses_its_destination_as_soon_as_that_is_gone() -> None:
    core = scheduler(OVERLOADED, IDLE)
    next_round(core)
    assert core.on_instance_left(InstanceId("i1"), 0.3) == [told("i0", None)]
    assert next_round(core) == []


def test_a_source_that_is_gone_is_told_nothing() -> None:
    core = scheduler(OVERLOADED, IDLE)
    next_round(core)
    assert core.on_instance_left(InstanceId("i0"), 0.3) == []
    assert next_round(core) == []
    assert core.destinations == {}


def test_a_terminating_instance_is_emptied() -> None:
    """Section 4.4.2: "the remaining requests will be migrated to other instances"."""
    core = scheduler(evenly_loaded("i0", 160, 1, is_terminating=True), evenly_loaded("i1", 320, 2))
    assert core.on_tick(0.2)[0] == told("i0", "i1")


def test_a_dispatch_that_was_lost_does_not_keep_its_instance_from_being_a_destination() -> None:
    core = scheduler(OVERLOADED, IDLE)
    lost = DispatchRequest(FrontendId(1), RequestId("lost"), 12_640, 0.0, NORMAL, NORMAL)
    core.on_request(lost, 0.0)
    core.on_tick(29.9)
    assert core.destinations == {}
    core.on_tick(30.2)
    assert core.destinations == {"i0": "i1"}


def test_rounds_that_were_missed_are_not_made_up_for() -> None:
    """Late by less than an interval, the grid stays; by more, the next round is one interval
    away."""
    core = scheduler(OVERLOADED, IDLE)
    core.on_tick(0.25)
    assert core.next_deadline_s == pytest.approx(0.4)
    core.on_tick(7.0)
    assert core.next_deadline_s == pytest.approx(7.2)
    assert core.on_tick(7.1) == []
    quarters = scheduler(OVERLOADED, IDLE, policy=replace(LLUMNIX, round_interval_s=0.25))
    quarters.on_tick(0.5)
    assert quarters.next_deadline_s == 0.75


def test_among_a_thousand_instances_rounds_are_rarer() -> None:
    """By hand: 2,560 reports a second are one of each of 1,024 instances in 0.4 s."""
    for num_instances, interval_s in ((512, 0.2), (1_024, 0.4)):
        core = scheduler(*(instance(f"i{number}") for number in range(num_instances)))
        core.on_tick(0.2)
        assert core.next_deadline_s == pytest.approx(0.2 + interval_s)


@pytest.mark.parametrize("policy", [INFAAS_PP, ROUND_ROBIN], ids=lambda each: each.name)
def test_a_policy_without_migration_holds_no_rounds(policy: PolicyConfig) -> None:
    core = scheduler(OVERLOADED, IDLE, policy=policy)
    assert core.next_deadline_s is None
    assert core.on_tick(1e9) == []


@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_a_round_comes_to_an_end_with_several_migrations_an_instance(num_concurrent: int) -> None:
    """Each instance is in one pair, and the sources beyond the destinations in none."""
    policy = replace(LLUMNIX, num_concurrent_migrations=num_concurrent)
    sources = [evenly_loaded(f"s{k}", 12_640 - 160 * k, 20 - k) for k in range(3)]
    core = scheduler(*sources, instance("d0"), instance("d1"), policy=policy)
    core.on_tick(0.2)
    assert core.destinations == {"s0": "d0", "s1": "d1"}


def test_rounds_spread_the_load_until_the_queue_of_one_instance_fits() -> None:
    """Section 4.4.2, queuing requests: migration "in effect is de-fragmentation for the queuing
    request". Loads are reported after every move, as llumlets do; nothing is set by hand."""
    blocked = replace(evenly_loaded("i0", 12_000, 30), queuing=(queuing("head", 3_200),))
    views = {each.instance_id: each for each in (blocked, evenly_loaded("i1", 6_000, 15))}
    core = scheduler(*views.values())
    for k in range(1, 50):
        next_round(core)
        for source, destination in core.destinations.items():
            request = candidates_to_move(views[source], LLUMNIX)[0]
            left, arrived = views[source], views[destination]
            running = tuple(each for each in left.running if each is not request)
            views[source] = replace(left, running=running)
            views[destination] = replace(arrived, running=(*arrived.running, request))
        for view in views.values():
            core.on_load(report(view, sequence=k + 1), 0.2 * k)
        if not core.destinations:
            break
    used_tokens = sum(each.physical_usage_tokens for each in views[InstanceId("i0")].running)
    assert 12_672 - used_tokens >= 3_200
    assert all(freeness(view, LLUMNIX) >= 48 for view in views.values())
    assert sum(len(view.running) for view in views.values()) == 45


# ------------------------------------------------------------------------------- auto-scaling

SCALING = ScalingConfig(min_instances=1, max_instances=4, period_s=1.0)


def test_without_a_scaling_configuration_the_number_of_instances_is_left_alone() -> None:
    core = scheduler(OVERLOADED)
    assert core.on_tick(0.2) == [told("i0", None)]
    assert core.on_tick(1e6) == []


def test_rounds_add_an_instance_when_freeness_stays_below_x_for_a_period() -> None:
    """Section 4.4.3: "adds or terminates an instance when the freeness is smaller than x or
    greater than y for a period, respectively." """
    core = scheduler(OVERLOADED, scaling=SCALING)
    assert core.on_tick(0.2) == [told("i0", None)]
    assert core.on_tick(1.19) == []
    assert core.on_tick(1.4) == [ScaleUp(1)]


def test_requests_that_no_instance_can_take_add_one_in_the_first_round() -> None:
    """Scaling begins with the scheduler, where nothing else is said."""
    full = replace(evenly_loaded("i0", 12_000, 2), queuing=(queuing("head", 1_024),))
    core = scheduler(full, scaling=SCALING)
    assert core.on_tick(0.2) == [told("i0", None), ScaleUp(1)]


def test_nothing_is_scaled_before_scaling_begins() -> None:
    core = GlobalScheduler(LLUMNIX, now_s=0.0, scaling=SCALING, scaling_begins_s=5.0)
    core.on_load(report(OVERLOADED), 0.0)
    decided = [(k, each) for k in range(1, 8) for each in core.on_tick(float(k))]
    assert decided == [(1, told("i0", None)), (5, ScaleUp(1)), (7, ScaleUp(1))]


def test_an_instance_that_starts_is_not_asked_for_again() -> None:
    core = scheduler(OVERLOADED, scaling=SCALING)
    core.on_tick(0.2)
    assert core.on_tick(1.4) == [ScaleUp(1)]
    core.on_instance_joined(InstanceId("i1"), 1.5)
    assert [core.on_tick(1.6 + k) for k in range(8)] == [[]] * 8
    core.on_instance_left(InstanceId("i1"), 10.0)
    assert core.on_tick(10.0) == [ScaleUp(1)]


def test_an_instance_that_is_kept_warm_is_not_one_that_starts() -> None:
    core = scheduler(OVERLOADED, scaling=SCALING)
    core.on_tick(0.2)
    core.on_instance_joined(InstanceId("i1"), 0.3)
    assert core.on_tick(1.4) == []
    for _ in range(2):
        core.withdraw_instance(InstanceId("i1"))
    assert core.on_tick(1.6) == [ScaleUp(1)]
    core.on_load(report(IDLE), 1.7)
    assert core.on_tick(1.8) == [told("i0", "i1"), told("i1", None)]


def test_at_the_minimum_a_start_that_waits_for_a_place_may_be_given_up() -> None:
    core = scheduler(evenly_loaded("i0", 160, 1), scaling=SCALING)
    core.on_instance_joined(InstanceId("i1"), 0.0)
    core.on_tick(0.2)
    assert core.on_tick(1.4) == []
    core.set_pending([InstanceId("i1")])
    assert core.on_tick(1.6) == [Terminate(InstanceId("i0"))]


def test_rounds_terminate_the_instance_with_the_fewest_running_requests() -> None:
    """Section 4.4.3: "chooses the instance with fewest running requests for termination." """
    core = scheduler(evenly_loaded("i0", 320, 2), evenly_loaded("i1", 160, 1), scaling=SCALING)
    core.on_tick(0.2)
    assert core.on_tick(1.4) == [Terminate(InstanceId("i1"))]


def test_a_request_that_is_held_for_long_starts_an_instance() -> None:
    """The one that came first counts; 320 tokens are free."""
    config = replace(SCALING, low_freeness_steps=0.0, starved_after_s=3.0)
    late = replace(LLUMNIX, binds_late=True)
    core = scheduler(evenly_loaded("i0", M - 320, 1), policy=late, scaling=config)
    assert core.on_request(ask("large", 480), 1.0) == []
    assert core.on_request(ask("later", 640), 3.5) == []
    rounds_s = [1.2, 2.0, 3.0, 3.8, 4.0]
    decided = {now_s: core.on_tick(now_s) for now_s in rounds_s}
    assert decided.pop(1.2) == [told("i0", None)]
    assert decided == {2.0: [], 3.0: [], 3.8: [], 4.0: [ScaleUp(1)]}


def test_a_policy_without_migration_scales_as_well() -> None:
    """Section 6.5: "We let INFaaS++ use the same scaling strategy"."""
    core = scheduler(OVERLOADED, policy=INFAAS_PP, scaling=SCALING)
    assert core.next_deadline_s == pytest.approx(0.2)
    assert core.on_tick(0.2) == []
    assert core.on_tick(1.4) == [ScaleUp(1)]
