"""The global scheduler (Section 4.3): loads in; dispatch, pairing and scaling decisions out. Pure.

It sees instances, and of their running requests a few with large prompts alone, so that its work
does not grow with these.
Each `on_...` method is one event and returns its effects, in order; `on_tick` is to be called at
`next_deadline_s`.

It keeps no state that a successor would need. The loads come again with the next reports, and front
ends send the held requests again; `running_prompts` says what is not known for a while. Each
instance gets its destination when it is first part of a round, even if it has none, since a
predecessor may have set one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec
from msgspec import structs

from sterna.config import PolicyConfig, ScalingConfig
from sterna.messages.actors import DispatchRequest
from sterna.messages.reasons import DispatchReason, HeldCause, MoveReason
from sterna.policy.candidate_table import TOTAL_TOKENS, CandidateTable, Choice
from sterna.policy.dispatch import decide
from sterna.policy.load_report import LARGE_SHARE
from sterna.policy.own import Round
from sterna.policy.pairing import pair
from sterna.policy.prefix_dispatch import prefix_to_wait_for
from sterna.policy.scaling import ScaleUp, ScalingState, Terminate, checked_number, towards
from sterna.policy.scaling import decide as decide_scaling
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.scheduler.explanation import dispatch_reason, move_reason
from sterna.scheduler.held_requests import HeldRequests
from sterna.scheduler.known_instances import KnownInstances
from sterna.scheduler.prefix_copies import CopyPrefix, PrefixCopies, PrefixKnowledge
from sterna.scheduler.room import Room
from sterna.scheduler.running_prompts import RunningPrompts
from sterna.types import NORMAL, FrontendId, InstanceId, InstanceLoad, RequestId

SHARING_RECHECK_S = 0.25
"""Least time between two looks for what large prompts that wait may share with running ones."""

COMPARISON_PAUSE_S = 1e-4
"""Time to the next look for each pair of prompts that a look compares, which takes some
microseconds: looks take a few percent of the scheduler's time, however many requests wait."""


class Dispatch(msgspec.Struct, frozen=True):
    """Tell the front end to send the request to the instance.

    Attributes:
        dispatch_number: grows with every dispatch; the instance reports the highest number of
            those that its engine has taken in.
        reason: None if the scheduler does not explain.
    """

    request_id: RequestId
    frontend_id: FrontendId
    instance_id: InstanceId
    dispatch_number: int
    reason: DispatchReason | None = None


class SetDestination(msgspec.Struct, frozen=True):
    """Tell the source where to migrate requests to; with None it starts no more migrations."""

    source: InstanceId
    destination: InstanceId | None
    reason: MoveReason | None = None


Effect = Dispatch | SetDestination | CopyPrefix | ScaleUp | Terminate


IN_FLIGHT_LEASE_S = 30.0
"""Time after which a dispatch that no report shows is taken for lost."""

REPORTS_PER_S = 2_560
"""Load reports a second that a large cluster sends (`llumlet.FULL_RATE_INSTANCES`, each at the
default interval). The time between two rounds is at least that in which each instance sends one."""


