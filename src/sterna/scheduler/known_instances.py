"""Instances as the global scheduler knows them: loads, and requests on their way there. Pure.

A load report shows what has arrived at its instance. Until then a request counts by what is known
of it when it is sent (`Candidate.in_flight`), so that a burst between two reports does not go to
one instance alone.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.policy.candidate_table import CandidateTable
from sterna.policy.headroom import shared
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import FrontendId, InstanceId, InstanceLoad, RequestId

EXPIRY_RECHECK_S = 1.0
"""Time between two looks at what is on its way to an engine that ends no step."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    dispatch_number: float
    request_id: RequestId
    frontend_id: FrontendId
    request: NewRequest
    sent_s: float


@dataclass(slots=True)
class _Instance:
    load: InstanceLoad | None = None
    # Times of the last report, and of the last one that showed what a step has done.
    reported_s: float = -math.inf
    stepped_s: float = -math.inf
    in_flight: list[_InFlight] = field(default_factory=list)
    num_dispatched: int = 0
    num_dispatched_tokens: int = 0
    is_terminating: bool = False
    # Its view for decisions, and the row of the table; None after a change.
    known: Candidate | None = None
    row: int = -1

    def candidate(self, policy: PolicyConfig) -> Candidate:
        """Its view for decisions; it has reported."""
        load = self.load
        assert load is not None
        in_flight = tuple([each.request for each in self.in_flight]) if self.in_flight else ()
        if self.is_terminating and not load.is_terminating:
            load = structs.replace(load, is_terminating=True)
        self.known = Candidate(
            load, in_flight, self.num_dispatched, self.num_dispatched_tokens, policy
        )
        return self.known


def _is_lost(each: _InFlight, instance: _Instance, lease_s: float, now_s: float) -> bool:
    """Whether the request will not arrive. It may have arrived at an engine that ends no step,
    whose reports go on without a change: such an instance would look free."""
    if now_s < each.sent_s + lease_s:
        return False
    load = instance.load
    has_work = load is not None and (load.num_running > 0 or load.num_queuing > 0)
    goes_on = instance.reported_s > each.sent_s
    stands = now_s >= instance.stepped_s + lease_s / 2
    return not (has_work and goes_on and stands)


def _steps(load: InstanceLoad) -> tuple[int, ...]:
    """What a step of the engine changes; of all else only a reservation changes one of them."""
    return (
        *(load.num_running, load.num_queuing, load.used_tokens, load.num_preemptions),
        *(load.prefill_demand_tokens, load.uncomputed_tokens),
    )


