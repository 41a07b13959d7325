"""Explanations of the scheduler's decisions, made from what it decided by. Pure.

A decision is made first, and explained afterwards: nothing here is computed in a simulation.
"""

from collections.abc import Mapping

import numpy as np

from sterna.config import DispatchRule, PolicyConfig
from sterna.messages.reasons import DispatchReason, InstanceSeen, MoveCause, MoveReason
from sterna.policy.candidate_table import Choice
from sterna.policy.dispatch import choose
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import InstanceId

LONGEST_ANSWER = "longest answer"
"""The requests that move first for balance."""


def dispatch_reason(
    request: NewRequest, choice: Choice, policy: PolicyConfig, *, num_instances: int, held_s: float
) -> DispatchReason:
    """The reason for a choice, with the instance that was the next best.

    Args:
        num_instances: all, also those that the rule did not look at.
        held_s: time for which the request waited at the scheduler.
    """
    costs = _costs(choice)
    other = _next_best(request, choice, costs, policy)
    return DispatchReason(
        rule_name(policy),
        len(choice.eligible),
        num_instances,
        _seen(request, choice.chosen, costs),
        None if other is None else _seen(request, other, costs),
        held_s,
    )


def rule_name(policy: PolicyConfig) -> str:
    """The name of the policy's rule of dispatch, as `--set dispatch=` has it."""
    if policy.own is not None:
        return type(policy.own).__name__
    rule = policy.dispatch
    return rule.value if isinstance(rule, DispatchRule) else type(rule).__name__.lower()


def move_reason(source: Candidate, destination: Candidate, policy: PolicyConfig) -> MoveReason:
    """The reason why the policy has paired these two: the first of its causes that applies, in the
    order in which `policy.pairing` looks at them."""
    load = source.load
    limit = policy.source_freeness_steps
    victim = policy.victim.value
    if policy.own is not None:
        cause = MoveCause.POLICY
    elif load.is_terminating:
        cause = MoveCause.EMPTYING
    elif source.freeness < limit:
        cause = MoveCause.MEMORY
    elif policy.preempted_make_source and load.num_preempted > 0:
        cause = MoveCause.PREEMPTION
    else:
        with_request_tokens = destination.virtual_load_tokens + (load.move_tokens or 0)
        return MoveReason(
            MoveCause.BALANCE,
            source.real_load_tokens,
            with_request_tokens,
            policy.balance_ratio or 0.0,
            LONGEST_ANSWER,
        )
    return MoveReason(cause, source.freeness, destination.freeness, limit, victim)


def _costs(choice: Choice) -> dict[InstanceId, float]:
    """The costs of the two cheapest instances, if the rule compares costs."""
    if choice.costs is None:
        return {}
    num_shown = min(2, len(choice.costs))
    rows = np.argpartition(choice.costs, num_shown - 1)[:num_shown].tolist()
    costs = {choice.eligible[row].instance_id: float(choice.costs[row]) for row in rows}
    # Of more than two that cost the same, another one may have been chosen.
    return {choice.instance_id: float(choice.costs.min()), **costs}


def _next_best(
    request: NewRequest, choice: Choice, costs: Mapping[InstanceId, float], policy: PolicyConfig
) -> Candidate | None:
    """The instance that the rule would have chosen without the chosen one; None if there is none,
    or a class decides, which remembers what it is asked."""
    if policy.own is not None or len(choice.eligible) < 2:
        return None
    if choice.costs is not None:
        other = next(each for each in costs if each != choice.instance_id)
    else:
        others = [each for each in choice.eligible if each is not choice.chosen]
        chosen = choose(request, others, policy)
        assert chosen is not None
        other = chosen
    return next(each for each in choice.eligible if each.instance_id == other)


def _seen(
    request: NewRequest, candidate: Candidate, costs: Mapping[InstanceId, float]
) -> InstanceSeen:
    instance_id = candidate.instance_id
    return InstanceSeen(
        instance_id,
        costs.get(instance_id),
        candidate.load.num_running,
        candidate.num_requests - candidate.load.num_running,
        candidate.room_tokens,
        candidate.freeness,
        candidate.uncomputed_tokens,
        request.cached_tokens(instance_id),
    )
