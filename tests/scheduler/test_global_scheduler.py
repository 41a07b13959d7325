"""The global scheduler's dispatching and its knowledge of the instances (Sections 4.3, 4.4.3)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sterna.config import PolicyConfig, Soonest
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import (
    INFAAS_PP,
    LLUMNIX,
    LLUMNIX_BASE,
    PRESETS,
    ROUND_ROBIN,
    STERNA,
)
from sterna.scheduler.global_scheduler import Dispatch, Effect, GlobalScheduler
from sterna.types import HIGH, NORMAL, FrontendId, InstanceId, InstanceView, Priority, RequestId
from tests.policy.builders import (
    clusters,
    evenly_loaded,
    instance,
    priorities,
    report,
    running,
    usages_tokens,
)

FRONTEND = FrontendId(1)


def ask(
    request_id: str,
    demand_tokens: int = 160,
    *,
    arrival_s: float = 0.0,
    scheduling_priority: Priority = NORMAL,
    execution_priority: Priority = NORMAL,
    frontend_id: int = FRONTEND,
) -> DispatchRequest:
    return DispatchRequest(
        frontend_id=FrontendId(frontend_id),
        request_id=RequestId(request_id),
        demand_tokens=demand_tokens,
        arrival_s=arrival_s,
        scheduling_priority=scheduling_priority,
        execution_priority=execution_priority,
    )


def scheduler(
    *views: InstanceView, policy: PolicyConfig = LLUMNIX, first_dispatch_number: int = 1
) -> GlobalScheduler:
    """A scheduler at second 0 to which these instances have reported."""
    built = GlobalScheduler(policy, now_s=0.0, first_dispatch_number=first_dispatch_number)
    for view in views:
        assert built.on_load(report(view, policy), 0.0) == []
    return built


def sent(request_id: str, instance_id: str, number: int) -> Dispatch:
    return Dispatch(RequestId(request_id), FRONTEND, InstanceId(instance_id), number)


def places(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(each.request_id, each.instance_id) for each in effects if isinstance(each, Dispatch)]


# ------------------------------------------------------------------------------- dispatching


def test_a_request_is_dispatched_to_the_freest_instance_at_once() -> None:
    """Section 4.4.3: "dispatches each incoming request to the instance with the highest
    freeness." """
    core = scheduler(evenly_loaded("i0", 8_000, 8), evenly_loaded("i1", 1_600, 4))
    assert core.on_request(ask("r"), 0.0) == [sent("r", "i1", 1)]


def test_requests_that_wait_are_dispatched_by_scheduling_priority_and_arrival() -> None:
    """Section 4.4.3: "dispatches new requests with higher scheduling priorities first. Within the
    same priority, it adopts a simple first-come-first-serve order." The execution priority has
    no say, and requests that came at the same time go in the order of asking."""
    core = scheduler()
    for each in (
        ask("late", arrival_s=3.0),
        ask("twin-a", arrival_s=2.0),
        ask("twin-b", arrival_s=2.0, execution_priority=HIGH),
        ask("early", arrival_s=1.0),
        ask("urgent-late", arrival_s=5.0, scheduling_priority=HIGH),
        ask("urgent-early", arrival_s=4.0, scheduling_priority=HIGH),
        ask("most-urgent", arrival_s=9.0, scheduling_priority=Priority(2)),
        ask("background", arrival_s=0.0, scheduling_priority=Priority(-1)),
    ):
        assert core.on_request(each, 0.0) == []
    assert core.num_held == 8
    effects = core.on_load(report(instance("i0")), 1.0)
    expected = ["most-urgent", "urgent-early", "urgent-late"]
    expected += ["early", "twin-a", "twin-b", "late", "background"]
    assert effects == [sent(name, "i0", k) for k, name in enumerate(expected, start=1)]
    assert core.num_held == 0


