"""The table of the instances: its columns are what the instances say, whatever has changed."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.config import Soonest
from sterna.policy import candidate_table
from sterna.policy.candidate_table import (
    BATCH_SIZE,
    FEW_ROWS,
    FREENESS,
    HEADROOMS_TOKENS,
    IS_TERMINATING,
    NORMAL_FREE_TOKENS,
    NUM_DISPATCHED_TOKENS,
    NUM_REQUESTS,
    NUM_RUNNING,
    REAL_LOAD_TOKENS,
    ROOM_TOKENS,
    TOTAL_TOKENS,
    UNCOMPUTED_PAIRS,
    UNCOMPUTED_TOKENS,
    VIRTUAL_LOAD_TOKENS,
    CandidateTable,
    as_table,
)
from sterna.policy.dispatch import choose
from sterna.policy.prefix_dispatch import choose_by_prefix
from sterna.policy.presets import STERNA
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import NORMAL, InstanceId, InstanceLoad

TOTAL = 100_000

requests = st.builds(
    NewRequest,
    demand_tokens=st.integers(1, 5_000),
    execution_priority=st.just(NORMAL),
    prompt_tokens=st.integers(1, 5_000),
)


@st.composite
def instances(draw: st.DrawFn, name: str) -> Candidate:
    """Few different values, so that many are equal."""
    used_tokens = draw(st.sampled_from((0, 500, 99_000)))
    headroom_tokens = draw(st.sampled_from((0, 0, 0, 80_000)))
    load = InstanceLoad(
        InstanceId(name),
        1,
        TOTAL,
        used_tokens,
        TOTAL - used_tokens - headroom_tokens,
        TOTAL - used_tokens,
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1)),
        is_terminating=draw(st.integers(0, 9)) == 0,
        uncomputed_tokens=draw(st.sampled_from((0, 0, 2_000, 30_000))),
        uncomputed_pairs=draw(st.sampled_from((0, 0, 2**40))),
        num_slots=draw(st.sampled_from((None, 4))),
    )
    return Candidate(
        load,
        tuple(draw(st.lists(requests, max_size=2))),
        num_dispatched_tokens=draw(st.sampled_from((0, 0, 7_000))),
        policy=STERNA,
        headroom_share=draw(st.sampled_from((1.0, 0.25))),
    )


@st.composite
def clusters(draw: st.DrawFn) -> list[Candidate]:
    return [draw(instances(f"i{number}")) for number in range(draw(st.integers(1, 6)))]


def assert_is_of(table: CandidateTable, candidates: list[Candidate]) -> None:
    """The table is the one of these instances."""
    assert list(table) == candidates
    assert len(table) == len(candidates)
    assert [table[place] for place in range(len(table))] == candidates
    assert table[:2] == candidates[:2]
    expected = {
        IS_TERMINATING: [each.load.is_terminating for each in candidates],
        NUM_REQUESTS: [each.num_requests for each in candidates],
        NUM_RUNNING: [each.load.num_running for each in candidates],
        TOTAL_TOKENS: [each.load.total_tokens for each in candidates],
        FREENESS: [each.freeness for each in candidates],
        UNCOMPUTED_TOKENS: [each.uncomputed_tokens for each in candidates],
        UNCOMPUTED_PAIRS: [each.uncomputed_pairs for each in candidates],
        NUM_DISPATCHED_TOKENS: [each.num_dispatched_tokens for each in candidates],
        REAL_LOAD_TOKENS: [each.real_load_tokens for each in candidates],
        VIRTUAL_LOAD_TOKENS: [each.virtual_load_tokens for each in candidates],
        ROOM_TOKENS: [each.room_tokens for each in candidates],
        HEADROOMS_TOKENS: [each.headrooms_tokens for each in candidates],
        NORMAL_FREE_TOKENS: [
            each.load.normal_free_tokens - sum(one.demand_tokens for one in each.in_flight)
            for each in candidates
        ],
        BATCH_SIZE: [
            max(1, each.load.num_running + min(1, each.load.num_queuing) + len(each.in_flight))
            for each in candidates
        ],
    }
    for name, values in expected.items():
        assert table.column(name).tolist() == values
    numbers = {each.instance_id: place + 1.0 for place, each in enumerate(candidates)}
    spread = table.spread({**numbers, InstanceId("elsewhere"): 5.0})
    assert spread.tolist() == list(numbers.values())
    assert all(table.of(each.instance_id) == each for each in candidates)


@given(clusters(), st.data())
def test_a_table_follows_its_instances(candidates: list[Candidate], data: st.DataObject) -> None:
    table = as_table(candidates)
    assert as_table(table) is table
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            table.column(FREENESS)
        row = data.draw(st.integers(0, len(candidates) - 1))
        candidates[row] = data.draw(instances(candidates[row].instance_id))
        table.put({row: candidates[row]})
    # Many rows are written in another way than few.
    with patch.object(candidate_table, "FEW_ROWS", data.draw(st.sampled_from((0, FEW_ROWS)))):
        assert_is_of(table, candidates)


@given(clusters(), st.data())
def test_a_part_of_a_table_is_the_table_of_these_instances(
    candidates: list[Candidate], data: st.DataObject
) -> None:
    table = as_table(candidates)
    for _ in range(2):
        marks = data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table)))
        part = table.where(np.array(marks))
        assert (part is table) == all(marks)
        table, candidates = part, [each for each, is_in in zip(table, marks, strict=True) if is_in]
        assert_is_of(table, candidates)


@given(clusters(), st.floats(0, 1), st.booleans(), st.data())
def test_headrooms_count_by_their_share_whatever_is_asked_for_first(
    candidates: list[Candidate], share: float, divides_overload: bool, data: st.DataObject
) -> None:
    policy = replace(STERNA, divides_overload=divides_overload)
    candidates = [replace(each, policy=policy) for each in candidates]
    table = as_table(candidates)
    made = table.with_headroom_share(share)
    expected = [
        replace(each, headroom_share=share) if each.headrooms_tokens else each
        for each in candidates
    ]
    for row in data.draw(st.lists(st.integers(0, len(candidates) - 1), max_size=3)):
        assert made[row] == made.of(expected[row].instance_id) == expected[row]
    part = made.where(made.column(IS_TERMINATING) == 0)
    assert_is_of(part, [each for each in expected if not each.load.is_terminating])
    assert_is_of(made, expected)
    assert_is_of(table, candidates)


def cost_alone(
    request: NewRequest, candidate: Candidate, fewest_tokens: int, rule: Soonest
) -> float:
    """The rule's cost of one instance, step by step (docs/policies.md)."""
    uncached_tokens = request.uncached_tokens(candidate.instance_id)
    prefill = uncached_tokens + rule.pair_cost * request.uncached_pairs(candidate.instance_id)
    before = candidate.uncomputed_tokens + rule.pair_cost * candidate.uncomputed_pairs
    excess = (candidate.num_dispatched_tokens - fewest_tokens) / candidate.load.total_tokens
    eviction = rule.eviction_weight * min(excess, 1.0) * uncached_tokens
    own_step = (
        rule.request_cost * candidate.num_requests
        + rule.kv_token_cost * candidate.virtual_load_tokens
    )
    step_cost = rule.request_cost + rule.kv_token_cost * request.demand_tokens
    others = candidate.load.num_running * prefill * (1.0 + before / rule.backlog_tokens)
    others += rule.horizon_steps * candidate.num_requests * step_cost
    return before + prefill + eviction + rule.horizon_steps * own_step + rule.others_weight * others


