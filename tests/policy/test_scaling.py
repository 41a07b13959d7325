"""Auto-scaling: when instances are added and terminated (Section 4.4.3)."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sterna.config import ScalingConfig
from sterna.errors import ConfigurationError
from sterna.policy.scaling import (
    ScaleUp,
    ScalingDecision,
    ScalingState,
    Terminate,
    average_normal_freeness,
    decide,
    towards,
)
from sterna.policy.virtual_usage import Candidate
from sterna.types import HIGH, InstanceId, InstanceView
from tests.policy.builders import (
    candidate,
    clusters,
    evenly_loaded,
    instance,
    new_request,
    queuing,
    running,
)

CONFIG = ScalingConfig(
    min_instances=1,
    max_instances=8,
    low_freeness_steps=160,
    high_freeness_steps=960,
    period_s=10,
)

BUSY = [candidate(evenly_loaded(f"i{k}", 12_000, 8)) for k in range(2)]
"""672 / 8 = 84 steps each: below x."""
EASY = [candidate(evenly_loaded(f"i{k}", 8_000, 8)) for k in range(2)]
"""4,672 / 8 = 584 steps each: within [x, y]."""
SLACK = [candidate(evenly_loaded("i0", 800, 2)), candidate(evenly_loaded("i1", 320, 1))]
"""11,872 / 2 = 5,936 and 12,352 steps: above y."""


def decisions(
    history: list[tuple[float, list[Candidate]]],
    config: ScalingConfig = CONFIG,
    *,
    num_starting: int = 0,
    num_pending: int = 0,
    begins_s: float = 0.0,
    held_since_s: float | None = None,
) -> list[tuple[float, ScalingDecision]]:
    """What is decided over a history of (time, loads), with the times."""
    state, taken = ScalingState(), []
    for now_s, candidates in history:
        state, decision = decide(
            state,
            candidates,
            config,
            num_starting=num_starting,
            num_pending=num_pending,
            now_s=now_s,
            begins_s=begins_s,
            held_since_s=held_since_s,
        )
        if decision is not None:
            taken.append((now_s, decision))
    return taken


def test_a_start_is_not_given_up_while_a_request_waits() -> None:
    """It needs an instance to itself, and the others are free for smaller ones."""
    history = [(0.0, SLACK), (10.0, SLACK), (20.0, SLACK)]
    assert decisions(history, num_starting=1, num_pending=1, held_since_s=0.0) == []
    given_up = decisions(history, num_starting=1, num_pending=1)
    assert given_up[0] == (10.0, Terminate(InstanceId("i1")))


def test_a_slow_supervisor_is_not_asked_for_the_same_instance_again() -> None:
    """A period later it is: the order may have been lost."""
    history = [(0.2 * step, EASY) for step in range(100)]
    assert [now_s for now_s, _ in decisions(history, held_since_s=-5.0)] == pytest.approx([0, 10])


def test_a_request_that_waits_has_another_instance_once_the_one_for_it_is_up() -> None:
    """An instance that starts at once is never seen as starting."""
    more = [*EASY, candidate(evenly_loaded("i2", 8_000, 8))]
    history = [(0.0, EASY), (0.2, more), (0.4, more)]
    assert decisions(history, held_since_s=-5.0) == [(0.0, ScaleUp(1)), (0.2, ScaleUp(1))]


def test_the_end_of_an_instance_does_not_keep_waiting_requests_from_another_one() -> None:
    state, ended = decide(
        ScalingState(scale_down_at_s=0.0), SLACK, CONFIG, num_starting=0, now_s=1.0
    )
    assert isinstance(ended, Terminate)
    _, begun = decide(state, EASY, CONFIG, num_starting=0, now_s=1.2, held_since_s=-5.0)
    assert begun == ScaleUp(1)


def test_the_average_is_that_of_the_normal_prioritys_freeness() -> None:
    """Section 4.4.3: scaling follows "the averages freeness for the normal priority across
    instances". By hand: (12,672 - 672) / 2 = 6,000 without the headroom, and 584: 3,292."""
    host = instance("i0", running=[running("h", 400, priority=HIGH), running("r", 272)])
    assert average_normal_freeness([candidate(host), EASY[1]]) == 3_292


