"""Explanations of the scheduler's decisions, made from what it decided by. Pure.

A decision is made first, and explained afterwards: nothing here is computed in a simulation.
"""

import numpy as np

from sterna.config import DispatchRule, PolicyConfig, prefix_rule_name
from sterna.messages.reasons import DispatchReason, InstanceSeen, MoveCause, MoveReason
from sterna.policy.candidate_table import (
    FREENESS,
    NUM_REQUESTS,
    NUM_RUNNING,
    ROOM_TOKENS,
    UNCOMPUTED_TOKENS,
    CandidateTable,
    Choice,
    Column,
)
from sterna.policy.pairing import added_load_tokens, balanced_load_tokens
from sterna.policy.virtual_usage import Candidate, NewRequest, normal_freeness_of
from sterna.types import InstanceId

HEADROOM = "headroom"
"""The rule for requests that have a headroom: the smallest load, among instances with requests of
the same priority while one of these stays below the target load."""

LONGEST_ANSWER = "longest answer"
"""The requests that move first for balance."""

MOST_TO_COME = "most memory to come"
"""Those that move first where the policy has a horizon (`balance_horizon_steps`)."""


def dispatch_reason(
    request: NewRequest, choice: Choice, policy: PolicyConfig, *, num_instances: int, held_s: float
) -> DispatchReason:
    """The reason for a choice, with the instance that was the next best.

    Args:
        num_instances: all, also those that the rule did not look at.
        held_s: time for which the request waited at the scheduler.
    """
    eligible = choice.eligible
    chosen: InstanceSeen
    other: InstanceSeen | None
    if choice.costs is not None and isinstance(eligible, CandidateTable):
        chosen, other = _seen_by_costs(request, eligible, choice.instance_id, choice.costs)
    else:
        next_best = choice.next_best()
        chosen = _seen(request, choice.chosen)
        other = None if next_best is None else _seen(request, next_best)
    rule = HEADROOM if choice.by_headroom else rule_name(policy)
    return DispatchReason(rule, len(eligible), num_instances, chosen, other, held_s)


def rule_name(policy: PolicyConfig) -> str:
    """The name of the rule of dispatch, as for `--set dispatch=`, or of the class that has one."""
    if policy.own is not None and policy.own.chooses_instances:
        return policy.name
    rule = policy.dispatch
    return rule.value if isinstance(rule, DispatchRule) else prefix_rule_name(rule)


def move_reason(source: Candidate, destination: Candidate, policy: PolicyConfig) -> MoveReason:
    """The reason why the policy has paired these two: the first of its causes that applies, in the
    order in which `policy.pairing` looks at them."""
    load = source.load
    if policy.own is not None and policy.own.makes_pairs:
        cause = MoveCause.POLICY
    elif load.is_terminating:
        cause = MoveCause.EMPTYING
    elif source.freeness < policy.source_freeness_steps:
        has_headroom = source.headroom_share * source.headrooms_tokens > 0
        is_short = normal_freeness_of(load, policy=policy) < policy.source_freeness_steps
        cause = MoveCause.HEADROOM if has_headroom and not is_short else MoveCause.MEMORY
    elif policy.preempted_make_source and load.num_preempted > 0:
        cause = MoveCause.PREEMPTION
    else:
        headrooms_tokens = destination.headroom_share * destination.headrooms_tokens
        after_tokens = balanced_load_tokens(destination, policy) + headrooms_tokens
        return MoveReason(
            MoveCause.BALANCE,
            balanced_load_tokens(source, policy),
            after_tokens + added_load_tokens(load, policy),
            policy.balance_ratio or 0.0,
            _victim_for_balance(source, policy),
        )
    return MoveReason(
        cause,
        source.freeness,
        destination.freeness,
        policy.source_freeness_steps,
        _victim(policy),
    )


def _victim(policy: PolicyConfig) -> str:
    """The name of the order in which requests move where memory is short."""
    if policy.own is not None and policy.own.chooses_victims:
        return policy.name
    return policy.victim.value


def _victim_for_balance(source: Candidate, policy: PolicyConfig) -> str:
    """See `policy.selection.candidates_to_move`."""
    if source.headrooms_tokens > 0 or (policy.own is not None and policy.own.chooses_victims):
        return _victim(policy)
    return LONGEST_ANSWER if policy.balance_horizon_steps is None else MOST_TO_COME


def _seen_by_costs(
    request: NewRequest, eligible: CandidateTable, chosen: InstanceId, costs: Column
) -> tuple[InstanceSeen, InstanceSeen | None]:
    """The chosen instance and the next best, where the rule takes the one of the smallest cost. Of
    several that cost the same, any one may be the next best."""
    first = int(costs.argmin())
    if eligible[first].instance_id != chosen:
        # Others cost the same.
        first = next(row for row, each in enumerate(eligible) if each.instance_id == chosen)
    seen = _seen_in_row(request, eligible, first, float(costs[first]))
    if len(costs) == 1:
        return seen, None
    others = costs.copy()
    others[first] = np.inf
    second = int(others.argmin())
    return seen, _seen_in_row(request, eligible, second, float(costs[second]))


def _seen_in_row(request: NewRequest, table: CandidateTable, row: int, cost: float) -> InstanceSeen:
    """As `_seen`, from the columns, which the decision has made already."""
    instance_id = table[row].instance_id
    of_instance = table.columns[:, row].tolist()
    num_running = int(of_instance[NUM_RUNNING])
    return InstanceSeen(
        instance_id,
        cost,
        num_running,
        int(of_instance[NUM_REQUESTS]) - num_running,
        of_instance[ROOM_TOKENS],
        of_instance[FREENESS],
        int(of_instance[UNCOMPUTED_TOKENS]),
        request.cached_tokens(instance_id),
    )


def _seen(request: NewRequest, candidate: Candidate) -> InstanceSeen:
    instance_id = candidate.instance_id
    num_running = candidate.load.num_running
    return InstanceSeen(
        instance_id,
        None,
        num_running,
        candidate.num_requests - num_running,
        candidate.room_tokens,
        candidate.freeness,
        candidate.uncomputed_tokens,
        request.cached_tokens(instance_id),
    )