class GlobalScheduler:
    """Places requests and pairs instances by the loads that these report.

    Args:
        policy: the rules of all decisions.
        now_s: the time; the first round is one interval later.
        scaling: None leaves the number of instances alone.
        scaling_begins_s: no instance is added or terminated before this time.
        first_dispatch_number: number of the first dispatch, above those of any predecessor.
        prefixes: asked for each request if the policy looks at prefix caches.
        in_flight_lease_s: a dispatch that no report shows after this time is taken for lost, and
            its demand no longer counts. An engine may compute a step of several seconds before it
            takes a request in.
        explains: whether effects have reasons; a simulation does not need them.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        *,
        now_s: float,
        scaling: ScalingConfig | None = None,
        scaling_begins_s: float = 0.0,
        first_dispatch_number: int = 1,
        prefixes: PrefixKnowledge | None = None,
        in_flight_lease_s: float = IN_FLIGHT_LEASE_S,
        explains: bool = False,
    ) -> None:
        self._policy = policy = policy.with_fresh_state()
        self._scaling = scaling
        self._scaling_begins_s = scaling_begins_s
        self._scaling_state = ScalingState()
        self._next_number = first_dispatch_number
        self._explains = explains
        self._next_round_s = now_s + policy.round_interval_s
        # When it is looked again for what large prompts share; infinite while none waits.
        self._next_look_s = math.inf
        self._instances = KnownInstances(policy, in_flight_lease_s)
        self._held = HeldRequests(policy)
        self._running_prompts = RunningPrompts()
        self._copies = PrefixCopies(policy, prefixes)
        # Those by which waits for prefixes were last looked at.
        self._last_growth_steps = 0.0
        self._last_destinations: dict[InstanceId, InstanceId | None] = {}
        self._pending: frozenset[InstanceId] = frozenset()
        self._kv_formats: Mapping[InstanceId, str] = {}

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_tick` is due: the next round, if the policy has rounds, or the end of a wait."""
        deadline_s = self._next_round_s if self._has_rounds else math.inf
        deadline_s = min(
            deadline_s, self._first_limit_s, self._copies.first_limit_s, self._next_look_s
        )
        return None if deadline_s == math.inf else deadline_s

    @property
    def _first_limit_s(self) -> float:
        """When a held request may no longer wait for memory, or for that of one instance."""
        limit_s, first_s = self._held.first_prefix_limit_s, self._held.first_since_s
        hold_limit_s = self._policy.hold_limit_s
        if self._waits_for_memory and first_s is not None and hold_limit_s is not None:
            limit_s = min(limit_s, first_s + hold_limit_s)
        return limit_s

    @property
    def _has_rounds(self) -> bool:
        policy = self._policy
        return policy.migrates or self._scaling is not None or policy.num_session_copies > 0

    @property
    def candidates(self) -> CandidateTable:
        """The instances that have reported, as decisions see them, in order of their ids."""
        return self._instances.candidates

    @property
    def destinations(self) -> Mapping[InstanceId, InstanceId]:
        """The destination of each instance that is set as a source."""
        return MappingProxyType(
            {source: each for source, each in self._last_destinations.items() if each is not None}
        )

    @property
    def num_held(self) -> int:
        """Requests that wait here for an instance."""
        return len(self._held)

    @property
    def head_demand_tokens(self) -> int:
        """The demand of the first request in line here; 0 without one."""
        return self._held.first_tokens

    @property
    def undispatched(self) -> list[DispatchRequest]:
        """Requests that wait here for an instance, or for their prefix."""
        return [*self._held, *self._copies]

    def waits(self, request_id: RequestId) -> bool:
        """Whether the request waits until an instance has memory for it (late binding), or its
        prefix."""
        if request_id in self._copies:
            return True
        return request_id in self._held and self._waits_for_memory

    @property
    def has_waiting(self) -> bool:
        """Whether there are any such requests."""
        return len(self._copies) > 0 or self._waits_for_memory

    @property
    def _waits_for_memory(self) -> bool:
        """Whether those that are held wait for memory, and not for an instance."""
        return self._policy.binds_late and len(self._held) > 0 and len(self.candidates) > 0

    def waiting(self) -> dict[RequestId, FrontendId]:
        """All requests of which that holds, with their front ends."""
        waiting = [*self._copies, *(self._held if self._waits_for_memory else ())]
        return {each.request_id: each.frontend_id for each in waiting}

    @property
    def most_room_tokens(self) -> float:
        """The most memory that an instance has for a request that waits here."""
        return self._room().most_tokens

    def held_cause(self, request_id: RequestId) -> HeldCause:
        """What this request, which waits here, waits for."""
        if request_id in self._copies:
            return HeldCause.COPY
        if self._held.awaits_prefix(request_id):
            return HeldCause.PREFIX
        demand_tokens = self._held.demand_tokens(request_id)
        fits = demand_tokens <= self.most_room_tokens
        return HeldCause.KEPT_FREE if fits else HeldCause.MEMORY

    @property
    def smallest_held_tokens(self) -> int | None:
        """The memory with which an instance could admit a held request; None without any."""
        return self._held.smallest_of_all_tokens

    @property
    def growth_steps(self) -> float:
        """For how many steps such an instance needs memory for its own requests beside it:
        `PolicyConfig.growth_steps` while the line is long (`PolicyConfig.crowded_share`), else 0.
        """
        growth_steps, crowded_share = self._policy.growth_steps, self._policy.crowded_share
        if growth_steps and crowded_share:
            total_tokens = float(self.candidates.column(TOTAL_TOKENS).sum())
            if self._held.total_tokens <= crowded_share * total_tokens:
                return 0.0
        return growth_steps

    def on_request(self, request: DispatchRequest, now_s: float) -> list[Effect]:
        """A front end asks for an instance; without one, the request is held.

        A repeated call for a held request only replaces its values; for one that waits for its
        prefix it changes nothing.
        """
        if request.request_id in self._copies:
            return []
        new = self._copies.as_new(request)
        self._hold(request, new, now_s)
        return self._dispatch_held(now_s, asked={request.request_id: new})

    def _hold(
        self, request: DispatchRequest, new: NewRequest, now_s: float, since_s: float | None = None
    ) -> None:
        shared: Mapping[InstanceId, int] = {}
        if self._may_share(request):
            shared = self._running_prompts.shared(request, new.cached, self.candidates)
            self._next_look_s = min(self._next_look_s, now_s + SHARING_RECHECK_S)
        self._held.put(request, now_s, new.cached, since_s, shared=shared)

    def _may_share(self, request: DispatchRequest) -> bool:
        """Whether it is looked for what the request shares with running ones: its prompt is large,
        and may be cached."""
        if not self._policy.binds_late or not request.block_hashes:
            return False
        total_tokens = float(self.candidates.column(TOTAL_TOKENS).max(initial=0))
        return request.demand_tokens > LARGE_SHARE * total_tokens

    def _look_again(self, now_s: float) -> None:
        """Look again for what large prompts may share that wait, also for their prefix."""
        if now_s < self._next_look_s:
            return
        num_looks, num_compared = 0, self._running_prompts.num_compared
        for request in tuple(self._held):
            if self._may_share(request):
                new = self._copies.as_new(request)
                shared = self._running_prompts.shared(request, new.cached, self.candidates)
                # Others keep their places, and wait on for their prefixes.
                if shared != self._held.shared(request.request_id):
                    self._hold(request, new, now_s)
                num_looks += 1
        num_compared = self._running_prompts.num_compared - num_compared
        pause_s = max(SHARING_RECHECK_S, COMPARISON_PAUSE_S * num_compared)
        self._next_look_s = now_s + pause_s if num_looks else math.inf

    def on_cancel(self, request_id: RequestId, now_s: float) -> list[Effect]:
        """A front end no longer needs an instance for the request, never sent it there, or has
        aborted it."""
        self._held.take(request_id)
        self._copies.on_cancel(request_id)
        self._instances.drop(request_id)
        return []

    def on_prefix_done(
        self, request_id: RequestId, now_s: float, *, is_copied: bool = False
    ) -> list[Effect]:
        """The request's prefix has been copied, or will not be: it is sent to its instance."""
        awaited = self._copies.take(request_id)
        if awaited is None:
            return []
        self._instances.drop(request_id)
        reason = awaited.reason
        if reason is not None:
            reason = structs.replace(
                reason,
                held_s=reason.held_s + now_s - awaited.since_s,
                prefix_from=awaited.source if is_copied else None,
            )
        return [self._send(awaited.request, awaited.new, awaited.instance_id, reason, now_s)]

    def on_load(self, load: InstanceLoad, now_s: float) -> list[Effect]:
        """An instance reports; an overtaken report and one of an instance that left are ignored."""
        return self.on_loads([load], now_s)

    def on_loads(self, loads: Iterable[InstanceLoad], now_s: float) -> list[Effect]:
        """Instances report together: see `on_load`."""
        reported = []
        for load in loads:
            reported.append(load.instance_id)
            if self._instances.take_in(load, now_s) and load.last_dispatch >= self._next_number:
                # A predecessor's dispatch may still arrive; those of this scheduler must be later.
                self._next_number = load.last_dispatch + 1
        return self._dispatch_held(now_s, reported) if self._held else []

    def on_instance_joined(self, instance_id: InstanceId, now_s: float) -> list[Effect]:
        """An instance is starting; it takes part from its first load report on."""
        self._instances.join(instance_id)
        return []

    def withdraw_instance(self, instance_id: InstanceId) -> None:
        """Leave out an instance that was starting and is warm, until it joins again."""
        self._instances.withdraw(instance_id)

    def set_kv_formats(self, kv_formats: Mapping[InstanceId, str]) -> None:
        """These are the formats of the instances' KV blocks (`pair`)."""
        self._kv_formats = kv_formats

    def set_pending(self, instance_ids: Iterable[InstanceId]) -> None:
        """Set the starting instances that wait for a place."""
        self._pending = frozenset(instance_ids)

    def set_terminating(self, instance_id: InstanceId, is_terminating: bool) -> None:
        """Set whether an instance is being emptied, which its reports may show later."""
        self._instances.set_terminating(instance_id, is_terminating)

    def on_instance_left(self, instance_id: InstanceId, now_s: float) -> list[Effect]:
        """An instance is gone for good; its sources lose their destination at once.

        Requests in flight to it are forgotten: their front ends know what becomes of them.
        """
        self._instances.leave(instance_id)
        self._last_destinations.pop(instance_id, None)
        effects: list[Effect] = []
        for source, destination in self.destinations.items():
            if destination == instance_id:
                self._last_destinations[source] = None
                effects.append(SetDestination(source, None))
        return [*effects, *self._end_copies(instance_id, now_s)]

    def _end_copies(self, gone: InstanceId, now_s: float) -> list[Effect]:
        """Copies to this instance and from it end: requests that were to be sent there look for
        another one, the others do not wait any longer."""
        effects: list[Effect] = []
        for awaited in self._copies.on_instance_left(gone):
            request_id = awaited.request.request_id
            if awaited.instance_id == gone:
                self._copies.take(request_id)
                self._hold(awaited.request, awaited.new, now_s, awaited.held_since_s)
            else:
                effects += self.on_prefix_done(request_id, now_s)
        return [*effects, *(self._dispatch_held(now_s, [gone]) if self._held else [])]

    def on_frontend_left(self, frontend_id: FrontendId, now_s: float) -> list[Effect]:
        """A front end died, and its requests with it, held and in flight."""
        for request in list(self._held):
            if request.frontend_id == frontend_id:
                self._held.take(request.request_id)
        self._copies.on_frontend_left(frontend_id)
        self._instances.drop_all_of(frontend_id)
        return []

    def on_tick(self, now_s: float) -> list[Effect]:
        """Run a round if it is due: pair instances, then scale their number. Requests that have
        waited long enough are dispatched."""
        self._look_again(now_s)
        effects = self._dispatch_held(now_s) if self._held else []
        for request_id in self._copies.overdue(now_s):
            effects += self.on_prefix_done(request_id, now_s)
        deadline_s = self._next_round_s
        if not self._has_rounds or now_s < deadline_s:
            return effects
        interval_s = self._round_interval_s()
        self._next_round_s = deadline_s + interval_s
        if self._next_round_s <= now_s:
            # Missed rounds are skipped: each would decide by the same loads.
            self._next_round_s = now_s + interval_s
        self._instances.drop_expired(now_s)
        kept_free = self._kept_free(now_s) if self._policy.migrates else None
        if self._policy.own is not None:
            self._policy.own.begin_round(self._known(kept_free, now_s))
        if self._policy.migrates:
            effects += self._pair(kept_free)
        effects += self._copies.copy_ahead(self.candidates, now_s)
        return effects + self._scale(now_s)

    def _known(self, kept_free: InstanceId | None, now_s: float) -> Round:
        """What a policy class is told at the beginning of a round."""
        since_s = self._held.first_since_s
        return Round(
            kept_free,
            self._kv_formats,
            num_held=len(self._held),
            held_tokens=self._held.total_tokens,
            held_s=0.0 if since_s is None else now_s - since_s,
        )

    def _round_interval_s(self) -> float:
        return max(self._policy.round_interval_s, len(self.candidates) / REPORTS_PER_S)

    def _dispatch_held(
        self,
        now_s: float,
        reported: Sequence[InstanceId] = (),
        asked: Mapping[RequestId, NewRequest] = MappingProxyType({}),
    ) -> list[Effect]:
        """Dispatch the held requests that can be, in their order.

        With late binding those for which no instance has memory are passed over; but see
        `PolicyConfig.reserves_after_s`.

        Args:
            reported: instances whose state may have changed.
            asked: what is known of the request that has just come.
        """
        self._instances.drop_expired(now_s)
        self._end_waits(reported, now_s)
        effects: list[Effect] = []
        room = self._room() if self._policy.binds_late else None
        if room is not None and not self._may_fit(room, now_s, reported or None):
            return effects
        kept_free: InstanceId | None = None
        for request in self._held.in_line():
            candidates = self.candidates
            if room is not None and self._may_wait(request, room, now_s):
                found = self._with_room(request, room)
                if found:
                    candidates = found
                else:
                    if kept_free is None and self._keeps_room(request, now_s):
                        kept_free = room.roomiest_for(request.demand_tokens, self._shared(request))
                        room = self._room(kept_free)
                        if not self._may_fit(room, now_s):
                            break
                    continue
            new = asked.get(request.request_id) or self._copies.as_new(request)
            choice = decide(new, candidates, self._policy)
            if choice is None:
                break
            if candidates is not self.candidates and self._awaits_prefix(
                request, new, choice, now_s
            ):
                continue
            effects.append(self._bind(request, new, choice, now_s))
            if room is not None:
                if not self._held:
                    break
                room = self._room(kept_free)
                if not self._may_fit(room, now_s):
                    break
        return effects

    def _kept_free(self, now_s: float) -> InstanceId | None:
        """The instance whose memory is kept free for a held request; None without such a one."""
        after_s, first_since_s = self._policy.reserves_after_s, self._held.first_since_s
        if after_s is None or first_since_s is None or not self._waits_for_memory:
            return None
        line = list(self._held.in_line())
        if not self._goes_first(line[0]) and now_s < first_since_s + after_s:
            return None
        room = self._room()
        for request in line:
            if (
                self._may_wait(request, room, now_s)
                and self._keeps_room(request, now_s)
                and not self._with_room(request, room)
            ):
                return room.roomiest_for(request.demand_tokens, self._shared(request))
        return None

    def _bind(
        self, request: DispatchRequest, new: NewRequest, choice: Choice, now_s: float
    ) -> Dispatch | CopyPrefix:
        """Send a held request to the chosen instance, or have its prefix copied there first."""
        instance_id = choice.instance_id
        shared_tokens = self._shared(request).get(instance_id, 0)
        since_s = self._held.take(request.request_id)
        assert since_s is not None
        reason = None
        if self._explains:
            reason = dispatch_reason(
                new,
                choice,
                self._policy,
                num_instances=len(self.candidates),
                held_s=now_s - since_s,
            )
        new = replace(new, demand_tokens=new.demand_tokens - shared_tokens)
        self._copies.on_dispatched(request, instance_id, now_s)
        copy = self._copies.copy_first(request, new, choice.chosen, reason, since_s, now_s)
        if copy is None:
            return self._send(request, new, instance_id, reason, now_s)
        # It counts on its own instance meanwhile.
        self._instances.expect(request, new, instance_id)
        return copy

    def _room(self, kept_free: InstanceId | None = None) -> Room:
        return Room.of(self.candidates, self.growth_steps, kept_free)

    def _may_wait(self, request: DispatchRequest, room: Room, now_s: float) -> bool:
        """Whether a held request may wait for memory: an instance could hold it, and it has not
        waited too long."""
        if request.demand_tokens > room.total_tokens:
            return False
        limit_s = self._policy.hold_limit_s
        return limit_s is None or now_s < self._held.since_s(request.request_id) + limit_s

    def _awaits_prefix(
        self, request: DispatchRequest, new: NewRequest, choice: Choice, now_s: float
    ) -> bool:
        """Have a held request wait on, although the chosen instance has memory for it, if others
        have more of its prompt and none; see `PolicyConfig.awaits_prefix`."""
        policy = self._policy
        rate = policy.ageing_tokens_per_s
        if not policy.awaits_prefix or not rate or policy.own is not None:
            return False
        if self._goes_first(request):
            return False
        elsewhere = prefix_to_wait_for(new, choice.chosen, policy.dispatch)
        if elsewhere is None or choice.by_headroom:
            return False
        since_s = self._held.since_s(request.request_id)
        until_s = since_s + elsewhere.saved_tokens / rate
        if policy.hold_limit_s is not None:
            until_s = min(until_s, since_s + policy.hold_limit_s)
        full = []
        for candidate in map(self.candidates.find, elsewhere.instances):
            if candidate is not None and self._could_hold(candidate, request):
                if self._has_room(candidate, request):
                    return False
                full.append(candidate.instance_id)
        if not full or now_s >= until_s:
            return False
        self._held.await_prefix(request.request_id, full, until_s)
        return True

    def _could_hold(self, candidate: Candidate, request: DispatchRequest) -> bool:
        load = candidate.load
        return not load.is_terminating and request.demand_tokens <= load.total_tokens

    def _has_room(self, candidate: Candidate, request: DispatchRequest) -> bool:
        shared_tokens = self._shared(request).get(candidate.instance_id, 0)
        return request.demand_tokens - shared_tokens <= self._room_of(candidate)

    def _with_room(self, request: DispatchRequest, room: Room) -> CandidateTable | None:
        """The instances that have room for a held request; None, or an empty table, without any."""
        demand_tokens, shared = request.demand_tokens, self._held.shared(request.request_id)
        # These comparisons alone tell most of many requests.
        if demand_tokens > room.most_tokens and not any(
            self._has_tokens(each, demand_tokens - num) for each, num in shared.items()
        ):
            return None
        return room.candidates_for(demand_tokens, self._shared(request))

    def _has_tokens(self, instance_id: InstanceId, num_tokens: int | None) -> bool:
        """Whether the instance has room for a request that needs as much there."""
        candidate = self.candidates.find(instance_id)
        if candidate is None or num_tokens is None:
            return False
        return num_tokens <= self._room_of(candidate)

    def _shared(self, request: DispatchRequest) -> Mapping[InstanceId, int]:
        """The part of its demand for which a held request needs no memory on each instance, as
        these are known now."""
        shared = self._held.shared(request.request_id)
        return self._running_prompts.shared(request, shared, self.candidates) if shared else {}

    def _room_of(self, candidate: Candidate) -> float:
        return candidate.room_tokens - self.growth_steps * candidate.num_requests

    def _end_waits(self, reported: Iterable[InstanceId], now_s: float) -> None:
        """Those that wait for one of these instances are back in line if it has memory for them, or
        is to get no requests; and so are those that have waited long enough."""
        self._held.end_overdue_waits(now_s)
        if not self._policy.awaits_prefix:
            return
        growth_steps = self.growth_steps
        if growth_steps != self._last_growth_steps:
            # All have other room now, also those that did not report.
            self._last_growth_steps = growth_steps
            reported = tuple(self._held.awaited_instances)
        for instance_id in reported:
            if instance_id in self._held.awaited_instances:
                candidate, room_tokens = self.candidates.find(instance_id), math.inf
                if candidate is not None and not candidate.load.is_terminating:
                    room_tokens = self._room_of(candidate)
                self._held.end_waits_for(instance_id, room_tokens)

    def _may_fit(self, room: Room, now_s: float, among: Iterable[InstanceId] | None = None) -> bool:
        """Whether any of the held requests may be dispatched: with many of them, most load reports
        change nothing for any.

        Args:
            among: what requests share is looked at on these instances alone.
        """
        smallest_tokens, largest_tokens = self._held.smallest_tokens, self._held.largest_tokens
        if smallest_tokens is None or largest_tokens is None:
            return False
        if smallest_tokens <= room.most_tokens or largest_tokens > room.total_tokens:
            return True
        if now_s >= self._first_limit_s:
            return True
        sharing = self._held.sharing_instances
        return bool(sharing) and any(
            self._has_tokens(each, self._held.smallest_own_tokens(each))
            for each in (sharing if among is None else among)
        )

    def _keeps_room(self, request: DispatchRequest, now_s: float) -> bool:
        after_s = self._policy.reserves_after_s
        if after_s is None:
            return False
        since_s = self._held.since_s(request.request_id)
        return self._goes_first(request) or now_s >= since_s + after_s

    def _goes_first(self, request: DispatchRequest) -> bool:
        """Whether memory is kept free for the request at once: its class is above normal, or its
        client waits in the middle of an answer."""
        is_urgent = self._policy.counts_as(request.scheduling_priority) > NORMAL
        return is_urgent or request.has_begun

    def _send(
        self,
        request: DispatchRequest,
        new: NewRequest,
        instance_id: InstanceId,
        reason: DispatchReason | None,
        now_s: float,
    ) -> Dispatch:
        number = self._next_number
        self._next_number += 1
        if self._may_share(request):
            self._running_prompts.on_sent(request, self.candidates)
        self._instances.send(request, new, instance_id, number, now_s)
        return Dispatch(request.request_id, request.frontend_id, instance_id, number, reason)

    def _pair(self, kept_free: InstanceId | None) -> list[Effect]:
        candidates = self.candidates
        pairs = pair(candidates, self._policy, kept_free, self._kv_formats)
        effects: list[Effect] = []
        last = self._last_destinations
        for candidate in candidates:
            source = candidate.load.instance_id
            destination = pairs.get(source)
            if destination == kept_free and not candidate.load.is_terminating:
                # A class need not look at it.
                destination = None
            if destination is None and last.get(source, source) is None:
                # It knows that it has none.
                continue
            last[source] = destination
            reason = None
            if self._explains and destination is not None:
                reason = move_reason(candidate, candidates.of(destination), self._policy)
            effects.append(SetDestination(source, destination, reason))
        return effects

    def _scale(self, now_s: float) -> list[Effect]:
        if self._scaling is None:
            return []
        starting = self._instances.starting
        num_pending = len(self._pending.intersection(starting))
        if self._policy.own is not None and now_s >= self._scaling_begins_s:
            staying = [each for each in self.candidates if not each.load.is_terminating]
            num_wanted = None
            if staying:
                num_wanted = checked_number(
                    self._policy.own.num_instances(staying, len(starting), self._scaling)
                )
            if num_wanted is not None:
                self._scaling_state, decision = towards(
                    self._scaling_state,
                    num_wanted,
                    self.candidates,
                    self._scaling,
                    num_starting=len(starting),
                    num_pending=num_pending,
                    now_s=now_s,
                )
                return [] if decision is None else [decision]
        self._scaling_state, decision = decide_scaling(
            self._scaling_state,
            self.candidates,
            self._scaling,
            num_starting=len(starting),
            num_pending=num_pending,
            now_s=now_s,
            begins_s=self._scaling_begins_s,
            held_since_s=self._held.first_since_s,
        )
        return [] if decision is None else [decision]