def test_without_priorities_requests_that_wait_go_by_arrival() -> None:
    """Section 6.1: Llumnix-base "treats all requests as the same priority"."""
    core = scheduler(policy=LLUMNIX_BASE)
    core.on_request(ask("urgent", arrival_s=2.0, scheduling_priority=HIGH), 0.0)
    core.on_request(ask("normal", arrival_s=1.0), 0.0)
    effects = core.on_load(report(instance("i0"), LLUMNIX_BASE), 1.0)
    assert places(effects) == [("normal", "i0"), ("urgent", "i0")]


def test_a_request_that_is_asked_for_again_keeps_its_place_and_is_dispatched_once() -> None:
    core = scheduler()
    for name in ("a", "b", "a"):
        core.on_request(ask(name), 0.0)
    assert places(core.on_load(report(instance("i0")), 1.0)) == [("a", "i0"), ("b", "i0")]


def test_a_cancelled_request_is_held_no_longer() -> None:
    core = scheduler()
    core.on_request(ask("a"), 0.0)
    core.on_request(ask("b"), 0.0)
    assert core.on_cancel(RequestId("a"), 0.5) == []
    assert core.on_cancel(RequestId("unheard-of"), 0.5) == []
    assert places(core.on_load(report(instance("i0")), 1.0)) == [("b", "i0")]


def test_the_requests_of_a_dead_front_end_are_held_no_longer() -> None:
    core = scheduler()
    core.on_request(ask("a", frontend_id=1), 0.0)
    core.on_request(ask("b", frontend_id=2), 0.0)
    assert core.on_frontend_left(FrontendId(1), 0.5) == []
    effects = core.on_load(report(instance("i0")), 1.0)
    assert effects == [Dispatch(RequestId("b"), FrontendId(2), InstanceId("i0"), 1)]


# --------------------------------------------------------- correction for requests in flight


def in_flight(core: GlobalScheduler) -> dict[str, list[int]]:
    return {
        each.instance_id: [request.demand_tokens for request in each.in_flight]
        for each in core.candidates
    }


def test_a_burst_between_two_reports_does_not_pile_onto_one_instance() -> None:
    """Two requests of 4,800 tokens: the first leaves i0 with 7,072 tokens, below i1's 11,872."""
    core = scheduler(evenly_loaded("i0", 0, 1), evenly_loaded("i1", 800, 1))
    effects = [core.on_request(ask(name, 4_800), 0.0) for name in "ab"]
    assert effects == [[sent("a", "i0", 1)], [sent("b", "i1", 2)]]
    assert in_flight(core) == {"i0": [4_800], "i1": [4_800]}


def test_a_report_that_shows_a_dispatch_ends_its_correction() -> None:
    core = scheduler(instance("i0"))
    for name, tokens in (("a", 160), ("b", 320), ("c", 480)):
        core.on_request(ask(name, tokens), 0.0)
    core.on_load(report(instance("i0"), sequence=2, last_dispatch=0), 0.1)
    assert in_flight(core) == {"i0": [160, 320, 480]}
    core.on_load(report(instance("i0"), sequence=3, last_dispatch=2), 0.2)
    assert in_flight(core) == {"i0": [480]}


def test_a_cancelled_request_counts_on_its_instance_no_longer() -> None:
    core = scheduler(instance("i0"))
    core.on_request(ask("a", 160), 0.0)
    core.on_request(ask("b", 320), 0.0)
    core.on_cancel(RequestId("a"), 0.1)
    assert in_flight(core) == {"i0": [320]}


def test_after_a_cancelled_request_other_instances_are_not_looked_at_again() -> None:
    """Among a thousand instances that took five times as long as a decision."""
    core = scheduler(instance("i0"), instance("i1"))
    core.on_request(ask("a", 160), 0.0)
    core.on_request(ask("b", 320), 0.0)
    before = {each.instance_id: each for each in core.candidates}
    assert {each.in_flight[0].demand_tokens for each in before.values()} == {160, 320}
    core.on_cancel(RequestId("a"), 0.1)
    assert [each.instance_id for each in core.candidates if each is before[each.instance_id]] == [
        next(name for name, each in before.items() if each.in_flight[0].demand_tokens == 320)
    ]


