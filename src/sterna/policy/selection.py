"""Which requests a source instance moves, and in which order (Section 4.4.3). Pure."""

from sterna.config import PolicyConfig, Victim
from sterna.types import InstanceView, Priority, RequestId, RequestView


def candidates_to_move(instance: InstanceView, policy: PolicyConfig) -> tuple[RequestView, ...]:
    """Requests that can move, the one to move first in front; empty when there is none.

    Running requests go by execution priority, the lowest first, then by the policy's victim
    rule, then by id. A request that is immovable at this moment is left out.

    Queuing requests move only from a terminating instance, and then first and in the engine's
    order: they hold no memory, so their move copies nothing, and they cannot be served until
    somebody else has left. From an instance that stays, the paper moves running requests: the
    queue drains into the memory that they free.
    """
    movable = [each for each in enumerate(instance.running) if each[1].immovable is None]
    movable.sort(key=lambda each: _order(each[0], each[1], policy))
    running = tuple(request for _, request in movable)
    if not instance.is_terminating:
        return running
    queuing = tuple(request for request in instance.queuing if request.immovable is None)
    return queuing + running


def select(instance: InstanceView, policy: PolicyConfig) -> RequestView | None:
    """The request to move next, or None when none can move."""
    candidates = candidates_to_move(instance, policy)
    return candidates[0] if candidates else None


def _order(
    index: int, request: RequestView, policy: PolicyConfig
) -> tuple[Priority, int, RequestId]:
    match policy.victim:
        case Victim.SHORTEST:
            rank = request.num_tokens
        case Victim.LONGEST:
            rank = -request.num_tokens
        case Victim.LAST_STARTED:
            # The engine lists running requests in the order in which they entered the batch.
            rank = -index
    return policy.counts_as(request.execution_priority), rank, request.request_id
