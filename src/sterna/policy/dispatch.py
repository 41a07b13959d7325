"""Dispatch: the choice of an instance for a new request (Section 4.4.3, dispatching). Pure."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import assert_never

import numpy as np

from sterna.config import DispatchRule, OwnDecisions, PolicyConfig, Soonest
from sterna.errors import ConfigurationError
from sterna.policy.candidate_table import FREENESS, CandidateTable, Choice, as_table
from sterna.policy.prefix_dispatch import choose_by_prefix
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import InstanceId


def choose(
    request: NewRequest, candidates: Iterable[Candidate], policy: PolicyConfig
) -> InstanceId | None:
    """The instance for the request: see `decide`."""
    choice = decide(request, candidates, policy)
    return None if choice is None else choice.instance_id


def decide(
    request: NewRequest, candidates: Iterable[Candidate], policy: PolicyConfig
) -> Choice | None:
    """The choice of an instance for the request, or None when there is no candidate.

    A terminating instance is chosen only while no other exists. Ties go to the instance with
    fewer requests, then to the smaller id.
    """
    own = policy.own if policy.own is not None and policy.own.chooses_instances else None
    if isinstance(policy.dispatch, Soonest) and own is None:
        return _by_soonest(request, as_table(candidates), policy)
    every = tuple(candidates)
    staying = [each for each in every if not each.load.is_terminating]
    eligible = staying or every
    if not eligible:
        return None
    if own is not None:
        return Choice(_chosen_by_class(request, eligible, own), eligible)
    if policy.dispatch is DispatchRule.FREEST and _has_headroom(request, policy):
        return _for_high_priority(request, eligible, policy)
    if not isinstance(policy.dispatch, DispatchRule):
        return choose_by_prefix(request, eligible, policy.dispatch)
    match policy.dispatch:
        case DispatchRule.ROUND_ROBIN:
            return Choice.first(eligible, lambda each: (each.num_dispatched, each.instance_id))
        case DispatchRule.POWER_OF_TWO:
            return Choice.first(_two_drawn(eligible), _fewest_requests)
        case DispatchRule.SESSION_HASH:
            if not request.session:
                return Choice.first(eligible, _fewest_requests)
            return Choice.first(eligible, lambda each: -_weight(request.session, each.instance_id))
        case DispatchRule.VLLM_DP:
            # vLLM begins to look one instance further with each request: ties go round.
            ranks, first = _by_id(eligible), _num_dispatched(eligible) % len(eligible)
            return Choice.first([*ranks[first:], *ranks[:first]], _vllm_dp_score)
        case DispatchRule.FREEST:
            # The first by `_freest`, found in a fraction of the time.
            highest = max([each.dispatch_freeness for each in eligible])
            freest = [each for each in eligible if each.dispatch_freeness == highest]
            return Choice(min(freest, key=_fewest_requests), eligible, order=_freest)
        case _:
            assert_never(policy.dispatch)


def _by_soonest(
    request: NewRequest, candidates: CandidateTable, policy: PolicyConfig
) -> Choice | None:
    """Sterna's own rule, without a look at single instances."""
    assert isinstance(policy.dispatch, Soonest)
    if not len(candidates):
        return None
    eligible = candidates.staying()
    if _has_headroom(request, policy):
        return _for_high_priority(request, eligible, policy)
    # Without freeness an instance is the place of high priority, or others wait there already.
    is_free = eligible.column(FREENESS) > 0
    if np.count_nonzero(is_free):
        eligible = eligible.where(is_free)
    return choose_by_prefix(request, eligible, policy.dispatch)


def _chosen_by_class(
    request: NewRequest, eligible: Sequence[Candidate], own: OwnDecisions
) -> Candidate:
    chosen = own.dispatch(request, eligible)
    for each in eligible:
        if each.instance_id == chosen:
            return each
    raise ConfigurationError(
        f"{type(own).__name__}.dispatch must return the instance_id of one of the instances "
        f"that it is given, not {chosen!r}"
    )


def _fewest_requests(candidate: Candidate) -> tuple[int, InstanceId]:
    return candidate.tie_break


def _freest(candidate: Candidate) -> tuple[float, int, InstanceId]:
    return -candidate.dispatch_freeness, *candidate.tie_break


def _two_drawn(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Two of the instances: others for each request, and the same ones in each run."""
    if len(candidates) < 3:
        return candidates
    first = _scattered(2 * _num_dispatched(candidates)) % len(candidates)
    further = _scattered(2 * _num_dispatched(candidates) + 1) % (len(candidates) - 1)
    second = (first + 1 + further) % len(candidates)
    ordered = _by_id(candidates)
    return ordered[first], ordered[second]


def _weight(session: str, instance_id: InstanceId) -> int:
    """Rendezvous hashing: when an instance goes, its sessions alone go elsewhere."""
    return _scattered(_hash(session) ^ _hash(instance_id))


@lru_cache(maxsize=10_000)
def _hash(name: str) -> int:
    """FNV-1a over the letters, the same in every process."""
    value = 0xCBF29CE484222325
    for letter in name:
        value = (value ^ ord(letter)) * 0x100000001B3 % 2**64
    return value


def _scattered(number: int) -> int:
    """A number of 64 bits that looks drawn (the finalizer of SplitMix64)."""
    number = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def _vllm_dp_score(candidate: Candidate) -> float:
    """vLLM 0.32's score of a data parallel rank (`DPLBAsyncMPClient`): its requests, and each that
    waits again, up to three times as the KV cache fills from one half on.

    vLLM's clients learn of the ranks every 100 ms and count what they have sent since as waiting;
    here instances report more often, and what no report shows counts in the same way.
    """
    load = candidate.load
    num_waiting = load.num_queuing + len(candidate.in_flight)
    usage = load.used_tokens / max(1, load.total_tokens)
    return load.num_running + num_waiting + 6.0 * num_waiting * max(0.0, usage - 0.5)


def _by_id(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda each: each.instance_id)


def _num_dispatched(candidates: Iterable[Candidate]) -> int:
    return sum(each.num_dispatched for each in candidates)


def _for_high_priority(
    request: NewRequest, eligible: Sequence[Candidate], policy: PolicyConfig
) -> Choice:
    """An instance with requests of the same priority while the load allows it.

    Departure from the paper, which names only freeness: an instance with a high-priority
    request has nearly no freeness, so that each further one would go to an instance without
    such requests, until all are virtually overloaded and none has a headroom left to give.
    """
    priority = policy.counts_as(request.execution_priority)
    target_tokens = policy.target_load_tokens[priority]
    joinable = tuple(
        each
        for each in eligible
        if _hosts(each, request, policy)
        and each.real_load_tokens + request.demand_tokens <= target_tokens
    )
    return Choice.first(
        joinable or eligible,
        lambda each: (each.real_load_tokens, *each.tie_break),
        by_headroom=True,
    )


def _has_headroom(request: NewRequest, policy: PolicyConfig) -> bool:
    return policy.counts_as(request.execution_priority) in policy.target_load_tokens


def _hosts(candidate: Candidate, request: NewRequest, policy: PolicyConfig) -> bool:
    priority = policy.counts_as(request.execution_priority)
    running = (each for each, _ in candidate.load.num_by_priority)
    in_flight = (policy.counts_as(each.execution_priority) for each in candidate.in_flight)
    return priority in (*running, *in_flight)
