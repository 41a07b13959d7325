"""Waits of held requests for the instances that have their prefixes, by request and by instance.
Pure."""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sterna.types import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class _Wait:
    needs_tokens: Mapping[InstanceId, int]
    until_s: float

    @property
    def least_tokens(self) -> int:
        return min(self.needs_tokens.values())


class PrefixWaits:
    """What each of these requests waits for, and until when.

    What happens on one instance costs no look at those that wait for others.
    """

    def __init__(self) -> None:
        self._waits: dict[RequestId, _Wait] = {}
        self._of_instance: dict[InstanceId, dict[RequestId, _Wait]] = {}
        self._limits: list[tuple[float, RequestId]] = []
        self._least_tokens: list[int] = []

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waits

    @property
    def instances(self) -> Collection[InstanceId]:
        """Those for which any waits."""
        return self._of_instance.keys()

    @property
    def first_limit_s(self) -> float:
        """When the first of them has waited long enough; infinite without any."""
        return self._limits[0][0] if self._limits else math.inf

    @property
    def smallest_tokens(self) -> int | None:
        """The least memory that one of them may need; None without requests."""
        return self._least_tokens[0] if self._least_tokens else None

    def begin(
        self,
        request_id: RequestId,
        needs_tokens: Mapping[InstanceId, int],
        until_s: float,
    ) -> None:
        """The request, which waits for nothing yet, waits for as much memory on any of these."""
        wait = self._waits[request_id] = _Wait(needs_tokens, until_s)
        for instance_id in needs_tokens:
            self._of_instance.setdefault(instance_id, {})[request_id] = wait
        insort(self._limits, (until_s, request_id))
        insort(self._least_tokens, wait.least_tokens)

    def end(self, request_id: RequestId) -> bool:
        """The request no longer waits; returns whether it did."""
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return False
        for instance_id in wait.needs_tokens:
            of_instance = self._of_instance[instance_id]
            del of_instance[request_id]
            if not of_instance:
                del self._of_instance[instance_id]
        del self._limits[bisect_left(self._limits, (wait.until_s, request_id))]
        del self._least_tokens[bisect_left(self._least_tokens, wait.least_tokens)]
        return True

    def overdue(self, now_s: float) -> list[RequestId]:
        """Those that have waited long enough."""
        ended = []
        for until_s, request_id in self._limits:
            if until_s > now_s:
                break
            ended.append(request_id)
        return ended

    def fitting(self, instance_id: InstanceId, room_tokens: float) -> list[RequestId]:
        """Of those that wait for this instance, the first ones that have room there together."""
        found = []
        for request_id, wait in self._of_instance.get(instance_id, {}).items():
            needs_tokens = wait.needs_tokens[instance_id]
            if needs_tokens <= room_tokens:
                room_tokens -= needs_tokens
                found.append(request_id)
        return found
