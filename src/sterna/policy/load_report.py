"""The load report of a llumlet to the global scheduler: Algorithm 1 over its requests. Pure."""

from sterna.config import PolicyConfig
from sterna.policy.selection import candidates_to_move
from sterna.policy.virtual_usage import (
    free_tokens_of,
    num_by_priority_of,
    prefill_demand_tokens_of,
    uncomputed_pairs_of,
    uncomputed_tokens_of,
    used_tokens_of,
)
from sterna.types import InstanceLoad, InstanceView


def load(
    view: InstanceView,
    policy: PolicyConfig,
    *,
    sequence: int,
    last_dispatch: int,
    num_migrating_out: int,
    num_migrating_in: int,
) -> InstanceLoad:
    """The load that the instance's llumlet reports to the global scheduler (Section 4.3)."""
    used_tokens = used_tokens_of(view)
    prefill_demand_tokens = prefill_demand_tokens_of(view)
    head_demand_tokens = view.queuing[0].demand_tokens if view.queuing else 0
    queued_demand_tokens = sum(request.demand_tokens for request in view.queuing)
    num_by_priority = tuple(sorted(num_by_priority_of(view, policy).items()))
    free_tokens, normal_free_tokens = free_tokens_of(
        policy,
        view.total_tokens,
        used_tokens,
        prefill_demand_tokens,
        head_demand_tokens,
        queued_demand_tokens,
        num_by_priority,
    )
    return InstanceLoad(
        instance_id=view.instance_id,
        sequence=sequence,
        total_tokens=view.total_tokens,
        used_tokens=used_tokens,
        free_tokens=free_tokens,
        normal_free_tokens=normal_free_tokens,
        num_running=len(view.running),
        num_queuing=len(view.queuing),
        head_demand_tokens=head_demand_tokens,
        queued_demand_tokens=queued_demand_tokens,
        num_by_priority=num_by_priority,
        last_dispatch=last_dispatch,
        move_tokens=move_tokens_of(view, policy),
        num_migrating_out=num_migrating_out,
        num_migrating_in=num_migrating_in,
        num_preemptions=view.num_preemptions,
        is_terminating=view.is_terminating,
        num_preempted=sum(request.num_preemptions > 0 for request in view.queuing),
        prefill_demand_tokens=prefill_demand_tokens,
        uncomputed_tokens=uncomputed_tokens_of(view),
        uncomputed_pairs=uncomputed_pairs_of(view),
        num_slots=view.num_slots,
    )


def move_tokens_of(view: InstanceView, policy: PolicyConfig) -> int | None:
    """Memory that the request which would move next takes at its destination; None: none can
    move."""
    to_move = candidates_to_move(view, policy)
    return max(to_move[0].physical_usage_tokens, to_move[0].demand_tokens) if to_move else None
