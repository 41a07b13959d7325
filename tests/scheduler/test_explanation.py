"""Reasons of the scheduler's decisions, as it tells them front ends and instances."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sterna.config import DispatchRule, PolicyConfig, Soonest
from sterna.messages.actors import Dispatched, DispatchRequest, SetDestination
from sterna.messages.reasons import DispatchReason, MoveCause, MoveReason
from sterna.policy.candidate_table import as_table
from sterna.policy.dispatch import choose, decide
from sterna.policy.guarded import guarded
from sterna.policy.own import Policy
from sterna.policy.presets import LLUMNIX, PRESETS, STERNA
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.policy_file import in_server
from sterna.scheduler.core import SchedulerCore
from sterna.scheduler.explanation import (
    HEADROOM,
    LONGEST_ANSWER,
    MOST_TO_COME,
    dispatch_reason,
    move_reason,
    rule_name,
)
from sterna.types import HIGH, NORMAL, InstanceId, InstanceLoad, InstanceView, RequestView
from tests.scheduler.test_core import F0, I0, I1, R, membership, report

REQUEST = NewRequest(128, NORMAL, prompt_tokens=100)


def instance(
    name: str, policy: PolicyConfig, *, used_tokens: int = 100, num_running: int = 1, **facts: int
) -> Candidate:
    free = float(1_000 - used_tokens)
    load = InstanceLoad(
        InstanceId(name), 1, 1_000, used_tokens, free, free, num_running, 0, move_tokens=50
    )
    return Candidate(structs.replace(load, **facts), policy=policy)


def instances(policy: PolicyConfig, *used_tokens: int) -> list[Candidate]:
    return [instance(f"i{n}", policy, used_tokens=used) for n, used in enumerate(used_tokens)]


def without(chosen: InstanceId, every: Sequence[Candidate]) -> list[Candidate]:
    return [each for each in every if each.instance_id != chosen]


@pytest.mark.parametrize("name", PRESETS)
@given(used=st.lists(st.integers(0, 990), min_size=1, max_size=5), cached=st.integers(0, 99))
def test_the_next_best_is_what_the_rule_chooses_without_the_chosen_one(
    name: str, used: list[int], cached: int
) -> None:
    policy = PRESETS[name]
    every = as_table(instances(policy, *used))
    request = replace(REQUEST, cached={InstanceId("i0"): cached})
    choice = decide(request, every, policy)
    assert choice is not None
    reason = dispatch_reason(request, choice, policy, num_instances=9, held_s=0.25)
    assert reason.chosen.instance_id == choose(request, every, policy)
    assert (reason.rule, reason.held_s) == (rule_name(policy), 0.25)
    assert (reason.num_eligible, reason.num_instances) == (len(choice.eligible), 9)
    rest = without(choice.instance_id, choice.eligible)
    if not rest:
        assert reason.other is None
        return
    assert reason.other is not None
    if choice.costs is None:
        assert reason.other.instance_id == choose(request, rest, policy)
    else:
        # Another one of the same cost will do.
        (_, second) = np.sort(choice.costs)[:2]
        assert reason.other.cost == second
        assert reason.chosen.cost == choice.costs.min()


def test_of_two_drawn_the_next_best_is_the_other_one() -> None:
    policy = PRESETS["power-of-two"]
    choice = decide(REQUEST, instances(policy, 100, 100, 100, 100), policy)
    assert choice is not None
    reason = dispatch_reason(REQUEST, choice, policy, num_instances=4, held_s=0.0)
    (other,) = without(choice.instance_id, choice.eligible)
    assert reason.other is not None
    assert (reason.other.instance_id, reason.num_eligible) == (other.instance_id, 2)


def test_the_next_best_of_round_robin_is_the_next_in_turn() -> None:
    policy = PRESETS["round-robin"]
    every = [replace(each, num_dispatched=n) for n, each in enumerate(instances(policy, 1, 2, 3))]
    choice = decide(REQUEST, [*every[1:], every[0]], policy)
    assert choice is not None
    next_best = choice.next_best()
    assert next_best is not None
    assert (choice.instance_id, next_best.instance_id) == ("i0", "i1")


def test_an_instance_is_described_as_the_decision_saw_it() -> None:
    every = [
        instance("i0", STERNA, used_tokens=300, num_running=3, num_queuing=2, uncomputed_tokens=40)
    ]
    request = replace(REQUEST, cached={InstanceId("i0"): 64})
    choice = decide(request, every, STERNA)
    assert choice is not None
    seen = dispatch_reason(request, choice, STERNA, num_instances=1, held_s=0.0).chosen
    assert (seen.num_running, seen.num_waiting) == (3, 2)
    assert (seen.uncomputed_tokens, seen.cached_tokens) == (40, 64)
    assert seen.room_tokens == every[0].room_tokens
    assert seen.freeness_steps == every[0].freeness


def test_a_class_that_decides_is_not_asked_twice() -> None:
    class First(Policy):
        num_asked = 0

        def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
            First.num_asked += 1
            return instances[0].instance_id

    policy = First().as_config()
    choice = decide(REQUEST, instances(policy, 10, 20), policy)
    assert choice is not None
    reason = dispatch_reason(REQUEST, choice, policy, num_instances=2, held_s=0.0)
    assert (reason.rule, reason.other, First.num_asked) == ("First", None, 1)
    # As a server has it.
    assert rule_name(guarded(policy, lambda *_: None)) == "First"


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (LLUMNIX, "freest"),
        (STERNA, "soonest"),
        (PRESETS["llm-d"], "llm-d"),
        (PRESETS["production-stack"], "production-stack"),
        (replace(LLUMNIX, dispatch=DispatchRule.POWER_OF_TWO), "power_of_two"),
    ],
)
def test_rules_have_the_names_that_options_have(policy: PolicyConfig, name: str) -> None:
    assert rule_name(policy) == name
    assert isinstance(STERNA.dispatch, Soonest)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [(STERNA, HEADROOM), (LLUMNIX, HEADROOM), (PRESETS["vllm-dp"], "vllm_dp")],
)
def test_an_urgent_request_goes_by_headroom_where_the_policy_has_one(
    policy: PolicyConfig, rule: str
) -> None:
    request = replace(REQUEST, execution_priority=HIGH)
    choice = decide(request, instances(policy, 20, 10), policy)
    assert choice is not None
    reason = dispatch_reason(request, choice, policy, num_instances=2, held_s=0.0)
    assert reason.rule == rule


def test_with_a_horizon_balance_is_explained_by_the_loads_that_are_expected() -> None:
    policy = replace(STERNA, balance_horizon_steps=500)
    source = instance("i0", policy, coming_tokens=800, move_coming_tokens=300)
    destination = instance("i1", policy, coming_tokens=200)
    reason = move_reason(source, destination, policy)
    assert reason == MoveReason(MoveCause.BALANCE, 800, 500, 1.2, MOST_TO_COME)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"used_tokens": 990}, MoveCause.MEMORY),
        ({"used_tokens": 990, "is_terminating": True}, MoveCause.EMPTYING),
        ({"num_preempted": 1}, MoveCause.PREEMPTION),
        ({}, MoveCause.BALANCE),
    ],
)
def test_the_cause_of_a_pair_is_the_first_that_applies(
    facts: dict[str, int], cause: MoveCause
) -> None:
    policy = replace(STERNA, preempted_make_source=True)
    source, destination = instance("i0", policy, **facts), instance("i1", policy, used_tokens=40)
    reason = move_reason(source, destination, policy)
    assert reason.cause is cause
    if cause is MoveCause.BALANCE:
        assert (reason.source, reason.destination) == (100, 90), "of tokens, with the request"
        assert (reason.limit, reason.victim) == (policy.balance_ratio, LONGEST_ANSWER)
    else:
        assert (reason.source, reason.destination) == (source.freeness, destination.freeness)
        assert (reason.limit, reason.victim) == (48.0, policy.victim.value)
        assert (reason.source == -math.inf) == (cause is MoveCause.EMPTYING)


def test_an_instance_that_keeps_memory_free_is_not_short_of_it() -> None:
    """900 of 1,000 tokens are free, and a headroom of 900 takes them."""
    policy = replace(STERNA, shares_headroom=False)
    source = instance("i0", policy, free_tokens=0)
    reason = move_reason(source, instance("i1", policy), policy)
    assert (reason.cause, reason.source) == (MoveCause.HEADROOM, source.freeness)


def test_beside_a_headroom_requests_move_for_balance_in_the_usual_order() -> None:
    source = instance("i0", STERNA, free_tokens=500)
    reason = move_reason(source, instance("i1", STERNA, used_tokens=40), STERNA)
    assert (reason.cause, reason.victim) == (MoveCause.BALANCE, STERNA.victim.value)


@pytest.mark.parametrize("in_place", [lambda policy: policy, in_server])
def test_a_custom_class_decides_what_it_defines_and_its_base_the_rest(
    in_place: Callable[[PolicyConfig], PolicyConfig],
) -> None:
    class Pairs(Policy):
        def pair(self, instances: Sequence[Candidate]) -> dict[InstanceId, InstanceId]:
            return {}

    class Dispatches(Policy):
        def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
            return instances[0].instance_id

    def decided(kind: type[Policy]) -> tuple[str, MoveCause]:
        policy = in_place(kind().as_config())
        return rule_name(policy), move_reason(*instances(policy, 990, 10), policy).cause

    assert decided(Pairs) == ("soonest", MoveCause.POLICY)
    assert decided(Dispatches) == ("Dispatches", MoveCause.MEMORY)


@pytest.mark.parametrize("in_place", [lambda policy: policy, in_server])
def test_a_class_has_its_name_where_the_order_of_moves_is_its_own(
    in_place: Callable[[PolicyConfig], PolicyConfig],
) -> None:
    class Longest(Policy):
        def victims(self, instance: InstanceView) -> Sequence[RequestView]:
            return sorted(instance.running, key=lambda each: -each.num_tokens)

    for kind, short, balance in (
        (Longest, "Longest", "Longest"),
        (Policy, STERNA.victim.value, LONGEST_ANSWER),
    ):
        policy = in_place(kind().as_config())
        assert move_reason(*instances(policy, 990, 10), policy).victim == short
        for_balance = move_reason(*instances(policy, 200, 10), policy)
        assert (for_balance.cause, for_balance.victim) == (MoveCause.BALANCE, balance)


@pytest.mark.parametrize("in_place", [lambda policy: policy, in_server])
@pytest.mark.parametrize("base", PRESETS)
@pytest.mark.parametrize("priority", [NORMAL, HIGH])
def test_a_class_without_a_dispatch_is_explained_as_its_base(
    base: str, priority: int, in_place: Callable[[PolicyConfig], PolicyConfig]
) -> None:
    class Longest(Policy):
        def victims(self, instance: InstanceView) -> Sequence[RequestView]:
            return sorted(instance.running, key=lambda each: -each.num_tokens)

    Longest.base = base
    request = replace(REQUEST, execution_priority=priority)

    def reason_of(policy: PolicyConfig) -> DispatchReason:
        choice = decide(request, instances(policy, 30, 20, 10), policy)
        assert choice is not None
        return dispatch_reason(request, choice, policy, num_instances=3, held_s=0.0)

    assert reason_of(in_place(Longest().as_config())) == reason_of(PRESETS[base])


def test_the_scheduler_tells_its_reasons() -> None:
    core = SchedulerCore(LLUMNIX, now_s=0.0)
    core.on_membership(membership(1, I0, I1), 0.0)
    core.on_message(report(I0, 976), 0.0)
    core.on_message(report(I1), 0.0)
    (answer,) = core.on_message(DispatchRequest(F0, R, 64, 0.0, NORMAL, NORMAL), 0.0)
    assert isinstance(answer.message, Dispatched)
    reason = answer.message.reason
    assert reason is not None
    assert (reason.chosen.instance_id, reason.other.instance_id) == (I1, I0)
    orders = [each.message for each in core.on_tick(10.0) if hasattr(each, "message")]
    (named,) = [each for each in orders if isinstance(each, SetDestination) and each.destination]
    assert named.reason is not None
    assert named.reason.cause is MoveCause.MEMORY
