"""Virtual usage and freeness (Algorithm 1, Section 4.4.2). Pure.

Every goal of the scheduling policy becomes load balancing once the right requests are given a
usage that they do not have: a queuing request its demand, a high-priority request a headroom,
a terminating instance an infinite request. The sum of these *virtual usages* decides how free
an instance is:

    freeness = (M - sum of virtual usages) / B

in decode steps: M is the memory in tokens, B the batch size, and each step of the batch takes
one token a request.

The llumlet evaluates the algorithm over its requests (`load`); the global scheduler sees only
the sums and corrects them for what it has dispatched since (`freeness_of`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sterna.config import PolicyConfig, QueueDemand
from sterna.policy.selection import candidates_to_move
from sterna.types import (
    InstanceId,
    InstanceLoad,
    InstanceView,
    Priority,
    RequestStatus,
    RequestView,
)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that no load report shows yet: to be dispatched, or on its way to an instance."""

    demand_tokens: int
    execution_priority: Priority


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance as the global scheduler knows it.

    Attributes:
        load: its last report.
        in_flight: requests on their way to it.
        num_dispatched: requests dispatched to it so far, for round robin.
    """

    load: InstanceLoad
    in_flight: tuple[NewRequest, ...] = ()
    num_dispatched: int = 0

    @property
    def instance_id(self) -> InstanceId:
        """The instance's id."""
        return self.load.instance_id

    @property
    def freeness(self) -> float:
        """Freeness in decode steps, corrected for the requests in flight."""
        return freeness_of(self.load, self.in_flight)


def virtual_usage(request: RequestView, instance: InstanceView, policy: PolicyConfig) -> float:
    """Virtual usage of one request of the instance, in tokens (Algorithm 1, lines 1-8)."""
    return _virtual_usage(request, instance, policy, _headroom_shares(instance, policy))


def headroom(priority: Priority, instance: InstanceView, policy: PolicyConfig) -> float:
    """Headroom that one running request of this priority adds, in tokens (lines 9 and 10).

    The running requests of a priority share its headroom. Queuing ones take no share: they have
    none to add, and the whole is to be kept free as soon as one request of the priority runs.
    """
    counts = _num_by_priority(instance, policy)
    return headroom_tokens(priority, instance.total_tokens, policy) / max(1, counts[priority])


def headroom_tokens(priority: Priority, total_tokens: int, policy: PolicyConfig) -> int:
    """Memory to keep free where requests of this priority run: M less the target load, or 0.

    A priority without a target load, the normal one above all, has no headroom.
    """
    target_tokens = policy.target_load_tokens.get(policy.counts_as(priority))
    return 0 if target_tokens is None else max(0, total_tokens - target_tokens)


def freeness(instance: InstanceView, policy: PolicyConfig) -> float:
    """Freeness of the instance in decode steps (Algorithm 1, lines 11-18).

    Departure from the paper: a negative numerator is not divided by the batch size, since the
    division would make an overloaded instance look freer the more requests it has.
    """
    if instance.is_terminating:
        # Lines 12 and 13: the fake request's infinite usage leaves minus infinity.
        return -math.inf
    batch_size = _batch_size(len(instance.running), len(instance.queuing))
    return _steps(_free_tokens(instance, policy), batch_size)


def load(
    view: InstanceView,
    policy: PolicyConfig,
    *,
    sequence: int,
    last_dispatch: int,
    num_migrating_out: int,
    num_migrating_in: int,
) -> InstanceLoad:
    """What the instance's llumlet reports to the global scheduler (Section 4.3)."""
    physical_tokens = sum(request.physical_usage_tokens for request in view.running)
    to_move = candidates_to_move(view, policy)
    counts = _num_by_priority(view, policy)
    headroom_sum = sum(headroom_tokens(each, view.total_tokens, policy) for each in counts)
    free_tokens = _free_tokens(view, policy)
    return InstanceLoad(
        instance_id=view.instance_id,
        sequence=sequence,
        total_tokens=view.total_tokens,
        used_tokens=physical_tokens - view.shared_tokens + view.reserved_tokens,
        free_tokens=free_tokens,
        normal_free_tokens=free_tokens + headroom_sum,
        num_running=len(view.running),
        num_queuing=len(view.queuing),
        head_demand_tokens=view.queuing[0].demand_tokens if view.queuing else 0,
        queued_demand_tokens=sum(request.demand_tokens for request in view.queuing),
        num_by_priority=tuple(sorted(counts.items())),
        last_dispatch=last_dispatch,
        move_tokens=_memory_to_move(to_move[0]) if to_move else None,
        num_migrating_out=num_migrating_out,
        num_migrating_in=num_migrating_in,
        num_preemptions=view.num_preemptions,
        is_terminating=view.is_terminating,
    )


def freeness_of(load: InstanceLoad, in_flight: Iterable[NewRequest] = ()) -> float:
    """Freeness of a reported instance in decode steps, as if the requests in flight were there.

    Each of them adds its demand and one request to the batch: until the next report shows where
    it stands, it is taken for a request that will run.
    """
    return _corrected(load, load.free_tokens, in_flight)


def normal_freeness_of(load: InstanceLoad, in_flight: Iterable[NewRequest] = ()) -> float:
    """The same for the normal priority: every headroom left out (Section 4.4.3, auto-scaling)."""
    return _corrected(load, load.normal_free_tokens, in_flight)


def _corrected(load: InstanceLoad, free_tokens: float, in_flight: Iterable[NewRequest]) -> float:
    if load.is_terminating:
        return -math.inf
    num_running = load.num_running
    for request in in_flight:
        free_tokens -= request.demand_tokens
        num_running += 1
    return _steps(free_tokens, _batch_size(num_running, load.num_queuing))


def _virtual_usage(
    request: RequestView,
    instance: InstanceView,
    policy: PolicyConfig,
    headroom_shares: Mapping[Priority, float],
) -> float:
    if request.status is RequestStatus.QUEUING:
        is_head_of_line = instance.queuing[0].request_id == request.request_id
        if is_head_of_line or policy.queue_demand is QueueDemand.ALL:
            return request.demand_tokens
        return 0
    return (
        request.physical_usage_tokens
        + headroom_shares[policy.counts_as(request.execution_priority)]
    )


def _headroom_shares(instance: InstanceView, policy: PolicyConfig) -> dict[Priority, float]:
    return {
        priority: headroom_tokens(priority, instance.total_tokens, policy) / count
        for priority, count in _num_by_priority(instance, policy).items()
    }


def _num_by_priority(instance: InstanceView, policy: PolicyConfig) -> Counter[Priority]:
    return Counter(policy.counts_as(request.execution_priority) for request in instance.running)


def _free_tokens(instance: InstanceView, policy: PolicyConfig) -> float:
    shares = _headroom_shares(instance, policy)
    used_tokens = sum(
        _virtual_usage(request, instance, policy, shares)
        for request in (*instance.running, *instance.queuing)
    )
    # A reservation is memory that an incoming request already owns; a block that requests share
    # through the prefix cache is in the sum once for each of them.
    return instance.total_tokens - used_tokens - instance.reserved_tokens + instance.shared_tokens


def _batch_size(num_running: int, num_queuing: int) -> int:
    # All queuing requests count as one, since only the head of the line has a usage. An idle
    # instance counts as one request, so that its freeness stays finite.
    return max(1, num_running + (1 if num_queuing else 0))


def _steps(free_tokens: float, batch_size: int) -> float:
    return free_tokens / batch_size if free_tokens > 0 else free_tokens


def _memory_to_move(request: RequestView) -> int:
    return max(request.physical_usage_tokens, request.demand_tokens)
