"""Dispatch by the prefix caches of the instances: Sterna's rule, and those of other routers. Pure.

Each of these is written from what its system publishes, and sees what Sterna knows: which tokens
of a prompt an instance has, which it has still to compute, and its memory. Their own routers see
less of this, or later.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np

from sterna.config import (
    DispatchRule,
    Dynamo,
    LlmD,
    PrefixDispatch,
    ProductionStack,
    Sglang,
    Soonest,
)
from sterna.policy.candidate_table import (
    NUM_DISPATCHED_TOKENS,
    NUM_REQUESTS,
    NUM_RUNNING,
    TOTAL_TOKENS,
    UNCOMPUTED_PAIRS,
    UNCOMPUTED_TOKENS,
    VIRTUAL_LOAD_TOKENS,
    CandidateTable,
    Choice,
    as_table,
)
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import InstanceId

LEAST_AHEAD = 0.25
"""Prefixes are copied ahead of sessions' turns where these would wait for more than this part of
`backlog_tokens`, and would have to compute as much."""


def choose_by_prefix(
    request: NewRequest, eligible: Sequence[Candidate], rule: PrefixDispatch
) -> Choice:
    """The instance for the request among at least one."""
    match rule:
        case Soonest():
            return _soonest(request, as_table(eligible), rule)
        case LlmD():
            return _sticky_until_saturated(request, eligible, rule)
        case Dynamo():
            return Choice.first(
                eligible, lambda each: (_cost(request, each, rule), *each.tie_break)
            )
        case Sglang():
            return _cache_aware(request, eligible, rule)
        case ProductionStack():
            mean_load = sum(each.num_requests for each in eligible) / len(eligible)
            return Choice.first(
                eligible,
                lambda each: (-_load_aware(request, each, mean_load, rule), *each.tie_break),
            )
        case _:
            assert_never(rule)


def tokens_to_compute(request: NewRequest, candidate: Candidate) -> int:
    """Tokens that the instance would have to compute before the request's first token."""
    return candidate.uncomputed_tokens + request.uncached_tokens(candidate.instance_id)


def _soonest(request: NewRequest, eligible: CandidateTable, rule: Soonest) -> Choice:
    columns, prompt_tokens = eligible.columns, request.prompt_tokens
    uncached_tokens = prompt_tokens - eligible.spread(request.cached)
    # With the pairs of attending tokens as in `pairs_of`.
    prefill = 1.0 + rule.pair_cost * (2 * prompt_tokens - uncached_tokens)
    prefill *= uncached_tokens
    before = columns[UNCOMPUTED_TOKENS] + rule.pair_cost * columns[UNCOMPUTED_PAIRS]
    # What an instance has computed beyond the others, it has evicted, all that it has at most: its
    # oldest contents are so much younger, and the likelier to be asked for again.
    dispatched_tokens = columns[NUM_DISPATCHED_TOKENS]
    eviction = dispatched_tokens - dispatched_tokens[dispatched_tokens.argmin()]
    # A model may have no KV cache.
    eviction /= np.maximum(columns[TOTAL_TOKENS], 1)
    np.minimum(eviction, 1.0, out=eviction)
    eviction *= rule.eviction_weight * uncached_tokens
    # A decode step takes longer for each request there, and this one adds to the steps of each. A
    # headroom counts as if other requests used it: it keeps the steps of its owners short.
    num_requests = columns[NUM_REQUESTS]
    added = rule.request_cost + rule.kv_token_cost * request.demand_tokens
    steps = (rule.request_cost + rule.others_weight * added) * num_requests
    steps += rule.kv_token_cost * columns[VIRTUAL_LOAD_TOKENS]
    steps *= rule.horizon_steps
    # Those that run wait for the prompt. Where prompts queue, they are delayed already, and once
    # more is worse.
    delay = rule.others_weight + rule.others_weight / rule.backlog_tokens * before
    delay *= columns[NUM_RUNNING]
    delay *= prefill
    cost = before
    for part in (prefill, eviction, steps, delay):
        cost += part
    lowest = int(cost.argmin())
    is_lowest = cost == cost[lowest]
    if np.count_nonzero(is_lowest) == 1:
        return Choice(eligible[lowest], eligible, cost)
    ties = np.flatnonzero(is_lowest)
    fewest = num_requests[ties].min()
    fewest_of_ties: list[int] = ties[num_requests[ties] == fewest].tolist()
    chosen = min([eligible[row] for row in fewest_of_ties], key=lambda each: each.instance_id)
    return Choice(chosen, eligible, cost)


