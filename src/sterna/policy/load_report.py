"""The load report of a llumlet to the global scheduler: Algorithm 1 over its requests. Pure."""

from itertools import islice

from msgspec import structs

from sterna.config import PolicyConfig
from sterna.policy.selection import candidates_to_move
from sterna.policy.survival import coming_tokens
from sterna.policy.virtual_usage import (
    free_tokens_of,
    num_by_priority_of,
    prefill_demand_tokens_of,
    uncomputed_pairs_of,
    uncomputed_tokens_of,
    used_tokens_of,
)
from sterna.types import (
    MAX_LARGE_PROMPTS,
    InstanceLoad,
    InstanceView,
    RequestStatus,
    RequestView,
)

LARGE_SHARE = 0.1
"""A prompt is large that needs more than this share of an instance's memory."""


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
    large_prompts = (
        each.request_id for each in reversed(view.running) if is_large(each, view.total_tokens)
    )
    report = InstanceLoad(
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
        num_migrating_out=num_migrating_out,
        num_migrating_in=num_migrating_in,
        num_preemptions=view.num_preemptions,
        is_terminating=view.is_terminating,
        num_preempted=sum(request.num_preemptions > 0 for request in view.queuing),
        prefill_demand_tokens=prefill_demand_tokens,
        uncomputed_tokens=uncomputed_tokens_of(view),
        uncomputed_pairs=uncomputed_pairs_of(view),
        num_slots=view.num_slots,
        large_prompts=(
            tuple(islice(large_prompts, MAX_LARGE_PROMPTS)) if policy.binds_late else ()
        ),
    )
    return with_moves(report, view, policy)


def is_large(request: RequestView, total_tokens: int) -> bool:
    """Whether the running request's prompt is large, and computed."""
    prompt_tokens = request.num_tokens - request.num_output_tokens
    return prompt_tokens > LARGE_SHARE * total_tokens and request.demand_tokens == 0


def with_moves(report: InstanceLoad, view: InstanceView, policy: PolicyConfig) -> InstanceLoad:
    """The load, completed with what only a look at each request shows: the next one to move, and
    what they are expected to need."""
    to_move = candidates_to_move(view, policy)[:1]
    move_tokens: int | None = None
    moves_queuing = False
    if to_move:
        (request,) = to_move
        move_tokens = max(request.physical_usage_tokens, request.demand_tokens)
        moves_queuing = request.status is RequestStatus.QUEUING
    report = structs.replace(report, move_tokens=move_tokens, moves_queuing=moves_queuing)
    horizon_steps = policy.balance_horizon_steps
    if horizon_steps is None:
        return report
    coming = coming_tokens((*view.running, *view.queuing), view, horizon_steps)
    return structs.replace(
        report,
        coming_tokens=view.reserved_tokens + round(sum(coming)),
        move_coming_tokens=round(sum(coming_tokens(to_move, view, horizon_steps))),
    )
