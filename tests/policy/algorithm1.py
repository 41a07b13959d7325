"""Algorithm 1 of the paper (Section 4.4.2) as printed, over the requests of one instance.

The reference that load reports and freeness, which work on sums, are compared with. What Sterna
adds to the paper is marked as such.
"""

import math

from sterna.config import PolicyConfig, QueueDemand
from sterna.types import InstanceView, Priority, RequestStatus, RequestView


def virtual_usage(request: RequestView, instance: InstanceView, policy: PolicyConfig) -> float:
    """Lines 1 to 8, CalcVirtualUsage, in tokens; line 6 is in `freeness`."""
    if request.status is RequestStatus.QUEUING:
        if request is instance.queuing[0]:
            return request.demand_tokens
        # Beyond the paper's own algorithm: INFaaS++ counts the whole queue (Section 6.1).
        return request.demand_tokens if policy.queue_demand is QueueDemand.ALL else 0
    # Beyond the paper, whose engine has no chunks: the whole prompt of one that is in chunks.
    physical_usage_tokens = max(request.physical_usage_tokens, request.demand_tokens)
    return physical_usage_tokens + headroom(request.execution_priority, instance, policy)


def headroom(priority: Priority, instance: InstanceView, policy: PolicyConfig) -> float:
    """Lines 9 and 10, GetHeadroom, in tokens; shared by the running requests of the priority."""
    if not policy.has_priorities or priority not in policy.target_load_tokens:
        return 0
    # Beyond the paper: a target above the memory leaves no headroom, and not a negative one.
    headroom_for_priority = max(0, instance.total_tokens - policy.target_load_tokens[priority])
    num_requests = sum(1 for each in instance.running if each.execution_priority == priority)
    return headroom_for_priority / num_requests


def freeness(instance: InstanceView, policy: PolicyConfig) -> float:
    """Lines 11 to 18, CalcFreeness, in decode steps."""
    if instance.is_terminating:
        # Lines 6, 12 and 13: the fake request's infinite usage.
        return -math.inf
    requests = (*instance.running, *instance.queuing)
    total_virtual_usage = math.fsum(virtual_usage(each, instance, policy) for each in requests)
    # Beyond the paper: memory of requests on their way, and blocks that requests share.
    total_virtual_usage += instance.reserved_tokens - instance.shared_tokens
    free = instance.total_tokens - total_virtual_usage
    # The batch is the running requests and the head of the line, and never empty.
    batch_size = max(1, len(instance.running) + (1 if instance.queuing else 0))
    # Departure from the paper: what is negative is not divided.
    return free / batch_size if free > 0 or policy.divides_overload else free