def test_a_dead_front_ends_requests_count_on_no_instance() -> None:
    core = scheduler(instance("i0"))
    core.on_request(ask("a", 160, frontend_id=1), 0.0)
    core.on_request(ask("b", 320, frontend_id=2), 0.0)
    core.on_frontend_left(FrontendId(1), 0.1)
    assert in_flight(core) == {"i0": [320]}


def test_a_dispatch_that_never_arrives_is_not_held_against_its_instance_for_ever() -> None:
    """A front end that gave up may have sent nothing; no report would ever show it."""
    core = GlobalScheduler(LLUMNIX, now_s=0.0, in_flight_lease_s=2.0)
    core.on_load(report(instance("i0")), 0.0)
    core.on_load(report(evenly_loaded("i1", 160, 1)), 0.0)
    assert core.on_request(ask("lost", 12_000), 0.0) == [sent("lost", "i0", 1)]
    assert core.on_request(ask("a"), 1.9) == [sent("a", "i1", 2)]
    assert core.on_request(ask("b"), 2.0) == [sent("b", "i0", 3)]
    # The next one is given up in its turn, and not before.
    core.on_request(ask("c", 320), 3.8)
    assert in_flight(core) == {"i0": [160, 320], "i1": [160]}
    core.on_request(ask("d", 480), 3.9)
    assert in_flight(core) == {"i0": [160, 320], "i1": [480]}


def test_a_dispatch_to_an_engine_that_ends_no_step_stays_in_flight() -> None:
    """It hangs, or computes a very long prompt: its reports go on and show nothing new, and it
    would look as free as it was before."""
    core = GlobalScheduler(LLUMNIX, now_s=0.0, in_flight_lease_s=2.0)
    stuck = report(evenly_loaded("i0", 160, 1))
    core.on_load(stuck, 0.0)
    core.on_request(ask("a", 320), 0.0)
    for second in range(1, 150):
        # Somebody reserves memory there meanwhile.
        told = structs.replace(stuck, sequence=stuck.sequence + second, num_migrating_in=second % 7)
        core.on_load(told, float(second))
        core.on_tick(float(second))
        assert in_flight(core) == {"i0": [320]}
    # The step has ended without showing it.
    goes_on = report(evenly_loaded("i0", 176, 1))
    core.on_load(structs.replace(goes_on, sequence=stuck.sequence + 150), 150.0)
    core.on_tick(150.5)
    core.on_request(ask("b", 480), 150.5)
    assert in_flight(core) == {"i0": [480]}


def test_a_dispatch_that_has_not_expired_is_given_up_in_its_time_beside_one_that_stays() -> None:
    core = GlobalScheduler(LLUMNIX, now_s=0.0, in_flight_lease_s=2.0)
    stuck = report(evenly_loaded("i0", 160, 1))
    core.on_load(stuck, 0.0)
    core.on_load(report(evenly_loaded("i1", 1_600, 8)), 0.0)
    assert core.on_request(ask("a", 12_000), 0.0) == [sent("a", "i0", 1)]
    assert core.on_request(ask("b", 320), 0.1) == [sent("b", "i1", 2)]
    for tenth in range(1, 23):
        told = structs.replace(stuck, sequence=stuck.sequence + tenth)
        core.on_load(told, tenth / 10)
        core.on_tick(tenth / 10)
    assert in_flight(core) == {"i0": [12_000], "i1": []}