@dataclass(frozen=True, slots=True)
class PrefixElsewhere:
    """What instances have of a prompt beyond another one.

    Attributes:
        instances: those that have most of it.
        num_tokens: of the prompt.
        saved_tokens: what the other one need not compute with these, in the time of a token.
    """

    instances: tuple[InstanceId, ...]
    num_tokens: int
    saved_tokens: float


def prefix_to_copy(
    request: NewRequest, chosen: Candidate, rule: PrefixDispatch
) -> InstanceId | None:
    """The instance from which a part of the request's prefix is to be copied to the chosen one,
    before the request is sent there; None where it is computed there.

    What is saved delays neither this request nor those that run there, by the weights of the rule;
    the wait for the copy delays this one alone, and only beyond what it would queue for.
    """
    if not isinstance(rule, Soonest):
        return None
    elsewhere = _elsewhere(request, chosen, rule)
    if elsewhere is None:
        return None
    before = _cost_before(chosen, rule)
    wait = max(0.0, _copy_cost(elsewhere, rule) - before)
    others = rule.others_weight * chosen.load.num_running * (1.0 + before / rule.backlog_tokens)
    return max(elsewhere.instances) if elsewhere.saved_tokens * (1.0 + others) > wait else None


def prefix_to_wait_for(
    request: NewRequest, chosen: Candidate, rule: DispatchRule | PrefixDispatch
) -> PrefixElsewhere | None:
    """What another instance has of the request's prompt beyond the chosen one; None with other
    rules than Sterna's. It saves no more than a copy would take, also where none is possible."""
    if not isinstance(rule, Soonest):
        return None
    elsewhere = _elsewhere(request, chosen, rule)
    if elsewhere is None:
        return None
    saved_tokens = min(elsewhere.saved_tokens, _copy_cost(elsewhere, rule))
    return replace(elsewhere, saved_tokens=saved_tokens)


def copies_ahead(
    candidates: Sequence[Candidate], rule: Soonest
) -> list[tuple[Candidate, Candidate]]:
    """Pairs of instances: one on which a session's next turn would wait, for more than
    `LEAST_AHEAD` of the backlog, and one where it would not. Each is in at most one pair; those
    that have most to compute come first."""
    staying = [each for each in candidates if not each.load.is_terminating]
    waits = {each.instance_id: _cost_before(each, rule) for each in staying}
    hot = [each for each in staying if waits[each.instance_id] > LEAST_AHEAD * rule.backlog_tokens]
    free = [
        each
        for each in staying
        if waits[each.instance_id] == 0 and each.freeness > each.policy.destination_freeness_steps
    ]
    hot.sort(key=lambda each: (-waits[each.instance_id], each.instance_id))
    free.sort(key=lambda each: each.tie_break)
    return list(zip(hot, free, strict=False))


def is_worth_a_copy(request: NewRequest, source: InstanceId, to: InstanceId, rule: Soonest) -> bool:
    """Whether what the source has of a prompt, and the other one has not, would take more than
    `LEAST_AHEAD` of the backlog to compute. Nothing waits for the copy itself."""
    return _saved(request, source, to, rule) > LEAST_AHEAD * rule.backlog_tokens


