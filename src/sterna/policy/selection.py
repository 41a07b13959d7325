"""Which requests a source instance moves, and in which order (Section 4.4.3). Pure."""

from collections.abc import Iterable, Sequence

from sterna.config import PolicyConfig, Victim
from sterna.types import InstanceView, RequestView


def candidates_to_move(instance: InstanceView, policy: PolicyConfig) -> tuple[RequestView, ...]:
    """Requests that can move, the one to move first in front; empty when there is none.

    Running requests go by execution priority, the lowest first, then by the policy's victim
    rule, then by id. A request that is immovable at this moment is left out.

    Queuing requests move only from a terminating instance, and then first and in the engine's
    order: they hold no memory, so their move copies nothing, and they cannot be served until
    somebody else has left. From an instance that stays, the paper moves running requests: the
    queue drains into the memory that they free.
    """
    ranks = _ranks(instance.running, policy.victim)
    order = [
        (policy.counts_as(request.execution_priority), rank, request.request_id, request)
        for rank, request in zip(ranks, instance.running, strict=True)
        if request.immovable is None
    ]
    # Ids are unique, so that requests themselves are never compared.
    order.sort()
    running = tuple([request for _, _, _, request in order])
    if not instance.is_terminating:
        return running
    queuing = tuple(request for request in instance.queuing if request.immovable is None)
    return queuing + running


def select(instance: InstanceView, policy: PolicyConfig) -> RequestView | None:
    """The request to move next, or None when none can move."""
    candidates = candidates_to_move(instance, policy)
    return candidates[0] if candidates else None


def _ranks(requests: Sequence[RequestView], victim: Victim) -> Iterable[int]:
    """The place of each request by the victim rule, the first to move lowest."""
    match victim:
        case Victim.SHORTEST:
            return [request.num_tokens for request in requests]
        case Victim.LONGEST:
            return [-request.num_tokens for request in requests]
        case Victim.LAST_STARTED:
            # The engine lists running requests in the order in which they entered the batch.
            return range(0, -len(requests), -1)