def test_requests_on_their_way_lower_the_average() -> None:
    """By hand: (4,672 - 672) / (8 + 1) = 444.4 in place of 584."""
    view = evenly_loaded("i0", 8_000, 8)
    burst = candidate(view, in_flight=[new_request(672)])
    assert average_normal_freeness([burst]) == pytest.approx(4_000 / 9)
    assert average_normal_freeness([burst, EASY[1]]) == pytest.approx((4_000 / 9 + 584) / 2)


def test_a_terminating_instance_is_not_part_of_the_average() -> None:
    """Its minus infinity would scale up whatever the load."""
    terminating = candidate(instance("i9", is_terminating=True))
    assert average_normal_freeness([*EASY, terminating]) == 584
    assert average_normal_freeness([terminating]) is None
    assert average_normal_freeness([]) is None


def test_an_instance_is_added_when_freeness_is_below_x_for_a_period() -> None:
    """Section 4.4.3: "maintains the average freeness within a range [x, y], and adds or terminates
    an instance when the freeness is smaller than x or greater than y for a period,
    respectively." """
    history = [(float(t), BUSY) for t in range(0, 12)]
    assert decisions(history) == [(10, ScaleUp(1))]


def test_an_instance_is_terminated_when_freeness_is_above_y_for_a_period() -> None:
    """The same sentence, and: "chooses the instance with fewest running requests for
    termination." """
    history = [(float(t), SLACK) for t in range(0, 12)]
    assert decisions(history) == [(10, Terminate(InstanceId("i1")))]


def test_within_the_range_nothing_is_decided() -> None:
    assert decisions([(float(t), EASY) for t in range(0, 40)]) == []


@pytest.mark.parametrize("outside", [BUSY, SLACK])
def test_a_visit_outside_the_range_that_is_shorter_than_the_period_decides_nothing(
    outside: list[Candidate],
) -> None:
    history = [(0.0, outside), (9.9, outside), (9.95, EASY), (10.0, outside), (19.9, outside)]
    assert decisions(history) == []


def test_the_other_side_of_the_range_clears_the_deadline_as_well() -> None:
    assert decisions([(0.0, BUSY), (9.0, SLACK), (10.0, BUSY), (19.0, BUSY)]) == []


def test_each_decision_needs_a_period_of_its_own() -> None:
    """An instance takes time to start, and a load time to spread."""
    history = [(float(t), BUSY) for t in range(0, 35)]
    assert [at_s for at_s, _ in decisions(history)] == [10, 21, 32]


def test_exactly_x_and_exactly_y_are_within_the_range() -> None:
    """By hand: 2,560 / 16 = 160 and 960 / 1 steps."""
    at_x = [candidate(instance("i0", running=[running(f"r{k}", 632) for k in range(16)]))]
    at_y = [candidate(instance("i0", running=[running("r", 11_712)]))]
    assert average_normal_freeness(at_x) == 160
    assert average_normal_freeness(at_y) == 960
    config = replace(CONFIG, min_instances=1)
    both = [*at_y, candidate(instance("i1", running=[running("s", 11_712)]))]
    for rule in (config, replace(config, is_sustained=False)):
        assert decisions([(0.0, at_x), (20.0, at_x)], rule) == []
        assert decisions([(0.0, both), (20.0, both)], rule) == []


@pytest.mark.parametrize("is_sustained", [True, False])
def test_exactly_x_is_within_the_range_where_no_instance_can_have_more(is_sustained: bool) -> None:
    """Another one would not lift the average: an idle instance has x steps."""
    idle = [candidate(instance("i0", total_tokens=160))]
    assert average_normal_freeness(idle) == 160
    rule = replace(CONFIG, is_sustained=is_sustained)
    assert decisions([(0.0, idle), (20.0, idle)], rule) == []


def test_the_time_at_x_is_no_part_of_the_period_below_it() -> None:
    at_x = [candidate(instance("i0", running=[running(f"r{k}", 632) for k in range(16)]))]
    history = [(0.0, at_x), (9.0, BUSY), (10.0, BUSY), (18.9, BUSY), (19.0, BUSY)]
    assert [at_s for at_s, _ in decisions(history)] == [19.0]


