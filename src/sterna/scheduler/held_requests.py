"""Held requests: the line of those that wait at the global scheduler for an instance. Pure."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.types import InstanceId, RequestId

_Place = tuple[int, float, float, int, DispatchRequest]
"""What the line is sorted by. The fourth number is unique, so that requests are never compared."""


@dataclass(frozen=True, slots=True)
class AwaitedPrefix:
    """The instance whose memory a request waits for, since it has the request's prefix, and when it
    goes elsewhere."""

    instance_id: InstanceId
    until_s: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    place: _Place
    since_s: float

    @property
    def request(self) -> DispatchRequest:
        return self.place[-1]


class HeldRequests:
    """A line by scheduling priority, the highest first, then first come, first served (Section
    4.4.3); with late binding the smallest demand before the first, or the smallest part of it that
    no prefix cache has (`PolicyConfig.holds_by_uncached`).

    As all age at the same rate, their order does not change while they wait.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        self._policy = policy
        # In the order in which they began to wait.
        self._waiting: dict[RequestId, _Waiting] = {}
        self._line: list[_Place] = []
        self._demands_tokens: list[int] = []
        self._num_put = 0
        self._total_tokens = 0
        self._prefixes: dict[RequestId, AwaitedPrefix] = {}
        self._prefix_limits_s: list[float] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[DispatchRequest]:
        """All of them, from the one on that began to wait first."""
        return (each.request for each in self._waiting.values())

    @property
    def smallest_tokens(self) -> int | None:
        """The smallest demand; None without requests."""
        return self._demands_tokens[0] if self._demands_tokens else None

    @property
    def largest_tokens(self) -> int | None:
        """The largest demand; None without requests."""
        return self._demands_tokens[-1] if self._demands_tokens else None

    @property
    def total_tokens(self) -> int:
        """The demands of all of them."""
        return self._total_tokens

    @property
    def first_since_s(self) -> float | None:
        """When the one that has waited longest began to; None without requests."""
        return next((each.since_s for each in self._waiting.values()), None)

    @property
    def first_prefix_limit_s(self) -> float:
        """When the first of those that wait for their prefix's instance goes elsewhere; infinite
        without any."""
        return self._prefix_limits_s[0] if self._prefix_limits_s else math.inf

    def in_line(self) -> Iterator[DispatchRequest]:
        """All of them in the order in which they are offered an instance, as they are now."""
        return map(itemgetter(-1), self._line.copy())

    def since_s(self, request_id: RequestId) -> float:
        """When this request, which waits, began to."""
        return self._waiting[request_id].since_s

    def put(self, request: DispatchRequest, now_s: float, cached_tokens: int = 0) -> None:
        """Add the request; one that waits already keeps its time, and has these values from now
        on. As many tokens of its demand count as nothing."""
        known = self._waiting.get(request.request_id)
        if known is None:
            since_s, number = now_s, self._num_put
            self._num_put += 1
        else:
            since_s, number = known.since_s, known.place[3]
            self._leave(known)
        size_tokens = 0.0
        if self._policy.binds_late:
            size_tokens = request.demand_tokens - cached_tokens
            size_tokens += self._policy.ageing_tokens_per_s * since_s
        priority = self._policy.counts_as(request.scheduling_priority)
        place = (-priority, size_tokens, request.arrival_s, number, request)
        self._waiting[request.request_id] = _Waiting(place, since_s)
        insort(self._line, place)
        insort(self._demands_tokens, request.demand_tokens)
        self._total_tokens += request.demand_tokens

    def await_prefix(self, request_id: RequestId, awaited: AwaitedPrefix) -> None:
        """This request, which waits, waits for the instance that has its prefix."""
        self._end_wait_for_prefix(request_id)
        self._prefixes[request_id] = awaited
        insort(self._prefix_limits_s, awaited.until_s)

    def awaited_prefix(self, request_id: RequestId) -> InstanceId | None:
        """The instance that this request waits for; None if for any."""
        awaited = self._prefixes.get(request_id)
        return None if awaited is None else awaited.instance_id

    def end_waits_for_prefixes(self, now_s: float) -> None:
        """Those that have waited long enough for their prefix's instance go elsewhere."""
        if now_s >= self.first_prefix_limit_s:
            for request_id, awaited in list(self._prefixes.items()):
                if now_s >= awaited.until_s:
                    self._end_wait_for_prefix(request_id)

    def take(self, request_id: RequestId) -> float | None:
        """Remove the request; returns when it began to wait, or None if it does not."""
        known = self._waiting.pop(request_id, None)
        if known is None:
            return None
        self._leave(known)
        self._end_wait_for_prefix(request_id)
        return known.since_s

    def _end_wait_for_prefix(self, request_id: RequestId) -> None:
        awaited = self._prefixes.pop(request_id, None)
        if awaited is not None:
            del self._prefix_limits_s[bisect_left(self._prefix_limits_s, awaited.until_s)]

    def _leave(self, waiting: _Waiting) -> None:
        del self._line[bisect_left(self._line, waiting.place)]
        self._total_tokens -= waiting.request.demand_tokens
        del self._demands_tokens[bisect_left(self._demands_tokens, waiting.request.demand_tokens)]