def test_a_dispatch_that_is_lost_is_given_up_once_its_instance_has_gone_on() -> None:
    core = GlobalScheduler(LLUMNIX, now_s=0.0, in_flight_lease_s=2.0)
    first = report(evenly_loaded("i0", 160, 1))
    core.on_load(first, 0.0)
    core.on_request(ask("a", 320), 0.0)
    grown = report(evenly_loaded("i0", 176, 1))
    core.on_load(structs.replace(grown, sequence=first.sequence + 1), 1.5)
    core.on_request(ask("b", 480), 2.0)
    assert in_flight(core) == {"i0": [480]}


def test_each_dispatch_that_never_arrives_is_given_up_in_its_time() -> None:
    core = GlobalScheduler(LLUMNIX, now_s=0.0, in_flight_lease_s=2.0)
    core.on_load(report(instance("i0")), 0.0)
    for now_s, tokens in ((0.0, 160), (1.0, 320), (1.5, 480), (2.0, 640), (3.0, 800)):
        core.on_request(ask(f"at {now_s}", tokens), now_s)
    assert in_flight(core) == {"i0": [480, 640, 800]}


def test_a_policy_that_does_not_count_dispatches_waits_for_the_next_report() -> None:
    policy = replace(LLUMNIX, counts_dispatched=False)
    core = scheduler(evenly_loaded("i0", 0, 1), evenly_loaded("i1", 800, 1), policy=policy)
    assert [places(core.on_request(ask(name, 4_800), 0.0)) for name in "ab"] == [
        [("a", "i0")],
        [("b", "i0")],
    ]
    assert in_flight(core) == {"i0": [], "i1": []}


def test_dispatch_numbers_grow_from_the_first() -> None:
    """So that a restarted scheduler's are above its predecessor's."""
    core = scheduler(instance("i0"), first_dispatch_number=500)
    assert [core.on_request(ask(name), 0.0) for name in "ab"] == [
        [sent("a", "i0", 500)],
        [sent("b", "i0", 501)],
    ]


@pytest.mark.parametrize(("last_dispatch", "expected"), [(39, 40), (40, 41), (41, 42)])
def test_dispatch_numbers_are_above_all_that_an_instance_has_seen(
    last_dispatch: int, expected: int
) -> None:
    """Else the report would end the correction of a dispatch that it does not show."""
    core = scheduler(first_dispatch_number=40)
    core.on_load(report(instance("i0"), last_dispatch=last_dispatch), 0.0)
    assert core.on_request(ask("a"), 0.0) == [sent("a", "i0", expected)]


# ---------------------------------------------------------------------- who is there, and how


def test_an_instance_that_joined_takes_part_from_its_first_report_on() -> None:
    core = scheduler()
    assert core.on_instance_joined(InstanceId("i0"), 0.0) == []
    assert core.on_request(ask("a"), 0.0) == []
    assert core.on_load(report(instance("i0")), 0.1) == [sent("a", "i0", 1)]


def test_the_news_of_an_instance_that_has_reported_changes_nothing() -> None:
    core = scheduler(instance("i0"))
    core.on_request(ask("a"), 0.0)
    before = tuple(core.candidates)
    core.on_instance_joined(InstanceId("i0"), 0.1)
    core.withdraw_instance(InstanceId("i0"))
    assert tuple(core.candidates) == before


def test_an_instance_that_is_emptied_gets_no_request_although_it_has_not_reported_so() -> None:
    """The decision is made here, or by the supervisor; its next report may be a second away."""
    core = scheduler(instance("i0"), evenly_loaded("i1", 12_000, 8))
    assert places(core.on_request(ask("a"), 0.0)) == [("a", "i0")]
    core.set_terminating(InstanceId("i0"), True)
    assert places(core.on_request(ask("b"), 0.1)) == [("b", "i1")]
    core.on_load(report(instance("i0"), sequence=2), 0.2)
    assert places(core.on_request(ask("c"), 0.3)) == [("c", "i1")]
    core.set_terminating(InstanceId("i0"), False)
    assert places(core.on_request(ask("d"), 0.4)) == [("d", "i0")]
    core.set_terminating(InstanceId("i9"), True)
    assert [each.load.is_terminating for each in core.candidates] == [False, False]