def _elsewhere(request: NewRequest, chosen: Candidate, rule: Soonest) -> PrefixElsewhere | None:
    """What the instances with most of the prompt have beyond the chosen one; None if nothing."""
    if not request.cached:
        return None
    most_tokens = max(request.cached.values())
    num_tokens = most_tokens - request.cached_tokens(chosen.instance_id)
    if num_tokens <= 0:
        return None
    instances = tuple([each for each, tokens in request.cached.items() if tokens == most_tokens])
    saved_tokens = _saved(request, instances[0], chosen.instance_id, rule)
    return PrefixElsewhere(instances, num_tokens, saved_tokens)


def _copy_cost(elsewhere: PrefixElsewhere, rule: Soonest) -> float:
    """The wait for a copy, in the time of a token; infinite if nothing is copied."""
    if rule.copy_token_cost is None:
        return math.inf
    return rule.copy_start_cost + rule.copy_token_cost * elsewhere.num_tokens


def _saved(request: NewRequest, source: InstanceId, to: InstanceId, rule: Soonest) -> float:
    """What an instance need not compute if it gets the source's part of a prompt, in the time of a
    token."""
    num_tokens = request.cached_tokens(source) - request.cached_tokens(to)
    num_pairs = request.uncached_pairs(to) - request.uncached_pairs(source)
    return num_tokens + rule.pair_cost * num_pairs


def _cost_before(candidate: Candidate, rule: Soonest) -> float:
    """What the instance has still to compute before a new prompt, in the time of a token."""
    return candidate.uncomputed_tokens + rule.pair_cost * candidate.uncomputed_pairs


def _sticky_until_saturated(
    request: NewRequest, eligible: Sequence[Candidate], rule: LlmD
) -> Choice:
    """llm-d 0.9: those that have most of the prompt, unless they are behind all others."""

    def least_loaded(candidates: Sequence[Candidate]) -> Choice:
        return Choice.first(
            candidates, lambda each: (tokens_to_compute(request, each), *each.tie_break)
        )

    sticky = [each for each in eligible if _share(request, each) >= rule.min_share]
    others = [each for each in eligible if each not in sticky]
    if not sticky or not others:
        return least_loaded(eligible)
    best, best_other = least_loaded(sticky), least_loaded(others)
    excess_tokens = best.chosen.uncomputed_tokens - best_other.chosen.uncomputed_tokens
    return least_loaded(eligible) if excess_tokens > rule.saturation_tokens else best


def _cost(request: NewRequest, candidate: Candidate, rule: Dynamo) -> float:
    """Dynamo's cost of a worker, in tokens in place of blocks."""
    cached_tokens = request.cached_tokens(candidate.instance_id)
    all_tokens = candidate.uncomputed_tokens + request.prompt_tokens
    prefill_tokens = max(0.0, all_tokens - rule.overlap_credit * cached_tokens)
    decode_tokens = candidate.real_load_tokens + request.demand_tokens
    request_tokens = rule.request_tokens * candidate.num_requests
    return rule.prefill_scale * prefill_tokens + decode_tokens + request_tokens


def _cache_aware(request: NewRequest, eligible: Sequence[Candidate], rule: Sglang) -> Choice:
    """SGLang: the shortest queue where loads differ, else the longest match, else the worker that
    has got the fewest tokens."""
    loads = [each.num_requests for each in eligible]
    is_even = max(loads) - min(loads) <= rule.max_difference or max(loads) <= rule.max_ratio * min(
        loads
    )
    if not is_even:
        return Choice.first(eligible, lambda each: each.tie_break)
    longest = Choice.first(eligible, lambda each: -_share(request, each))
    if _share(request, longest.chosen) > rule.min_share:
        return longest
    return Choice.first(eligible, lambda each: (each.num_dispatched_tokens, *each.tie_break))


def _load_aware(
    request: NewRequest, candidate: Candidate, mean_load: float, rule: ProductionStack
) -> float:
    """The production stack's score: the matched share, less the load relative to its mean."""
    excess = (candidate.num_requests - mean_load) / mean_load if mean_load > 0 else 0.0
    return _share(request, candidate) - rule.load_weight * excess


def _share(request: NewRequest, candidate: Candidate) -> float:
    return request.cached_tokens(candidate.instance_id) / max(1, request.prompt_tokens)