def test_as_many_are_added_as_bring_the_average_back_to_x() -> None:
    """An idle instance has 12,672 steps. Two with 12,672 - 12,000 - 13,056 = -12,384 each need
    (2 * 160 + 24,768) / (12,672 - 160) = 2.005 of them: three."""
    lacking = [
        candidate(replace(evenly_loaded(f"i{k}", 12_000, 8), queuing=(queuing(f"q{k}", 13_056),)))
        for k in range(2)
    ]
    assert decisions([(0.0, lacking)]) == [(0, ScaleUp(3))]
    at_looks = replace(CONFIG, is_sustained=False)
    assert decisions([(0.0, lacking), (10.0, lacking)], at_looks) == [(10, ScaleUp(3))]
    assert decisions([(0.0, lacking), (10.0, lacking)], num_starting=1) == [(10, ScaleUp(2))]
    assert decisions([(0.0, lacking), (10.0, lacking)], num_starting=3) == []
    at_most_four = replace(CONFIG, max_instances=4)
    assert decisions([(0.0, lacking), (10.0, lacking)], at_most_four, num_starting=1) == [
        (10, ScaleUp(1))
    ]


def test_an_instance_that_is_added_is_taken_to_be_as_large_as_the_others_are_in_the_mean() -> None:
    """By hand: 672 / 8 = 84 and 6,336 - 6,000 - 9,904 = -9,568 steps lack 2 * 160 + 9,484 = 9,804.
    Of 9,504 - 160 = 9,344 steps each it takes two, of 12,512 one."""
    small = instance("i1", total_tokens=6_336, running=[running("r", 6_000)])
    small = replace(small, queuing=(queuing("q", 9_904),))
    cluster = [BUSY[0], candidate(small)]
    assert decisions([(0.0, cluster), (10.0, cluster)]) == [(10.0, ScaleUp(2))]


FULL = [
    candidate(replace(evenly_loaded(f"i{k}", 12_000, 2), queuing=(queuing(f"q{k}", 1_024),)))
    for k in range(2)
]
"""672 tokens are free, and the head of each line needs 1,024."""


def test_requests_that_no_instance_can_take_do_not_wait_for_the_period() -> None:
    assert decisions([(0.0, FULL)]) == [(0.0, ScaleUp(1))]
    # Nor for anything else, if scaling is to begin at no particular time.
    _, decision = decide(ScalingState(), FULL, CONFIG, num_starting=0, now_s=0.0)
    assert decision == ScaleUp(1)


def test_requests_that_just_fit_are_no_reason_not_to_wait_for_the_period() -> None:
    """12,672 - 11,648 = 1,024 tokens are free, which is what the head of the line needs."""
    for used_tokens, expected in ((11_648, []), (11_650, [(0.0, ScaleUp(1))])):
        exact = replace(evenly_loaded("i0", used_tokens, 2), queuing=(queuing("q", 1_024),))
        assert decisions([(0.0, [candidate(exact)])]) == expected


def test_requests_that_queue_for_a_place_in_full_batches_do_not_wait_for_the_period() -> None:
    """However much memory is left: that alone would end instances while requests queue."""
    for num_slots, expected in ((4, [(0.0, ScaleUp(1))]), (5, [])):
        crowded = [
            candidate(
                replace(each, queuing=(queuing(f"{each.instance_id}-q", 16),), num_slots=num_slots)
            )
            for each in (evenly_loaded("i0", 400, 4), evenly_loaded("i1", 400, 4))
        ]
        assert average_normal_freeness(crowded) > CONFIG.high_freeness_steps
        assert decisions([(0.0, crowded)]) == expected
    full = replace(evenly_loaded("i0", 400, 4), queuing=(queuing("q", 16),), num_slots=4)
    history = [(float(second), [candidate(full)] * 2) for second in range(60)]
    at_most = replace(CONFIG, max_instances=2)
    assert decisions(history, at_most) == [], "none is ended either"


def test_instances_without_a_kv_cache_are_neither_added_nor_ended() -> None:
    """They have no freeness: with 0 of it idle ones would fill the cluster."""
    idle = [candidate(instance(f"i{k}", total_tokens=0)) for k in range(3)]
    history = [(10.0 * look, idle) for look in range(10)]
    assert average_normal_freeness(idle) is None
    for is_sustained in (True, False):
        assert decisions(history, replace(CONFIG, is_sustained=is_sustained)) == []


def test_a_request_that_is_held_at_the_scheduler_does_not_wait_for_the_period() -> None:
    """It waits for three seconds, in which others may end or move."""
    history = [(2.0, EASY), (3.9, EASY), (4.0, EASY)]
    assert decisions(history, held_since_s=1.0) == [(4.0, ScaleUp(1))]
    assert decisions(history) == []
    at_once = replace(CONFIG, starved_after_s=0)
    assert decisions([(1.0, EASY)], at_once, held_since_s=1.0) == [(1.0, ScaleUp(1))]


