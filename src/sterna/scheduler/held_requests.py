"""Held requests: the line of those that wait at the global scheduler for an instance. Pure."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.scheduler.prefix_waits import PrefixWaits
from sterna.types import InstanceId, RequestId

_Place = tuple[int, bool, float, float, int, DispatchRequest]
"""What the line is sorted by. The number before the request is unique, so that requests are never
compared."""

NOTHING: Mapping[InstanceId, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Waiting:
    place: _Place
    since_s: float
    shared: Mapping[InstanceId, int]

    @property
    def request(self) -> DispatchRequest:
        return self.place[-1]

    @property
    def number(self) -> int:
        return self.place[-2]

    @property
    def own_tokens(self) -> dict[InstanceId, int]:
        """The memory that it needs on the instances with a part of it."""
        return {each: self.request.demand_tokens - num for each, num in self.shared.items()}


class HeldRequests:
    """A line by scheduling priority, the highest first, then first come, first served (Section
    4.4.3); with late binding the smallest demand before the first, or the smallest part of it that
    no prefix cache has (`PolicyConfig.holds_by_uncached`). Those whose clients have tokens already
    go before the others of their priority. Those that wait for their prefix are out of the line
    meanwhile.

    As all age at the same rate, their order does not change while they wait.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        self._policy = policy
        # In the order in which they came.
        self._waiting: dict[RequestId, _Waiting] = {}
        self._line: list[_Place] = []
        self._sinces_s: list[float] = []
        self._demands_tokens: list[int] = []
        self._own_tokens: dict[InstanceId, list[int]] = {}
        self._num_put = 0
        self._total_tokens = 0
        self._prefix_waits = PrefixWaits()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[DispatchRequest]:
        """All of them, in the order in which they came."""
        return (each.request for each in self._waiting.values())

    @property
    def first_tokens(self) -> int:
        """The demand of the first one in line; 0 without any."""
        return self._line[0][-1].demand_tokens if self._line else 0

    @property
    def smallest_tokens(self) -> int | None:
        """The smallest demand of those in line; None without any."""
        return self._demands_tokens[0] if self._demands_tokens else None

    @property
    def sharing_instances(self) -> Collection[InstanceId]:
        """The instances with which any of those in line shares memory."""
        return self._own_tokens.keys()

    def smallest_own_tokens(self, instance_id: InstanceId) -> int | None:
        """The least memory that one of those in line which share some needs on this instance; None
        without any."""
        own_tokens = self._own_tokens.get(instance_id)
        return own_tokens[0] if own_tokens else None

    @property
    def largest_tokens(self) -> int | None:
        """The largest demand of those in line; None without any."""
        return self._demands_tokens[-1] if self._demands_tokens else None

    @property
    def smallest_of_all_tokens(self) -> int | None:
        """The least memory, also for those that wait for their prefix; None without requests."""
        found = self.smallest_tokens, self._prefix_waits.smallest_tokens
        others = [each for each in found if each is not None]
        return min([*others, *(each[0] for each in self._own_tokens.values())], default=None)

    @property
    def total_tokens(self) -> int:
        """The demands of all in line."""
        return self._total_tokens

    @property
    def first_since_s(self) -> float | None:
        """When the one in line that has waited longest began to; None without any."""
        return self._sinces_s[0] if self._sinces_s else None

    @property
    def first_prefix_limit_s(self) -> float:
        """When the first of those that wait for their prefix is back in line; infinite without
        any."""
        return self._prefix_waits.first_limit_s

    @property
    def awaited_instances(self) -> Collection[InstanceId]:
        """The instances for which these wait."""
        return self._prefix_waits.instances

    def in_line(self) -> Iterator[DispatchRequest]:
        """Those in line in the order in which they are offered an instance, as they are now."""
        return map(itemgetter(-1), self._line.copy())

    def since_s(self, request_id: RequestId) -> float:
        """When this request, which waits, began to."""
        return self._waiting[request_id].since_s

    def demand_tokens(self, request_id: RequestId) -> int:
        """The demand of this request, which waits."""
        return self._waiting[request_id].request.demand_tokens

    def shared(self, request_id: RequestId) -> Mapping[InstanceId, int]:
        """The part of its demand that this request, which waits, shares with those that run on
        these instances."""
        return self._waiting[request_id].shared

    def awaits_prefix(self, request_id: RequestId) -> bool:
        """Whether this request, which waits, does so for its prefix."""
        return request_id in self._prefix_waits

    def put(
        self,
        request: DispatchRequest,
        now_s: float,
        cached: Mapping[InstanceId, int] = NOTHING,
        since_s: float | None = None,
        *,
        shared: Mapping[InstanceId, int] = NOTHING,
    ) -> None:
        """Put the request in line; one that waits already keeps its time, and has these values
        from now on.

        Args:
            cached: `NewRequest.cached` of it.
            since_s: when it began to wait; None: now, or before, at a scheduler that died.
            shared: `RunningPrompts.shared` of it.
        """
        known = self._waiting.get(request.request_id)
        if known is None:
            if since_s is None:
                since_s = now_s - request.waited_s
            number = self._num_put
            self._num_put += 1
        else:
            since_s, number = known.since_s, known.number
            self._leave(known)
        size_tokens = 0.0
        most_cached_tokens = max(cached.values(), default=0)
        if self._policy.binds_late:
            size_tokens = request.demand_tokens + self._policy.ageing_tokens_per_s * since_s
        if self._policy.holds_by_uncached:
            size_tokens -= most_cached_tokens
        priority = self._policy.counts_as(request.scheduling_priority)
        is_new = not request.has_begun
        place = (-priority, is_new, size_tokens, request.arrival_s, number, request)
        waiting = _Waiting(place, since_s, shared)
        self._waiting[request.request_id] = waiting
        self._enter(waiting)

    def await_prefix(
        self, request_id: RequestId, instances: Iterable[InstanceId], until_s: float
    ) -> None:
        """This request, which is in line, waits for memory on any of the instances that have its
        prefix, out of the line."""
        waiting = self._waiting[request_id]
        self._leave(waiting)
        demand_tokens, own_tokens = waiting.request.demand_tokens, waiting.own_tokens
        needs_tokens = {each: own_tokens.get(each, demand_tokens) for each in instances}
        self._prefix_waits.begin(request_id, needs_tokens, until_s)

    def end_overdue_waits(self, now_s: float) -> None:
        """Those that have waited long enough for their prefix are back in line."""
        self._end_waits(self._prefix_waits.overdue(now_s))

    def end_waits_for(self, instance_id: InstanceId, room_tokens: float) -> None:
        """Those that wait for this instance, as many as have room there, are back in line."""
        self._end_waits(self._prefix_waits.fitting(instance_id, room_tokens))

    def take(self, request_id: RequestId) -> float | None:
        """Remove the request; returns when it began to wait, or None if it does not."""
        known = self._waiting.pop(request_id, None)
        if known is None:
            return None
        self._leave(known)
        return known.since_s

    def _end_waits(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._prefix_waits.end(request_id)
            self._enter(self._waiting[request_id])

    def _enter(self, waiting: _Waiting) -> None:
        insort(self._line, waiting.place)
        insort(self._demands_tokens, waiting.request.demand_tokens)
        for instance_id, num_tokens in waiting.own_tokens.items():
            insort(self._own_tokens.setdefault(instance_id, []), num_tokens)
        insort(self._sinces_s, waiting.since_s)
        self._total_tokens += waiting.request.demand_tokens

    def _leave(self, waiting: _Waiting) -> None:
        """Leave the line, or end the wait for its prefix."""
        if self._prefix_waits.end(waiting.request.request_id):
            return
        del self._line[bisect_left(self._line, waiting.place)]
        self._total_tokens -= waiting.request.demand_tokens
        del self._demands_tokens[bisect_left(self._demands_tokens, waiting.request.demand_tokens)]
        for instance_id, num_tokens in waiting.own_tokens.items():
            own_tokens = self._own_tokens[instance_id]
            del own_tokens[bisect_left(own_tokens, num_tokens)]
            if not own_tokens:
                del self._own_tokens[instance_id]
        del self._sinces_s[bisect_left(self._sinces_s, waiting.since_s)]
