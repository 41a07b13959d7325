"""Dispatch by prefix caches: the rules of other routers, by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sterna.config import (
    Dynamo,
    LlmD,
    PolicyConfig,
    PrefixDispatch,
    ProductionStack,
    Sglang,
    Soonest,
)
from sterna.policy.dispatch import choose
from sterna.policy.prefix_dispatch import PrefixElsewhere, prefix_to_copy, prefix_to_wait_for
from sterna.policy.presets import (
    DYNAMO,
    DYNAMO_TUNED,
    LLM_D,
    LLM_D_TUNED,
    POLICIES,
    PRODUCTION_STACK,
    ROUND_ROBIN,
    SGLANG,
    SGLANG_TUNED,
    STERNA,
)
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import HIGH, NORMAL, InstanceId, InstanceLoad

BY_PREFIX = tuple(policy for policy in POLICIES if policy.looks_at_prefixes)


def instance(
    name: str,
    *,
    uncomputed_tokens: int = 0,
    uncomputed_pairs: int = 0,
    num_running: int = 0,
    used_tokens: int = 0,
    headroom_tokens: int = 0,
    in_flight: tuple[NewRequest, ...] = (),
    num_dispatched_tokens: int = 0,
) -> Candidate:
    load = InstanceLoad(
        InstanceId(name),
        1,
        100_000,
        used_tokens,
        100_000 - used_tokens - headroom_tokens,
        100_000 - used_tokens,
        num_running,
        0,
        uncomputed_tokens=uncomputed_tokens,
        uncomputed_pairs=uncomputed_pairs,
    )
    return Candidate(load, in_flight, num_dispatched_tokens=num_dispatched_tokens)


def prompt(num_tokens: int, **cached_tokens: int) -> NewRequest:
    """A prompt of which the named instances have these tokens."""
    cached: Mapping[InstanceId, int] = {
        InstanceId(name): number for name, number in cached_tokens.items()
    }
    return NewRequest(num_tokens, NORMAL, prompt_tokens=num_tokens, cached=cached)


def chosen(request: NewRequest, rule: PrefixDispatch, *candidates: Candidate) -> str | None:
    return choose(request, candidates, replace(ROUND_ROBIN, dispatch=rule))


def test_tokens_in_flight_count_where_they_are_not_cached() -> None:
    on_its_way = prompt(1_000, a=600)
    assert instance("a", uncomputed_tokens=50, in_flight=(on_its_way,)).uncomputed_tokens == 450
    assert instance("b", in_flight=(on_its_way,)).uncomputed_tokens == 1_000


# ------------------------------------------------------------------------------------ llm-d


def test_llm_d_stays_where_four_fifths_of_the_prompt_are() -> None:
    request = prompt(1_000, a=800, b=790)
    ahead = instance("b"), instance("c")
    busy = instance("a", uncomputed_tokens=286_704, num_running=9)
    assert chosen(request, LlmD(), busy, *ahead) == "a"
    saturated = instance("a", uncomputed_tokens=286_705, num_running=9)
    assert chosen(request, LlmD(), saturated, *ahead) == "b"


def test_llm_d_takes_the_one_with_the_least_to_compute_among_those_that_have_the_prompt() -> None:
    """700 and 200 are more than 750 and 100."""
    request = prompt(1_000, a=800, b=900)
    candidates = (
        instance("a", uncomputed_tokens=700),
        instance("b", uncomputed_tokens=750),
        instance("c", uncomputed_tokens=0),
    )
    assert chosen(request, LlmD(), *candidates) == "b"
    assert chosen(prompt(1_000, a=100), LlmD(), *candidates) == "c"


# ----------------------------------------------------------------------------------- Dynamo


def test_dynamo_adds_what_is_to_be_computed_and_the_memory_in_use() -> None:
    """By hand: a has 500 of 1,000 tokens, and costs 500 + used + 1,000; b costs 1,000 + 1,000."""
    request = prompt(1_000, a=500)
    for used_tokens, expected in ((490, "a"), (510, "b")):
        candidates = instance("a", used_tokens=used_tokens), instance("b")
        assert chosen(request, Dynamo(), *candidates) == expected
    for uncomputed_tokens, expected in ((490, "a"), (510, "b")):
        candidates = instance("a", uncomputed_tokens=uncomputed_tokens), instance("b")
        assert chosen(request, Dynamo(), *candidates) == expected


def test_dynamos_parameters_weigh_its_terms() -> None:
    """By hand: with weight 2, a saves 1,000; with half the credit 250; a's two requests cost 510
    at 255 each."""
    request = prompt(1_000, a=500)
    rules = (
        (Dynamo(prefill_scale=2.0), 990, 1_010),
        (Dynamo(overlap_credit=0.5), 240, 260),
    )
    for rule, less, more in rules:
        assert chosen(request, rule, instance("a", used_tokens=less), instance("b")) == "a"
        assert chosen(request, rule, instance("a", used_tokens=more), instance("b")) == "b"
    two = instance("a", num_running=2)
    assert chosen(request, Dynamo(request_tokens=245.0), two, instance("b")) == "a"
    assert chosen(request, Dynamo(request_tokens=255.0), two, instance("b")) == "b"


# ----------------------------------------------------------------------------------- SGLang


def test_sglang_goes_by_the_longest_match_while_loads_are_even() -> None:
    request = prompt(1_000, a=510, b=505)
    assert chosen(request, Sglang(), instance("a", num_running=32), instance("b")) == "a"
    assert chosen(request, Sglang(), instance("a", num_running=33), instance("b")) == "b"
    # 34 more, but less than a tenth more.
    many = instance("a", num_running=384), instance("b", num_running=350)
    assert chosen(request, Sglang(), *many) == "a"


def test_sglang_sends_what_is_not_cached_to_the_smallest_tree() -> None:
    candidates = (
        instance("a", num_dispatched_tokens=100),
        instance("b", num_dispatched_tokens=90, num_running=5),
    )
    assert chosen(prompt(1_000, a=500), Sglang(), *candidates) == "b"


# -------------------------------------------------------------------------- production stack


def test_the_production_stack_weighs_the_match_against_the_relative_load() -> None:
    """By hand: of 9 and 3 requests, a has half more than the mean and b half less, which the whole
    prompt outweighs exactly."""
    candidates = instance("a", num_running=9), instance("b", num_running=3)
    assert chosen(prompt(1_000, a=1_000), ProductionStack(0.99), *candidates) == "a"
    assert chosen(prompt(1_000, a=1_000), ProductionStack(1.01), *candidates) == "b"


def test_by_default_the_production_stack_weighs_both_alike() -> None:
    """By hand: 5/11 more and less than the mean are less than the whole prompt, 7/13 are more."""
    whole, default = prompt(1_000, a=1_000), ProductionStack()
    few, many = instance("a", num_running=8), instance("a", num_running=10)
    assert chosen(whole, default, few, instance("b", num_running=3)) == "a"
    assert chosen(whole, default, many, instance("b", num_running=3)) == "b"
    assert chosen(prompt(1_000, b=10), ProductionStack(), instance("a"), instance("b")) == "b"


# ----------------------------------------------------------------------------------- Sterna


FIRST_TOKEN_ALONE = Soonest(
    horizon_steps=0.0, others_weight=0.0, eviction_weight=0.0, pair_cost=0.0
)


def test_sternas_rule_goes_where_the_first_token_comes_soonest() -> None:
    """By hand: 500 of 1,000 tokens are worth 499 in front of it."""
    request = prompt(1_000, a=500)
    for uncomputed_tokens, expected in ((499, "a"), (501, "b")):
        candidates = instance("a", uncomputed_tokens=uncomputed_tokens), instance("b")
        assert chosen(request, FIRST_TOKEN_ALONE, *candidates) == expected


def test_the_end_of_a_long_prompt_takes_longer_than_its_beginning() -> None:
    """By hand: with 1/1,000 a pair, the last 500 of 1,000 tokens take 500 + 750."""
    rule = replace(FIRST_TOKEN_ALONE, pair_cost=0.001)
    request = prompt(1_000, a=500, b=1_000)
    for uncomputed_tokens, expected in ((1_249, "b"), (1_251, "a")):
        candidates = instance("a"), instance("b", uncomputed_tokens=uncomputed_tokens)
        assert chosen(request, rule, *candidates) == expected


def test_long_prompts_in_front_take_longer_than_as_many_tokens_of_short_ones() -> None:
    """By hand: a has a prompt of 1,000 tokens in front, and another of 500 on its way; b has 1,800
    tokens of short ones. With 1/2,000 a pair a takes 1,500 + (1,000,000 + 250,000) / 2,000."""
    a = instance("a", uncomputed_tokens=1_000, uncomputed_pairs=1_000_000, in_flight=(prompt(500),))
    for pair_cost, expected in ((0.0, "a"), (0.0005, "b")):
        b = instance("b", uncomputed_tokens=1_800)
        assert chosen(prompt(10), replace(FIRST_TOKEN_ALONE, pair_cost=pair_cost), a, b) == expected


def test_a_loaded_instance_decodes_more_slowly_after_the_first_token() -> None:
    """By hand: ten steps beside 4 requests with 1,000 tokens take 10 x (4 x 2 + 1,000 x 0.01)."""
    rule = replace(FIRST_TOKEN_ALONE, horizon_steps=10.0, request_cost=2.0, kv_token_cost=0.01)
    loaded = instance("a", num_running=4, used_tokens=1_000)
    for uncomputed_tokens, expected in ((179, "b"), (181, "a")):
        other = instance("b", uncomputed_tokens=uncomputed_tokens)
        assert chosen(prompt(100), rule, loaded, other) == expected


def test_what_delays_others_counts_less() -> None:
    """By hand: 4 decodes wait for 100 tokens of the prompt each, and one step, in which the request
    takes 2 + 100 x 0.01; a quarter of that is 103."""
    rule = replace(FIRST_TOKEN_ALONE, others_weight=0.25)
    rule = replace(rule, horizon_steps=1.0, request_cost=2.0, kv_token_cost=0.01)
    loaded = instance("a", num_running=4)
    for uncomputed_tokens, expected in ((110, "b"), (112, "a")):
        other = instance("b", uncomputed_tokens=uncomputed_tokens)
        assert chosen(prompt(100), rule, loaded, other) == expected


def test_a_delay_behind_a_backlog_counts_more() -> None:
    """By hand: 4 decodes wait for 100 tokens, which with a quarter of the weight is 100; behind 200
    tokens, with a backlog of 100 in the rule, it is three times that."""
    rule = replace(FIRST_TOKEN_ALONE, others_weight=0.25)
    loaded = instance("a", num_running=4, uncomputed_tokens=200)
    for backlog_tokens, uncomputed_tokens, expected in (
        (1e9, 299, "b"),
        (1e9, 301, "a"),
        (100.0, 499, "b"),
        (100.0, 501, "a"),
    ):
        other = instance("b", uncomputed_tokens=uncomputed_tokens)
        each = replace(rule, backlog_tokens=backlog_tokens)
        assert chosen(prompt(100), each, loaded, other) == expected


def test_what_a_prompt_evicts_counts_where_contents_are_young() -> None:
    """By hand: a has computed a tenth of its memory more than b, so that 1,000 tokens evict what
    is worth 800 at weight 8; b lacks a shared prefix of 700 or 900 tokens."""
    busy, idle = (
        instance("a", num_dispatched_tokens=15_000),
        instance("b", num_dispatched_tokens=5_000),
    )
    for shared, expected in ((700, "b"), (900, "a")):
        request = prompt(1_000 + shared, a=shared)
        with_eviction = replace(FIRST_TOKEN_ALONE, eviction_weight=8.0)
        assert chosen(request, with_eviction, busy, idle) == expected
        assert chosen(request, FIRST_TOKEN_ALONE, busy, idle) == "a"


def test_a_prompt_evicts_no_more_than_all_contents() -> None:
    """By hand: a has computed its memory a hundred times more than b, as a faster one may have;
    500 tokens there cost 4,500 at weight 8. It is idle again when b has so many to compute."""
    rule = replace(FIRST_TOKEN_ALONE, eviction_weight=8.0)
    fast = instance("a", num_dispatched_tokens=10_000_000)
    for uncomputed_tokens, expected in ((3_999, "b"), (4_001, "a")):
        slow = instance("b", uncomputed_tokens=uncomputed_tokens)
        assert chosen(prompt(500), rule, fast, slow) == expected


def test_a_headroom_counts_as_memory_in_use_as_far_as_it_counts() -> None:
    """By hand: half of 40,000 tokens makes ten steps on a longer by 10 x 20,000 x 0.01."""
    rule = replace(FIRST_TOKEN_ALONE, horizon_steps=10.0, kv_token_cost=0.01)
    for headroom_share, uncomputed_tokens, expected in (
        (0.5, 1_999, "b"),
        (0.5, 2_001, "a"),
        (0.0, 1, "a"),
    ):
        host = replace(instance("a", headroom_tokens=40_000), headroom_share=headroom_share)
        other = instance("b", uncomputed_tokens=uncomputed_tokens)
        assert chosen(prompt(100), rule, host, other) == expected


def test_an_instance_without_freeness_gets_a_request_only_while_no_other_has_any() -> None:
    request = prompt(1_000, a=1_000)
    full = instance("a", num_running=5, used_tokens=100_000)
    empty, also_full = instance("b"), instance("c", num_running=5, used_tokens=100_001)
    assert choose(request, [full, empty], STERNA) == "b"
    assert choose(request, [full, also_full], STERNA) == "a"


def test_a_request_with_a_headroom_goes_to_the_least_load_whatever_is_cached() -> None:
    request = replace(prompt(1_000, a=1_000), execution_priority=HIGH)
    loaded, empty = instance("a", num_running=3, used_tokens=5_000), instance("b")
    assert choose(request, [loaded, empty], STERNA) == "b"
    assert choose(prompt(1_000, a=1_000), [loaded, empty], STERNA) == "a"


# ------------------------------------------------------------------------------------- all


def test_the_presets_have_their_systems_rules() -> None:
    theirs = (LLM_D, LLM_D_TUNED, DYNAMO, DYNAMO_TUNED, SGLANG, SGLANG_TUNED, PRODUCTION_STACK)
    assert (*theirs, STERNA) == BY_PREFIX
    assert [type(each.dispatch) for each in theirs] == [
        *(LlmD, LlmD, Dynamo, Dynamo),
        *(Sglang, Sglang, ProductionStack),
    ]
    assert not any(each.migrates for each in theirs)


@pytest.mark.parametrize("policy", BY_PREFIX, ids=lambda each: each.name)
def test_among_idle_instances_the_one_with_the_prompt_is_chosen(policy: PolicyConfig) -> None:
    request = prompt(1_000, b=900)
    idle = [instance(name) for name in "abc"]
    assert choose(request, idle, policy) == "b"


@settings(max_examples=50)
@given(st.data(), st.sampled_from(BY_PREFIX))
def test_more_of_the_prompt_never_makes_an_instance_lose_it(
    data: st.DataObject, policy: PolicyConfig
) -> None:
    names = "abc"
    numbers = st.integers(0, 2_000)
    candidates = [
        instance(name, uncomputed_tokens=data.draw(numbers), num_running=data.draw(numbers))
        for name in names
    ]
    cached = {name: data.draw(st.integers(0, 900)) for name in names}
    first = choose(prompt(1_000, **cached), candidates, policy)
    assert first is not None
    more = {**cached, first: cached[first] + 99}
    assert choose(prompt(1_000, **more), candidates, policy) == first


# ------------------------------------------------------------------------------------ copies

COPYING = Soonest(
    pair_cost=0.0, others_weight=0.5, backlog_tokens=1_000.0, copy_token_cost=0.5,
    copy_start_cost=100.0,
)  # fmt: skip


def test_a_prefix_is_copied_where_that_takes_less_than_to_compute_it() -> None:
    """By hand: 200 tokens take 100 + 100 to be copied, and 200 to be computed."""
    for num_tokens, expected in ((200, None), (201, "a")):
        assert prefix_to_copy(prompt(1_000, a=num_tokens), instance("b"), COPYING) == expected


def test_what_the_chosen_instance_has_is_not_copied() -> None:
    assert prefix_to_copy(prompt(1_000, a=500, b=300), instance("b"), COPYING) is None
    assert prefix_to_copy(prompt(1_000, a=501, b=300), instance("b"), COPYING) == "a"
    assert prefix_to_copy(prompt(1_000, a=300, b=300), instance("b"), COPYING) is None
    assert prefix_to_copy(prompt(1_000), instance("b"), COPYING) is None


def test_a_copy_while_prompts_queue_costs_less_time() -> None:
    """By hand: 100 tokens take 150; 51 of it pass while 51 other tokens are computed."""
    for uncomputed_tokens, expected in ((50, None), (51, "a")):
        busy = instance("b", uncomputed_tokens=uncomputed_tokens)
        assert prefix_to_copy(prompt(1_000, a=100), busy, COPYING) == expected


def test_what_is_not_computed_delays_no_other_request() -> None:
    """By hand: 100 tokens, half of them for each of two others, are 200, and take 150."""
    assert prefix_to_copy(prompt(1_000, a=100), instance("b", num_running=2), COPYING) == "a"


def test_pairs_of_tokens_are_saved_with_a_prefix() -> None:
    """By hand: the first 100 of 1,000 tokens attend to 100 * 100 pairs: 100 and 1 x 100."""
    rule = replace(COPYING, pair_cost=0.01)
    assert prefix_to_copy(prompt(1_000, a=100), instance("b"), rule) == "a"


def test_the_instance_with_most_of_it_is_the_source() -> None:
    assert prefix_to_copy(prompt(2_000, a=700, c=900, d=800), instance("b"), COPYING) == "c"


def test_without_costs_nothing_is_copied() -> None:
    for rule in (Soonest(), Dynamo()):
        assert prefix_to_copy(prompt(9_000, a=9_000), instance("b"), rule) is None


# ------------------------------------------------------------------------------------ waiting


def test_what_another_instance_has_beyond_the_chosen_one_is_worth_a_wait() -> None:
    """By hand: 600 of 1,000 tokens, and the pairs of these with all before: from the 100th token to
    the 700th, 700 * 700 - 100 * 100 of a hundredth each."""
    rule = replace(COPYING, copy_token_cost=None)
    asked = prompt(1_000, a=300, b=100, c=700)
    assert prefix_to_wait_for(asked, instance("b"), rule) == PrefixElsewhere(
        (InstanceId("c"),), 600, 600.0
    )
    by_pairs = prefix_to_wait_for(asked, instance("b"), replace(rule, pair_cost=0.01))
    assert by_pairs == PrefixElsewhere((InstanceId("c"),), 600, 600.0 + 4_800.0)
    for chosen in ("c", "d"):
        known = prompt(1_000) if chosen == "d" else asked
        assert prefix_to_wait_for(known, instance(chosen), rule) is None


def test_what_can_be_copied_is_worth_no_longer_a_wait_than_its_copy() -> None:
    """By hand: 100 + 0.5 x 600 in place of 600; 100 tokens are sooner computed."""
    for num_tokens, saved_tokens in ((600, 400.0), (100, 100.0)):
        elsewhere = prefix_to_wait_for(prompt(1_000, a=num_tokens), instance("b"), COPYING)
        assert elsewhere == PrefixElsewhere((InstanceId("a"),), num_tokens, saved_tokens)


def test_rules_of_others_wait_for_no_prefix() -> None:
    for policy in POLICIES:
        if not isinstance(policy.dispatch, Soonest):
            asked = prompt(1_000, a=500)
            assert prefix_to_wait_for(asked, instance("b"), policy.dispatch) is None