def test_one_instance_that_can_take_requests_lets_the_period_decide() -> None:
    assert decisions([(0.0, [FULL[0], EASY[1]])]) == []


def test_an_instance_that_starts_for_those_who_wait_lets_the_period_decide() -> None:
    assert decisions([(0.0, FULL)], num_starting=1) == []


def test_the_papers_rule_looks_once_a_period_whoever_waits() -> None:
    at_looks = replace(CONFIG, is_sustained=False)
    assert decisions([(0.0, FULL), (5.0, FULL)], at_looks) == []


def test_nothing_is_terminated_during_the_cool_down_after_a_decision() -> None:
    config = replace(CONFIG, cooldown_s=60)
    history = [(0.0, BUSY), (10.0, BUSY), (11.0, SLACK), (30.0, SLACK), (69.0, SLACK)]
    assert decisions(history, config) == [(10.0, ScaleUp(1))]
    assert decisions([*history, (70.0, SLACK)], config) == [
        (10.0, ScaleUp(1)),
        (70.0, Terminate(InstanceId("i1"))),
    ]


def test_the_cool_down_begins_when_the_last_instance_has_started() -> None:
    """It is empty then, which lifts the average although the load is as it was."""
    config = replace(CONFIG, cooldown_s=60)
    state = ScalingState()
    for now_s in range(0, 45, 5):
        state, decision = decide(state, SLACK, config, num_starting=1, now_s=float(now_s))
        assert decision is None
    for now_s in range(45, 100, 5):
        state, decision = decide(state, SLACK, config, num_starting=0, now_s=float(now_s))
        assert decision is None
    state, decision = decide(state, SLACK, config, num_starting=0, now_s=100.0)
    assert decision == Terminate(InstanceId("i1"))


def test_a_start_that_waits_for_a_place_holds_no_end_up() -> None:
    """It may wait for ever, as where the maximum is more than the machine has GPUs for."""
    config = replace(CONFIG, cooldown_s=60)
    history = [(0.0, SLACK), (10.0, SLACK)]
    assert decisions(history, config, num_starting=2, num_pending=1) == []
    terminate = (10.0, Terminate(InstanceId("i1")))
    assert decisions(history, config, num_starting=2, num_pending=2) == [terminate]


def test_at_the_minimum_a_start_that_waits_for_a_place_can_still_be_given_up() -> None:
    history = [(0.0, SLACK[:1]), (10.0, SLACK[:1])]
    terminate = (10.0, Terminate(InstanceId("i0")))
    assert decisions(history, num_starting=1) == []
    assert decisions(history, num_starting=1, num_pending=1) == [terminate]


def test_a_start_that_waits_for_a_place_is_given_up_where_a_class_wants_fewer() -> None:
    """One that comes up is waited for."""
    new = ScalingState()
    one = SLACK[:1]
    assert towards(new, 1, one, CONFIG, num_starting=1, now_s=0.0)[1] is None
    _, decision = towards(new, 1, one, CONFIG, num_starting=1, num_pending=1, now_s=0.0)
    assert decision == Terminate(InstanceId("i0"))
    assert towards(new, 1, one, CONFIG, num_starting=0, now_s=0.0)[1] is None


def test_what_a_class_wants_is_not_asked_for_again_until_it_shows() -> None:
    """The supervisor may be slow, and would start as many again each time."""
    state, decision = towards(ScalingState(), 4, SLACK, CONFIG, num_starting=0, now_s=0.0)
    assert decision == ScaleUp(2)
    for now_s in (0.2, 0.4, 9.9):
        state, decision = towards(state, 4, SLACK, CONFIG, num_starting=0, now_s=now_s)
        assert decision is None
    # One has begun, and the other one has failed: it is asked for again.
    shown, decision = towards(state, 4, SLACK, CONFIG, num_starting=1, now_s=9.9)
    assert decision == ScaleUp(1)
    # Nor does a death show it.
    _, decision = towards(state, 4, SLACK[:1], CONFIG, num_starting=0, now_s=9.9)
    assert decision is None
    # Nothing has come of it for a period.
    _, decision = towards(state, 4, SLACK, CONFIG, num_starting=0, now_s=10.0)
    assert decision == ScaleUp(2)
    # What it wants less meanwhile waits for that, too.
    _, decision = towards(shown, 1, SLACK, CONFIG, num_starting=1, num_pending=1, now_s=9.9)
    assert decision is None