def test_the_default_policy_sees_headrooms_by_their_share() -> None:
    """With two instances, two fifths of one (`policy.headroom`); the paper's sees all of them."""
    views = instance("i0", running=[running("h", 400, priority=HIGH)]), instance("i1")
    shares = {
        policy.name: [each.headroom_share for each in scheduler(*views, policy=policy).candidates]
        for policy in (STERNA, LLUMNIX)
    }
    assert shares == {"sterna": [pytest.approx(0.45, abs=0.005), 1.0], "llumnix": [1.0, 1.0]}


def test_an_instance_is_known_by_its_report_alone() -> None:
    core = scheduler(instance("i0"))
    assert [each.instance_id for each in core.candidates] == ["i0"]


def test_an_overtaken_report_is_ignored() -> None:
    core = scheduler(instance("i1"))
    core.on_load(report(evenly_loaded("i0", 12_000, 8), sequence=7), 0.0)
    core.on_load(report(instance("i0"), sequence=6), 0.1)
    core.on_load(report(instance("i0"), sequence=7), 0.1)
    assert places(core.on_request(ask("a"), 0.2)) == [("a", "i1")]


def test_an_instance_that_left_gets_nothing_and_cannot_come_back() -> None:
    """Ids are never used again; its report, or the news of its birth, was only slower."""
    core = scheduler(instance("i0"), evenly_loaded("i1", 12_000, 8))
    core.on_instance_left(InstanceId("i0"), 0.1)
    core.on_load(report(instance("i0"), sequence=2), 0.2)
    core.on_instance_joined(InstanceId("i0"), 0.2)
    core.on_load(report(instance("i0"), sequence=3), 0.3)
    assert places(core.on_request(ask("a"), 0.4)) == [("a", "i1")]


def test_requests_in_flight_to_an_instance_that_left_are_forgotten() -> None:
    """Their front end holds them, and sends them elsewhere if need be."""
    core = scheduler(instance("i0"))
    core.on_request(ask("a"), 0.0)
    assert core.on_instance_left(InstanceId("i0"), 0.1) == []
    assert core.num_held == 0
    assert places(core.on_load(report(instance("i1")), 0.2)) == []


def test_a_terminating_instance_gets_no_request_while_another_exists() -> None:
    """Section 4.4.2: its virtual usage is infinite."""
    core = scheduler(instance("i0", is_terminating=True), evenly_loaded("i1", 12_640, 20))
    assert places(core.on_request(ask("a"), 0.0)) == [("a", "i1")]


def test_infaas_and_round_robin_dispatch_through_the_same_scheduler() -> None:
    """INFaaS++ goes by load, round robin by turns (Section 6.1)."""
    loaded, idle = evenly_loaded("i0", 12_000, 8), instance("i1")
    names = "abcd"
    by_load = scheduler(loaded, idle, policy=INFAAS_PP)
    assert [places(by_load.on_request(ask(n), 0.0))[0][1] for n in names] == ["i1"] * 4
    by_turns = scheduler(loaded, idle, policy=ROUND_ROBIN)
    turns = [places(by_turns.on_request(ask(n), 0.0))[0][1] for n in names]
    assert turns == ["i0", "i1", "i0", "i1"]


def test_an_instance_that_joins_a_round_robin_gets_its_turn_and_no_more() -> None:
    """Beginning at zero dispatches, it would get every request until it has caught up."""
    core = scheduler(instance("i0"), instance("i1"), policy=ROUND_ROBIN)
    core.on_instance_joined(InstanceId("i2"), 0.0)
    for k in range(10):
        core.on_request(ask(f"r{k}"), 0.0)
    core.on_load(report(instance("i2"), ROUND_ROBIN), 1.0)
    turns = [places(core.on_request(ask(n), 1.0))[0][1] for n in "abcdef"]
    assert turns == ["i0", "i1", "i2", "i0", "i1", "i2"]


