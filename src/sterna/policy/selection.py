"""Selection: the requests that a source instance moves, and their order (Section 4.4.3). Pure."""

from collections.abc import Iterable, Sequence
from typing import assert_never

from sterna.config import PolicyConfig, Victim
from sterna.errors import ConfigurationError
from sterna.policy.survival import coming_tokens
from sterna.policy.virtual_usage import (
    free_tokens_of,
    is_source_by_memory,
    lowest_with_headroom,
    prefill_demand_tokens_of,
    used_tokens_of,
)
from sterna.types import InstanceView, Priority, RequestId, RequestView

_Ranked = tuple[Priority, float, RequestId, RequestView]
"""A request behind what it is sorted by."""


def candidates_to_move(instance: InstanceView, policy: PolicyConfig) -> tuple[RequestView, ...]:
    """Requests that can move, in the order of their moves; empty if there is none.

    Running requests go by execution priority, the lowest first, then by the policy's victim
    rule, then by id. A request that is immovable at this moment is left out.

    If headrooms alone make an instance a source, requests of the priorities with a headroom and
    above stay, and others leave until none is left. Otherwise a high-priority request that has
    an instance to itself would be the next to move, and meet other requests again.

    From an instance that has memory requests move for balance alone (`balance_ratio`): those that
    have generated most, or those that are expected to use most memory in some steps
    (`balance_horizon_steps`), by priority as well. They have generated `balance_after_tokens` at
    least: most outputs are short, and where they are not, what remains is the longer, the longer
    they have become. They have generated as many on this instance, so that a request does not move
    again each time that loads change a little.

    Queuing requests move only from a terminating instance, and then first and in the engine's
    order: they hold no memory, so their move copies nothing, and they cannot run before another
    request has left. From an instance that stays, the paper moves running requests: the queuing
    ones then get the memory that these free.
    """
    if policy.own is not None:
        return checked_victims(policy.own.victims(instance), instance)
    ranks = _ranks(instance.running, policy.victim)
    order: list[_Ranked] = [
        (policy.counts_as(request.execution_priority), rank, request.request_id, request)
        for rank, request in zip(ranks, instance.running, strict=True)
        if request.immovable is None
    ]
    # Ids are unique, so that requests themselves are never compared.
    order.sort()
    if instance.is_terminating:
        queuing = [request for request in instance.queuing if request.immovable is None]
        return (*queuing, *[request for _, _, _, request in order])
    lowest = lowest_with_headroom(instance.total_tokens, policy)
    has_headroom = lowest is not None and any(
        policy.counts_as(request.execution_priority) >= lowest for request in instance.running
    )
    moves_otherwise = has_headroom or policy.balance_ratio is not None
    if order and moves_otherwise and not _is_source_by_memory(instance, policy):
        if lowest is not None and has_headroom:
            order = [each for each in order if each[0] < lowest]
        else:
            order = _for_balance(order, instance, policy)
    return tuple([request for _, _, _, request in order])


def checked_victims(victims: object, instance: InstanceView) -> tuple[RequestView, ...]:
    """The requests that a custom class has chosen on this instance.

    Raises:
        ConfigurationError: this is not a sequence of requests, or one is not there, or cannot move.
    """
    there = {each.request_id for each in (*instance.running, *instance.queuing)}
    if not isinstance(victims, Iterable):
        raise ConfigurationError(
            f"victims must return a sequence of requests of the instance, not {victims!r}"
        )
    chosen = tuple(victims)
    for each in chosen:
        if not isinstance(each, RequestView):
            raise ConfigurationError(f"victims must return requests of the instance, not {each!r}")
        if each.request_id not in there:
            raise ConfigurationError(f"victims: request {each.request_id} is not on the instance")
        if each.immovable is not None:
            raise ConfigurationError(
                f"victims: request {each.request_id} cannot move: {each.immovable.value}"
            )
    return chosen


def _for_balance(
    order: Iterable[_Ranked], instance: InstanceView, policy: PolicyConfig
) -> list[_Ranked]:
    order = [
        each
        for each in order
        if each[-1].num_output_tokens - each[-1].num_earlier_tokens >= policy.balance_after_tokens
    ]
    requests = [each[-1] for each in order]
    amounts: Sequence[float] = [each.num_output_tokens for each in requests]
    if policy.balance_horizon_steps is not None:
        amounts = coming_tokens(requests, instance, policy.balance_horizon_steps)
    return sorted(
        (priority, -amount, request_id, request)
        for (priority, _, request_id, request), amount in zip(order, amounts, strict=True)
    )


def _is_source_by_memory(instance: InstanceView, policy: PolicyConfig) -> bool:
    queuing = instance.queuing
    _, normal_free_tokens = free_tokens_of(
        policy,
        instance.total_tokens,
        used_tokens_of(instance),
        prefill_demand_tokens_of(instance),
        queuing[0].demand_tokens if queuing else 0,
        sum(request.demand_tokens for request in queuing),
        num_by_priority=(),
    )
    num_preempted = sum(request.num_preemptions > 0 for request in queuing)
    return is_source_by_memory(
        normal_free_tokens, len(instance.running), len(queuing), num_preempted, policy
    )


def _copied_for_freed(request: RequestView) -> int:
    """What is copied for each token of memory that the request has for itself, in 1/1024; then its
    length."""
    num_own_tokens = max(1, request.num_tokens - request.num_shared_tokens)
    return ((request.num_tokens << 10) // num_own_tokens << 32) + request.num_tokens


def _ranks(requests: Sequence[RequestView], victim: Victim) -> Iterable[int]:
    """The rank of each request by the victim rule; the lowest moves first."""
    match victim:
        case Victim.SHORTEST:
            return [request.num_tokens for request in requests]
        case Victim.LONGEST:
            return [-request.num_tokens for request in requests]
        case Victim.LAST_STARTED:
            return range(0, -len(requests), -1)
        case Victim.FREEING:
            return [_copied_for_freed(each) for each in requests]
        case _:
            assert_never(victim)