def test_a_class_that_decides_leaves_no_deadline_behind() -> None:
    """The rule would act at once on what it has seen long before."""
    state, decision = decide(ScalingState(), SLACK, CONFIG, num_starting=0, now_s=0.0)
    assert (state.scale_down_at_s, decision) == (10.0, None)
    state, decision = towards(state, 2, SLACK, CONFIG, num_starting=0, now_s=5.0)
    assert decision is None
    _, decision = decide(state, SLACK, CONFIG, num_starting=0, now_s=3_600.0)
    assert decision is None


def test_instances_are_added_during_the_cool_down() -> None:
    config = replace(CONFIG, cooldown_s=60)
    history = [(0.0, BUSY), (10.0, BUSY), (11.0, BUSY), (21.0, BUSY)]
    assert decisions(history, config) == [(10.0, ScaleUp(1)), (21.0, ScaleUp(1))]


def test_the_maximum_holds_and_counts_instances_that_start() -> None:
    two, three = replace(CONFIG, max_instances=2), replace(CONFIG, max_instances=3)
    history = [(0.0, BUSY), (10.0, BUSY)]
    assert decisions(history, two) == []
    assert decisions(history, three) == [(10, ScaleUp(1))]
    assert decisions(history, three, num_starting=1) == []


@pytest.mark.parametrize("is_sustained", [True, False])
def test_a_terminating_instance_counts_against_the_maximum_until_it_is_gone(
    is_sustained: bool,
) -> None:
    """It keeps its GPU until it is empty: a cluster with four GPUs never has five instances. To
    bring two instances with 84 steps each to an average of 5,000, two idle ones are needed."""
    leaving = candidate(evenly_loaded("i2", 160, 1, is_terminating=True))
    config = replace(
        CONFIG,
        max_instances=4,
        low_freeness_steps=5_000,
        high_freeness_steps=10_000,
        is_sustained=is_sustained,
    )

    history = [(0.0, [*BUSY, leaving]), (10.0, [*BUSY, leaving])]
    assert decisions(history, config, num_starting=1) == []
    assert decisions(history, config) == [(10.0, ScaleUp(1))]


def test_at_the_maximum_the_deadline_stays_so_that_a_freed_place_is_used_at_once() -> None:
    two = replace(CONFIG, max_instances=2)
    history = [(0.0, BUSY), (10.0, BUSY), (11.0, BUSY[:1])]
    assert decisions(history, two) == [(11, ScaleUp(1))]


@pytest.mark.parametrize(("loads", "decision"), [(BUSY, ScaleUp), (SLACK, Terminate)])
def test_a_deadline_that_passes_before_scaling_begins_is_met_as_soon_as_it_does(
    loads: list[Candidate], decision: type[ScalingDecision]
) -> None:
    """Outside the range since 88 s for a period of 10 s, where scaling begins at 100 s."""
    history = [(when, loads) for when in (88.0, 98.0, 99.5, 100.0)]
    taken = decisions(history, begins_s=100.0)
    assert [(when, type(each)) for when, each in taken] == [(100.0, decision)]


def test_looks_go_on_before_scaling_begins() -> None:
    """What is looked at once a period is so in the same rhythm, whenever scaling begins."""
    config = replace(CONFIG, is_sustained=False)
    history = [(float(when), BUSY) for when in range(3, 40, 5)]
    assert [when for when, _ in decisions(history, config)] == [13, 23, 33]
    assert [when for when, _ in decisions(history, config, begins_s=20.0)] == [23, 33]


def test_where_not_even_an_idle_instance_reaches_x_one_is_added_at_a_time() -> None:
    for total_tokens in (128, 160):
        tiny = [candidate(instance("i0", total_tokens=total_tokens, running=[running("r", 16)]))]
        assert decisions([(0.0, tiny), (10.0, tiny)]) == [(10, ScaleUp(1))]


def test_where_an_idle_instance_reaches_x_by_one_step_as_many_are_added_as_it_takes() -> None:
    """By hand: 161 - 20 = 141 steps lack 19, and each idle instance brings one; there is room for
    seven."""
    tiny = [candidate(instance("i0", total_tokens=161, running=[running("r", 20)]))]
    assert decisions([(0.0, tiny), (10.0, tiny)]) == [(10, ScaleUp(7))]