@given(clusters(), requests, st.data())
def test_the_soonest_instance_is_the_cheapest_of_all_one_by_one(
    candidates: list[Candidate], request: NewRequest, data: st.DataObject
) -> None:
    cached = {
        each.instance_id: data.draw(st.integers(0, request.prompt_tokens - 1))
        for each in candidates
        if data.draw(st.booleans())
    }
    request, rule = replace(request, cached=cached), STERNA.dispatch
    assert isinstance(rule, Soonest)
    fewest_tokens = min(each.num_dispatched_tokens for each in candidates)
    costs = {
        each.instance_id: cost_alone(request, each, fewest_tokens, rule) for each in candidates
    }
    chosen = choose_by_prefix(request, candidates, rule).chosen
    # The rule adds in another order: what costs the same may differ by its last digits.
    lowest = min(costs.values())
    assert costs[chosen.instance_id] == pytest.approx(lowest, rel=1e-12)
    shuffled = data.draw(st.permutations(candidates))
    assert choose_by_prefix(request, shuffled, rule).chosen == chosen
    assert choose(request, shuffled, STERNA) == choose(request, as_table(candidates), STERNA)


def test_an_empty_table_has_columns_and_no_choice() -> None:
    table = CandidateTable()
    assert table.column(FREENESS).tolist() == []
    assert choose(NewRequest(1, NORMAL), table, STERNA) is None
    with pytest.raises(IndexError):
        table[0]
