"""Virtual usage and freeness (Algorithm 1, Section 4.4.2). Pure.

Every goal of the scheduling policy becomes load balancing if some requests count with a usage that
they do not have: a queuing request with its demand, a high-priority request with a headroom, and a
terminating instance with an infinite request. The sum of these *virtual usages* decides how free an
instance is:

    freeness = (M - sum of virtual usages) / B

in decode steps: M is the memory in tokens, B the batch size, and each step of the batch takes
one token a request.

The llumlet evaluates the algorithm over its requests (`load_report`); the global scheduler sees
only the sums and corrects them for what it has dispatched since (`freeness_of`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from sterna.config import PolicyConfig, QueueDemand
from sterna.types import (
    NORMAL,
    InstanceId,
    InstanceLoad,
    InstanceView,
    Priority,
    pairs_of,
)

DEFAULT_POLICY = PolicyConfig(name="default")


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that no load report shows yet: about to be dispatched, or in flight.

    Attributes:
        cached: tokens of its prompt, from the first on, that instances have in their prefix caches
            or will have for earlier requests; without instances that have none.
    """

    demand_tokens: int
    execution_priority: Priority
    session: str = ""
    prompt_tokens: int = 0
    cached: Mapping[InstanceId, int] = field(default_factory=dict)

    def cached_tokens(self, instance_id: InstanceId) -> int:
        """Tokens of its prompt, from the first on, that the instance need not compute."""
        return self.cached.get(instance_id, 0)

    def uncached_tokens(self, instance_id: InstanceId) -> int:
        """Tokens of its prompt that the instance would have to compute."""
        return self.prompt_tokens - self.cached_tokens(instance_id)

    def uncached_pairs(self, instance_id: InstanceId) -> int:
        """Pairs of attending tokens that the instance would have to compute for its prompt."""
        return pairs_of(self.prompt_tokens, self.uncached_tokens(instance_id))