def test_an_instance_that_is_emptied_no_longer_gets_its_turn_and_no_more() -> None:
    """Others have got requests meanwhile; those do not count for an instance that joins, either."""
    core = scheduler(instance("i0"), instance("i1"), instance("i2"), policy=ROUND_ROBIN)
    core.set_terminating(InstanceId("i0"), True)
    for k in range(20):
        core.on_request(ask(f"r{k}"), 0.0)
    core.on_load(report(instance("i3"), ROUND_ROBIN), 1.0)
    core.set_terminating(InstanceId("i0"), False)
    turns = [places(core.on_request(ask(n), 1.0))[0][1] for n in "abcdefgh"]
    assert turns == 2 * ["i0", "i1", "i2", "i3"]


def test_an_instance_that_joins_a_round_robin_takes_part_in_the_round_that_has_begun() -> None:
    core = scheduler(instance("i0"), instance("i1"), policy=ROUND_ROBIN)
    assert places(core.on_request(ask("r"), 0.0)) == [("r", "i0")]
    core.on_load(report(instance("i2"), ROUND_ROBIN), 1.0)
    turns = [places(core.on_request(ask(n), 1.0))[0][1] for n in "abcde"]
    assert turns == ["i1", "i2", "i0", "i1", "i2"]


def test_high_priority_requests_gather_and_normal_ones_keep_away() -> None:
    """Section 4.4.2: the headroom keeps "the instance the request is running on from exceeding a
    given level of real load"."""
    hosted = instance("i0", running=[running("h", 400, priority=HIGH)])
    core = scheduler(hosted, evenly_loaded("i1", 6_400, 4))
    assert places(core.on_request(ask("high", 160, execution_priority=HIGH), 0.0)) == [
        ("high", "i0")
    ]
    assert places(core.on_request(ask("normal", 160), 0.0)) == [("normal", "i1")]


# ----------------------------------------------------------------- nothing in it that matters

requests = st.builds(
    ask,
    st.uuids().map(str),
    usages_tokens,
    arrival_s=st.floats(0, 10),
    scheduling_priority=priorities,
    execution_priority=priorities,
)


@settings(max_examples=20)
@given(
    clusters(),
    clusters(),
    st.lists(requests, max_size=6),
    st.lists(requests, min_size=1, max_size=6),
    st.sampled_from(["llumnix", "llumnix-base", "infaas++", "sterna"]),
)
def test_a_scheduler_rebuilt_from_the_next_reports_decides_as_its_predecessor(
    before: list[InstanceView],
    after: list[InstanceView],
    earlier: list[DispatchRequest],
    later: list[DispatchRequest],
    name: str,
) -> None:
    """Design, section 2: it is "rebuilt from the next load reports: it keeps no state that
    matters"."""
    policy = replace(PRESETS[name], binds_late=False)
    if isinstance(policy.dispatch, Soonest):
        # What instances had to compute since the beginning is an estimate that begins anew.
        policy = replace(policy, dispatch=replace(policy.dispatch, eviction_weight=0.0))
    views = {each.instance_id: each for each in [*before, *after]}
    lasting = scheduler(*before, policy=policy)
    for each in earlier:
        lasting.on_request(each, 0.0)
    lasting.on_tick(0.2)
    reports = [
        report(each, policy, sequence=2, last_dispatch=len(earlier)) for each in views.values()
    ]
    rebuilt = GlobalScheduler(policy, now_s=0.2, first_dispatch_number=len(earlier) + 1)
    for load in reports:
        assert lasting.on_load(load, 0.3) == rebuilt.on_load(load, 0.3) == []
    for each in later:
        assert lasting.on_request(each, 0.3) == rebuilt.on_request(each, 0.3)
    lasting.on_tick(0.4)
    rebuilt.on_tick(0.4)
    assert lasting.destinations == rebuilt.destinations
    assert tuple(lasting.candidates) == tuple(
        replace(
            each,
            num_dispatched=old.num_dispatched,
            num_dispatched_tokens=old.num_dispatched_tokens,
        )
        for each, old in zip(rebuilt.candidates, lasting.candidates, strict=True)
    )