def test_the_minimum_holds_and_a_terminating_instance_does_not_count() -> None:
    config = replace(CONFIG, min_instances=2)
    history = [(0.0, SLACK), (10.0, SLACK)]
    assert decisions(history, config) == []
    terminating = candidate(instance("i9", is_terminating=True))
    with_terminating = [*SLACK, terminating]
    assert decisions([(0.0, with_terminating), (10.0, with_terminating)], config) == []


def test_of_equally_few_running_requests_the_emptier_instance_goes() -> None:
    """Queuing requests, then memory, then the id break the tie."""
    waiting = candidate(instance("a", running=[running("r", 16)], queuing=[queuing("q", 16)]))
    fuller = candidate(instance("b", running=[running("s", 32)]))
    emptier = [candidate(instance(name, running=[running("t", 16)])) for name in ("d", "c")]
    cluster = [waiting, fuller, *emptier]
    assert decisions([(0.0, cluster), (10.0, cluster)]) == [(10, Terminate(InstanceId("c")))]


def test_without_any_load_nothing_is_decided_and_deadlines_are_forgotten() -> None:
    """Dead instances are the supervisor's to replace."""
    assert decisions([(0.0, BUSY), (9.0, []), (10.0, BUSY), (19.0, BUSY)]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"min_instances": 0},
        {"max_instances": 0},
        {"low_freeness_steps": 960.0},
        {"period_s": 0.0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        replace(CONFIG, **changes)


@settings(max_examples=30)
@given(clusters(), st.integers(0, 9))
def test_the_number_of_instances_stays_within_its_limits(
    cluster: list[InstanceView], num_starting: int
) -> None:
    candidates = [candidate(each) for each in cluster]
    num_staying = sum(1 for each in cluster if not each.is_terminating)
    config = replace(CONFIG, min_instances=2)
    history = [(0.0, candidates), (10.0, candidates)]
    for _, decision in decisions(history, config, num_starting=num_starting):
        average = average_normal_freeness(candidates)
        assert average is not None
        assert math.isfinite(average)
        match decision:
            case ScaleUp(num_instances):
                assert num_instances >= 1
                assert len(cluster) + num_starting + num_instances <= config.max_instances
                assert average < config.low_freeness_steps
            case Terminate(instance_id):
                assert num_staying > config.min_instances
                assert average > config.high_freeness_steps
                views = {each.instance_id: each for each in cluster}
                assert not views[instance_id].is_terminating


# ---------------------------------------------------------------------- the paper's own runs


def test_an_average_that_need_not_last_is_looked_at_once_a_period() -> None:
    config = replace(CONFIG, is_sustained=False)

    history = [(0, EASY), (9, BUSY), (10, EASY), (15, BUSY), (20, BUSY), (21, BUSY)]
    taken = decisions(history, config)

    # The first look is due one period after the start; what happens in between goes unseen.
    assert [when for when, _ in taken] == [20]
    assert isinstance(taken[0][1], ScaleUp)


def test_looks_that_were_missed_are_not_made_up_for() -> None:
    config = replace(CONFIG, is_sustained=False)

    taken = decisions([(0, SLACK), (35, SLACK), (36, SLACK), (45, SLACK)], config)
    missed_one = decisions([(0, SLACK), (20, SLACK), (21, SLACK), (30, SLACK)], config)

    assert [when for when, _ in taken] == [35, 45]
    assert [when for when, _ in missed_one] == [20, 30]


def test_a_look_that_is_late_does_not_delay_the_next_one() -> None:
    config = replace(CONFIG, is_sustained=False)

    taken = decisions([(0, SLACK), (12, SLACK), (19, SLACK), (20, SLACK)], config)

    assert [when for when, _ in taken] == [12, 20]


def test_a_look_leaves_the_least_number_of_instances_alone() -> None:
    config = replace(CONFIG, is_sustained=False, min_instances=2)

    assert decisions([(0, SLACK), (10, SLACK)], config) == []


def test_the_newest_instance_is_terminated_where_the_configuration_says_so() -> None:
    fewest_last = [*SLACK, candidate(evenly_loaded("i2", 1_600, 4))]

    by_requests = decisions([(0, fewest_last), (10, fewest_last)])
    by_age = decisions(
        [(0, fewest_last), (10, fewest_last)], replace(CONFIG, terminates_newest=True)
    )

    assert by_requests == [(10, Terminate(InstanceId("i1")))]
    assert by_age == [(10, Terminate(InstanceId("i2")))]