class KnownInstances(Container[InstanceId]):
    """The instances that take part, or are starting, as decisions see them.

    Args:
        in_flight_lease_s: a dispatch that no report shows after this time is taken for lost, unless
            the instance is in one step all the time.
    """

    def __init__(self, policy: PolicyConfig, in_flight_lease_s: float) -> None:
        self._policy = policy
        self._in_flight_lease_s = in_flight_lease_s
        self._instances: dict[InstanceId, _Instance] = {}
        # Those that have reported, by id; None after one has come or gone. The last of them have
        # changed since.
        self._table: CandidateTable | None = None
        self._changed: list[_Instance] = []
        self._shared: CandidateTable | None = None
        # A report can arrive after its instance's death is known; ids are never used again.
        self._gone: set[InstanceId] = set()
        # No dispatch in flight is taken for lost before this time.
        self._first_expiry_s = math.inf

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._instances

    @property
    def candidates(self) -> CandidateTable:
        """Those that have reported, in order of their ids."""
        if self._table is not None and not self._changed and self._shared is not None:
            return self._shared
        if self._table is None:
            every = [each for _, each in sorted(self._instances.items()) if each.load is not None]
            for row, instance in enumerate(every):
                instance.row = row
            self._table = CandidateTable(each.candidate(self._policy) for each in every)
        else:
            policy = self._policy
            self._table.put({each.row: each.candidate(policy) for each in self._changed})
        self._changed.clear()
        self._shared = shared(self._table) if self._policy.shares_headroom else self._table
        return self._shared

    @property
    def starting(self) -> list[InstanceId]:
        """Those that have not reported yet."""
        return [each for each, known in self._instances.items() if known.load is None]

    # ---------------------------------------------------------------------------- instances

    def join(self, instance_id: InstanceId) -> None:
        """An instance is starting; it takes part from its first load report on."""
        if instance_id not in self._gone and instance_id not in self._instances:
            self._instances[instance_id] = _Instance()

    def withdraw(self, instance_id: InstanceId) -> None:
        """An instance that was starting is up and warm: it takes no part until it joins again."""
        instance = self._instances.get(instance_id)
        if instance is not None and instance.load is None:
            del self._instances[instance_id]

    def leave(self, instance_id: InstanceId) -> None:
        """An instance is gone for good, and with it what was on its way there."""
        self._gone.add(instance_id)
        self._instances.pop(instance_id, None)
        self._table = None

    def take_in(self, load: InstanceLoad, now_s: float) -> bool:
        """An instance reports; returns whether this is news: an overtaken report and one of an
        instance that left are not."""
        self.join(load.instance_id)
        instance = self._instances.get(load.instance_id)
        if instance is None:
            return False
        if instance.load is None:
            instance.num_dispatched, instance.num_dispatched_tokens = self._fewest_dispatched()
            self._table = None
        elif load.sequence <= instance.load.sequence:
            return False
        if instance.load is None or _steps(load) != _steps(instance.load):
            instance.stepped_s = now_s
        instance.reported_s = now_s
        instance.load = load
        self._touch(instance)
        if instance.in_flight:
            self._drop(instance, lambda each: each.dispatch_number <= load.last_dispatch)
        return True

    def set_terminating(self, instance_id: InstanceId, is_terminating: bool) -> None:
        """Set whether an instance is being emptied, which its reports may show later."""
        instance = self._instances.get(instance_id)
        if instance is None or instance.is_terminating == is_terminating:
            return
        if not is_terminating:
            # Others have got requests meanwhile; it must not get all until it has as many.
            num, num_tokens = self._fewest_dispatched()
            instance.num_dispatched = max(instance.num_dispatched, num)
            instance.num_dispatched_tokens = max(instance.num_dispatched_tokens, num_tokens)
        instance.is_terminating = is_terminating
        self._touch(instance)

    # ----------------------------------------------------------------- requests on their way

    def expect(self, request: DispatchRequest, new: NewRequest, instance_id: InstanceId) -> None:
        """A request will be sent to the instance when its prefix is there, and counts until it is
        dropped."""
        if self._policy.counts_dispatched:
            instance = self._instances[instance_id]
            instance.in_flight.append(
                _InFlight(math.inf, request.request_id, request.frontend_id, new, math.inf)
            )
            self._touch(instance)

    def send(
        self,
        request: DispatchRequest,
        new: NewRequest,
        instance_id: InstanceId,
        dispatch_number: int,
        now_s: float,
    ) -> None:
        """A request is sent to the instance, and counts until a report shows it."""
        instance = self._instances[instance_id]
        instance.num_dispatched += 1
        instance.num_dispatched_tokens += new.uncached_tokens(instance_id)
        self._touch(instance)
        if self._policy.counts_dispatched:
            self._first_expiry_s = min(self._first_expiry_s, now_s + self._in_flight_lease_s)
            instance.in_flight.append(
                _InFlight(dispatch_number, request.request_id, request.frontend_id, new, now_s)
            )

    def drop(self, request_id: RequestId) -> None:
        """A request will not arrive, or waits no longer for its prefix."""
        for instance in self._instances.values():
            if instance.in_flight:
                self._drop(instance, lambda each: each.request_id == request_id)

    def drop_all_of(self, frontend_id: FrontendId) -> None:
        """A front end died, and its requests with it."""
        for instance in self._instances.values():
            self._drop(instance, lambda each: each.frontend_id == frontend_id)

    def drop_expired(self, now_s: float) -> None:
        """Time has passed: dispatches that no report shows are lost."""
        if now_s < self._first_expiry_s:
            return
        self._first_expiry_s = math.inf
        lease_s = self._in_flight_lease_s
        for instance in self._instances.values():
            if not instance.in_flight:
                continue
            self._drop(instance, partial(_is_lost, instance=instance, lease_s=lease_s, now_s=now_s))
            for each in instance.in_flight:
                expires_s = each.sent_s + lease_s
                due_s = expires_s if expires_s > now_s else now_s + EXPIRY_RECHECK_S
                self._first_expiry_s = min(self._first_expiry_s, due_s)

    # ---------------------------------------------------------------------------- internals

    def _touch(self, instance: _Instance) -> None:
        """What is known of the instance has changed."""
        if instance.known is not None:
            instance.known = None
            self._changed.append(instance)

    def _fewest_dispatched(self) -> tuple[int, int]:
        # An instance that begins at zero would get every request until it has caught up.
        every = [each for each in self._instances.values() if each.load is not None]
        present = [each for each in every if not each.is_terminating] or every
        return (
            min([each.num_dispatched for each in present], default=0),
            min([each.num_dispatched_tokens for each in present], default=0),
        )

    def _drop(self, instance: _Instance, is_over: Callable[[_InFlight], bool]) -> None:
        left = [each for each in instance.in_flight if not is_over(each)]
        if len(left) < len(instance.in_flight):
            instance.in_flight = left
            self._touch(instance)