def test_held_requests_come_again_from_their_front_ends_in_the_same_order() -> None:
    first, second = scheduler(), scheduler()
    asked = [ask("a", arrival_s=2.0), ask("b", arrival_s=1.0), ask("c", scheduling_priority=HIGH)]
    for each in asked:
        first.on_request(each, 0.0)
    for each in reversed(asked):
        second.on_request(each, 5.0)
    expected = first.on_load(report(instance("i0")), 6.0)
    assert places(expected) == [("c", "i0"), ("b", "i0"), ("a", "i0")]
    assert second.on_load(report(instance("i0")), 6.0) == expected


# --------------------------------------------------------------------------------- properties

events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("load"), st.integers(0, 3)),
        st.tuples(st.just("full"), st.integers(0, 3)),
        st.tuples(st.just("join"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("tick"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(events, st.sampled_from(sorted(PRESETS)))
def test_every_request_is_either_held_or_dispatched_to_a_live_instance(
    history: list[tuple[str, int]], name: str
) -> None:
    """Whatever the order of events: a request gets one instance for each time of asking, only one
    that reported and has not left, under a number of its own that is higher than all before. With
    late binding a request waits only while no instance has room for it."""
    policy = PRESETS[name]
    core = GlobalScheduler(policy, now_s=0.0)
    waiting: set[str] = set()
    live: set[str] = set()
    gone: set[str] = set()
    last_number = 0
    for step, (kind, k) in enumerate(history, start=1):
        now_s = 0.1 * step
        request_id, instance_id = f"r{k}", f"i{k}"
        effects: list[Effect] = []
        match kind:
            case "ask":
                effects = core.on_request(ask(request_id), now_s)
                waiting.add(request_id)
            case "cancel":
                effects = core.on_cancel(RequestId(request_id), now_s)
                waiting.discard(request_id)
            case "load" | "full":
                used_tokens = 12_640 if kind == "full" else 160
                view = evenly_loaded(instance_id, used_tokens, 20)
                effects = core.on_load(report(view, policy, sequence=step), now_s)
                live |= {instance_id} - gone
            case "join":
                effects = core.on_instance_joined(InstanceId(instance_id), now_s)
            case "leave":
                effects = core.on_instance_left(InstanceId(instance_id), now_s)
                live.discard(instance_id)
                gone.add(instance_id)
            case "tick":
                effects = core.on_tick(now_s)
        for each in effects:
            if isinstance(each, Dispatch):
                assert each.request_id in waiting
                waiting.remove(each.request_id)
                assert each.instance_id in live
                assert each.dispatch_number > last_number
                last_number = each.dispatch_number
        assert core.num_held == len(waiting)
        if waiting and live:
            assert policy.binds_late
            smallest_tokens = core.smallest_held_tokens
            assert smallest_tokens is not None
            assert smallest_tokens > core.most_room_tokens
        assert {each.instance_id for each in core.candidates} == live
        assert {*core.destinations, *core.destinations.values()} <= live


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_work_for_a_request_does_not_depend_on_how_many_run(name: str) -> None:
    """Section 4.3: "the complexity of the global scheduler remains independent from the running
    requests": an instance is the same few numbers to it, however many requests it has."""
    policy = PRESETS[name]
    few = scheduler(evenly_loaded("i0", 6_400, 4), policy=policy).candidates[0]
    many = scheduler(evenly_loaded("i0", 6_400, 200), policy=policy).candidates[0]
    assert many.load == structs.replace(
        few.load,
        num_running=200,
        num_by_priority=((NORMAL, 200),),
        move_tokens=32,
        large_prompts=(),
    )