@dataclass(slots=True)
class Candidate:
    """One instance as the global scheduler knows it; never changed.

    Not frozen, because that would double the time for making one, which happens with every load
    report.

    Attributes:
        load: its last report.
        in_flight: requests on their way to it.
        num_dispatched: requests dispatched to it so far, for round robin.
        num_dispatched_tokens: the tokens of their prompts that it had to compute.
        policy: the rules by which its freeness is computed.
        headroom_share: the part of its headrooms that counts, from 0 to 1 (`headroom.shared`).
        freeness: in decode steps, corrected for the requests in flight.
        dispatch_freeness: the freeness by which a new request is dispatched.
    """

    load: InstanceLoad
    in_flight: tuple[NewRequest, ...] = ()
    num_dispatched: int = 0
    num_dispatched_tokens: int = 0
    policy: PolicyConfig = DEFAULT_POLICY
    headroom_share: float = 1.0
    freeness: float = field(init=False)
    dispatch_freeness: float = field(init=False)

    def __post_init__(self) -> None:
        # Computed once: a scheduler of many instances compares most of them for every request.
        load, in_flight, policy = self.load, self.in_flight, self.policy
        share = self.headroom_share
        self.freeness = self.dispatch_freeness = freeness_of(load, in_flight, policy, share)
        if policy.batch_counts_queue:
            self.dispatch_freeness = dispatch_freeness_of(load, in_flight, policy, share)

    @property
    def instance_id(self) -> InstanceId:
        """The instance's id."""
        return self.load.instance_id

    @property
    def num_requests(self) -> int:
        """Requests that run, queue or are on their way."""
        return self.load.num_running + self.load.num_queuing + len(self.in_flight)

    @property
    def tie_break(self) -> tuple[int, InstanceId]:
        """Among instances that are equal otherwise, the smallest is preferred."""
        return self.num_requests, self.load.instance_id

    @property
    def real_load_tokens(self) -> int:
        """Memory that the instance's requests use or wait for, without any headroom, in tokens.

        Queuing and in-flight requests count with their demand: they will decode beside the new
        request.
        """
        load = self.load
        load_tokens = load.used_tokens + load.prefill_demand_tokens + load.queued_demand_tokens
        if self.in_flight:
            load_tokens += sum([request.demand_tokens for request in self.in_flight])
        return load_tokens

    @property
    def coming_load_tokens(self) -> int:
        """Memory that its requests are expected to use at the policy's horizon
        (`balance_horizon_steps`); those in flight count with their demand."""
        return self.load.coming_tokens + sum([each.demand_tokens for each in self.in_flight])

    @property
    def headrooms_tokens(self) -> float:
        """All headrooms of its running requests as a whole, in tokens."""
        return self.load.normal_free_tokens - self.load.free_tokens

    @property
    def virtual_load_tokens(self) -> float:
        """`real_load_tokens` with the headrooms, as far as they count."""
        return self.real_load_tokens + self.headroom_share * self.headrooms_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of prompts that it has still to compute, requests in flight included."""
        in_flight = [each.uncached_tokens(self.load.instance_id) for each in self.in_flight]
        return self.load.uncomputed_tokens + sum(in_flight)

    @property
    def uncomputed_pairs(self) -> int:
        """Pairs of attending tokens of prompts that it has still to compute, likewise."""
        in_flight = [each.uncached_pairs(self.load.instance_id) for each in self.in_flight]
        return self.load.uncomputed_pairs + sum(in_flight)

    @property
    def has_full_batch(self) -> bool:
        """Whether those that run, queue or are on their way take all places of the batch."""
        num_slots = self.load.num_slots
        return num_slots is not None and self.num_requests >= num_slots

    @property
    def room_tokens(self) -> float:
        """Memory for requests beside all that run, queue or are on their way; may be negative. 0
        while these fill the batch."""
        return 0 if self.has_full_batch else self.load.total_tokens - self.real_load_tokens

    def with_load(self, load: InstanceLoad) -> "Candidate":
        """The same instance as if it had reported this load."""
        return replace(self, load=load)


def headroom_tokens(priority: Priority, total_tokens: int, policy: PolicyConfig) -> int:
    """Memory to keep free where requests of this priority run: M less the target load, or 0.

    A priority without a target load, the normal one above all, has no headroom.
    """
    target_tokens = policy.target_load_tokens.get(policy.counts_as(priority))
    return 0 if target_tokens is None else max(0, total_tokens - target_tokens)


def used_tokens_of(instance: InstanceView) -> int:
    """Physical memory in use."""
    physical_tokens = sum(request.physical_usage_tokens for request in instance.running)
    # A reservation is memory that an incoming request already owns. The sum counts a block that
    # requests share through the prefix cache once for each of them.
    return physical_tokens - instance.shared_tokens + instance.reserved_tokens


def prefill_demand_tokens_of(instance: InstanceView) -> int:
    """Memory that requests in the batch still lack for their whole prompts.

    The virtual usage of a request that is prefilled in chunks is that of its whole prompt from
    its first chunk on: it had it as the head of the line, and admission has promised it.
    """
    return sum(
        [
            request.demand_tokens - request.physical_usage_tokens
            for request in instance.running
            if request.demand_tokens > request.physical_usage_tokens
        ]
    )


def uncomputed_tokens_of(instance: InstanceView) -> int:
    """Tokens that the engine has still to compute before its requests all decode."""
    return sum([request.uncomputed_tokens for request in (*instance.running, *instance.queuing)])


def uncomputed_pairs_of(instance: InstanceView) -> int:
    """Pairs of attending tokens that the engine has still to compute for the same."""
    return sum(
        [
            pairs_of(request.num_tokens, request.uncomputed_tokens)
            for request in (*instance.running, *instance.queuing)
            if request.uncomputed_tokens
        ]
    )


def free_tokens_of(
    policy: PolicyConfig,
    total_tokens: int,
    used_tokens: int,
    prefill_demand_tokens: int,
    head_demand_tokens: int,
    queued_demand_tokens: int,
    num_by_priority: tuple[tuple[Priority, int], ...],
) -> tuple[int, int]:
    """Memory less the virtual usages, first with every headroom and then with none.

    Algorithm 1, lines 1 to 10 and 14 to 16, from the sums over an instance's requests, which
    engines may know without listing the requests. The running requests of a priority share its
    headroom, so that their sum has the whole of it.

    Args:
        num_by_priority: running requests of each execution priority as the policy sees it
            (`PolicyConfig.counts_as`), in ascending order, without zeros.
    """
    match policy.queue_demand:
        case QueueDemand.HEAD:
            demand_tokens = head_demand_tokens
        case QueueDemand.ALL:
            demand_tokens = queued_demand_tokens
        case _:
            assert_never(policy.queue_demand)
    normal_free_tokens = total_tokens - used_tokens - prefill_demand_tokens - demand_tokens
    free_tokens = normal_free_tokens
    for priority, _ in num_by_priority:
        if priority != NORMAL:
            free_tokens -= headroom_tokens(priority, total_tokens, policy)
    return free_tokens, normal_free_tokens


def freeness_of(
    load: InstanceLoad,
    in_flight: Iterable[NewRequest] = (),
    policy: PolicyConfig = DEFAULT_POLICY,
    headroom_share: float = 1.0,
) -> float:
    """Freeness of a reported instance in decode steps, as if the requests in flight had arrived
    (Algorithm 1, lines 11 to 18).

    Each of them adds its demand and one request to the batch: until the next report shows its
    state, it is taken for a request that will run.
    """
    num_in_line = 1 if load.num_queuing else 0
    return _corrected(load, in_flight, num_in_line, policy, headroom_share)


def dispatch_freeness_of(
    load: InstanceLoad,
    in_flight: Iterable[NewRequest],
    policy: PolicyConfig,
    headroom_share: float,
) -> float:
    """Dispatch freeness: `freeness_of` with every queuing request in the batch
    (`batch_counts_queue`)."""
    return _corrected(load, in_flight, load.num_queuing, policy, headroom_share)


def normal_freeness_of(
    load: InstanceLoad,
    in_flight: Iterable[NewRequest] = (),
    policy: PolicyConfig = DEFAULT_POLICY,
) -> float:
    """Freeness for the normal priority: `freeness_of` without any headroom (Section 4.4.3,
    auto-scaling)."""
    num_in_line = 1 if load.num_queuing else 0
    return _corrected(load, in_flight, num_in_line, policy, headroom_share=0.0)


def is_source_by_memory(
    normal_free_tokens: float,
    num_running: int,
    num_queuing: int,
    num_preempted: int,
    policy: PolicyConfig,
) -> bool:
    """Whether an instance would be a source of migrations if no request had a headroom.

    Args:
        num_running: at least 1, since an instance without running requests has none to move.
        num_preempted: queuing requests whose memory was taken back.
    """
    if policy.preempted_make_source and num_preempted > 0:
        return True
    # All queuing requests count as one, since only the head of the line has a usage.
    batch_size = num_running + (1 if num_queuing else 0)
    return _steps(normal_free_tokens, batch_size, policy) < policy.source_freeness_steps


def lowest_with_headroom(total_tokens: int, policy: PolicyConfig) -> Priority | None:
    """The lowest priority that has a headroom on an instance of this memory, or None."""
    priorities = [
        priority
        for priority in policy.target_load_tokens
        if headroom_tokens(priority, total_tokens, policy) > 0
    ]
    return min(priorities, default=None)


def _corrected(
    load: InstanceLoad,
    in_flight: Iterable[NewRequest],
    num_in_line: int,
    policy: PolicyConfig,
    headroom_share: float,
) -> float:
    if load.is_terminating:
        # Lines 12 and 13: the fake request's infinite usage leaves minus infinity.
        return -math.inf
    batch_size = load.num_running + num_in_line
    normal_free_tokens = load.normal_free_tokens
    for request in in_flight:
        normal_free_tokens -= request.demand_tokens
        batch_size += 1
    # `CandidateTable.with_headroom_share` computes the same, to the last bit.
    headrooms_tokens = load.normal_free_tokens - load.free_tokens
    free_tokens = normal_free_tokens - headroom_share * headrooms_tokens
    # An idle instance counts as one request, so that its freeness stays finite.
    return _steps(free_tokens, batch_size or 1, policy)


def num_by_priority_of(instance: InstanceView, policy: PolicyConfig) -> Counter[Priority]:
    """Running requests of each execution priority as the policy sees it."""
    return Counter(policy.counts_as(request.execution_priority) for request in instance.running)


def usage_by_priority_of(instance: InstanceView, policy: PolicyConfig) -> Counter[Priority]:
    """Memory of the running requests of each execution priority as the policy sees it, in tokens.

    A block that requests share through the prefix cache counts once for each of them.
    """
    usage: Counter[Priority] = Counter()
    for request in instance.running:
        usage[policy.counts_as(request.execution_priority)] += request.physical_usage_tokens
    return usage


def _steps(free_tokens: float, batch_size: int, policy: PolicyConfig) -> float:
    # Departure from the paper: a negative numerator is not divided by the batch size, since then
    # an overloaded instance with more requests would look freer.
    is_divided = free_tokens > 0 or policy.divides_overload
    return free_tokens / batch_size if is_divided else free_tokens
