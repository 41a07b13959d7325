"""The scheduler of one instance (Section 4.3), as a pure state machine.

"The llumlet of each instance consists of a local scheduler and a migration coordinator": it
reports the instance's load, chooses the request that moves when the global scheduler has set a
destination, and runs the migrations. Its decisions are effects, which an interpreter (`shell`,
`simulator`) carries out.

Every method that takes `now_s` returns effects, in order. Time may not run backwards.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from sterna.config import LlumletConfig, PolicyConfig
from sterna.migration.coordinator import MigrationCoordinator
from sterna.migration.messages import (
    AbortRequest,
    Adopt,
    ClientAborted,
    Effect,
    Ended,
    Event,
    KeepPrefix,
    Message,
    Mode,
    Reason,
    Release,
    RequestEnded,
)
from sterna.policy.load_report import load
from sterna.policy.selection import candidates_to_move
from sterna.policy.virtual_usage import usage_by_priority_of
from sterna.types import (
    Immovable,
    InstanceId,
    InstanceLoad,
    InstanceView,
    MigrationId,
    Priority,
    RequestId,
    RequestView,
    earliest,
    prefix_id,
    whose_prefix,
)

FULL_RATE_INSTANCES = 128
"""With more instances than these each reports less often: the scheduler gets the same number of
reports a second."""

MOVED_OUT_CAPACITY = 4096
"""Requests whose new instance is remembered, for aborts that arrive here after they left."""

DESTINATION_REFUSALS = frozenset(
    {
        Reason.NO_MEMORY,
        Reason.NO_SLOT,
        Reason.OTHER_WEIGHTS,
        Reason.TERMINATING,
        Reason.BUSY,
        Reason.TRANSFER_FAILED,
        Reason.LEASE_EXPIRED,
        Reason.PEER_SILENT,
        Reason.PEER_DEAD,
    }
)
"""Reasons for which the next request to the same destination would probably fail, too."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send the load to the global scheduler. No outcome.

    Attributes:
        usage_by_priority: see `LoadReport`.
    """

    load: InstanceLoad
    usage_by_priority: tuple[tuple[Priority, int], ...]


@dataclass(frozen=True, slots=True)
class ForwardAbort:
    """Notify the llumlet of another instance that the client of this request has gone: the request
    is, or will be, there (`on_client_abort`). No outcome."""

    instance_id: InstanceId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrefixCopied:
    """Notify the global scheduler that it need not wait for this request's prefix: it has been
    copied, or will not be. No outcome."""

    request_id: RequestId
    is_copied: bool


LlumletEffect = Effect | Report | ForwardAbort | PrefixCopied


class Llumlet:
    """Local scheduler and migration coordinator of one instance."""

    def __init__(self, instance_id: InstanceId, config: LlumletConfig) -> None:
        self._instance_id = instance_id
        self._config = config = replace(config, policy=config.policy.with_fresh_state())
        self._coordinator = MigrationCoordinator(
            instance_id, config.migration, config.policy.num_concurrent_migrations
        )
        self._view: InstanceView | None = None
        self._is_terminating = False
        # Time from which requests move without their KV cache, which needs no memory elsewhere.
        self._recompute_from_s: float | None = None
        self._has_overstayed = False
        self._incompatible_instances: frozenset[InstanceId] = frozenset()
        self._destination: InstanceId | None = None
        # End of the pause for a destination that has just refused.
        self._paused_until_s: float | None = None
        self._backoff_until_s: dict[RequestId, float] = {}
        self._moved_out: OrderedDict[RequestId, InstanceId] = OrderedDict()
        # Requests that came back from an instance that died, and may have run there.
        self._taken_back: set[RequestId] = set()
        # Requests whose prefixes leave at the moment.
        self._leaving_prefixes: set[RequestId] = set()
        self._num_prefix_copies = 0
        self._last_dispatch = 0
        self._last_report: InstanceLoad | None = None
        self._has_changed = False
        self._report_due_s = 0.0
        self._num_instances = 1
        self._heartbeat_due_s = 0.0

    # ------------------------------------------------------------------------------ queries

    @property
    def view(self) -> InstanceView | None:
        """The last view of the engine, completed with facts that the engine does not know."""
        return self._view

    @property
    def policy(self) -> PolicyConfig:
        """Its rules, with its own object of a custom class."""
        return self._config.policy

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_tick` is due, or None."""
        deadlines_s = [self._coordinator.next_deadline_s]
        if self._view is not None and self._config.report_interval_s is not None:
            deadlines_s.append(self._report_due_s if self._has_changed else self._heartbeat_due_s)
        if self._recompute_from_s is not None and not self._has_overstayed:
            deadlines_s.append(self._recompute_from_s)
        # A pause begins with a back-off, and ends with it at the latest.
        if self._backoff_until_s and self._num_free_slots() > 0:
            deadlines_s += [self._paused_until_s, *self._backoff_until_s.values()]
        return earliest(deadlines_s)

    @property
    def coordinator(self) -> MigrationCoordinator:
        """The migrations of this instance; to be looked at only."""
        return self._coordinator

    @property
    def has_open_migrations(self) -> bool:
        """Whether the instance must not be shut down yet, even if it is empty.

        A peer may still hold a request and not know yet that it has arrived here.
        """
        return self._coordinator.has_machines

    @property
    def has_overstayed(self) -> bool:
        """Whether the instance has been emptied for longer than `drain_limit_s`."""
        return self._has_overstayed

    def migrating_requests(self) -> frozenset[RequestId]:
        """Requests of migrations that have not ended."""
        return frozenset(self._coordinator.requests())

    @property
    def num_outgoing(self) -> int:
        """Migrations from here that have not ended."""
        return self._coordinator.num_outgoing

    @property
    def num_incoming(self) -> int:
        """Migrations to here that have not ended."""
        return self._coordinator.num_incoming

    @property
    def destination(self) -> InstanceId | None:
        """The instance to which the global scheduler wants requests migrated."""
        return self._destination

    @property
    def wants_view(self) -> bool:
        """Whether a migration begins as soon as a view shows a request that can move."""
        return self._num_free_slots() > 0 and self._paused_until_s is None

    def committing_requests(self) -> frozenset[RequestId]:
        """Requests that the engine still has, but that may be on a peer already."""
        return self._coordinator.committing_requests()

    def arriving_requests(self) -> frozenset[RequestId]:
        """Requests that the engine does not have yet, but may get."""
        return self._coordinator.arriving_requests()

    # ------------------------------------------------------------------------------- events

    def on_view(self, view: InstanceView, now_s: float) -> list[LlumletEffect]:
        """The engine has made a step, or its requests have changed."""
        self._view = self._completed(view)
        self._has_changed = True
        return self._then_start_and_report([], now_s)

    def on_look(self, view: InstanceView, now_s: float) -> list[LlumletEffect]:
        """Begin the migrations that may begin, from a view that was made for this alone.

        For a caller that does not call `on_view` after every step, but makes a view after any
        other event if `wants_view` holds.
        """
        return [*self._start_migrations(self._completed(view), now_s)]

    def on_destination(self, destination: InstanceId | None, now_s: float) -> list[LlumletEffect]:
        """The global scheduler has set this instance's destination, or unset it.

        "The llumlet of each source instance then starts to migrate requests to the destination
        continuously, until it is no longer set in the source state" (Section 4.4.3). Migrations
        in flight go on in any case. When the same destination is set again, it is tried again
        even if it has refused.
        """
        self._destination = destination
        self._paused_until_s = None
        return self._then_start_and_report([], now_s)

    def on_scheduler(self, now_s: float) -> list[LlumletEffect]:
        """The global scheduler was replaced or is gone. A new one names destinations itself, and
        knows nothing of this instance before its next report."""
        self._heartbeat_due_s = now_s
        return self.on_destination(None, now_s)

    def on_order(
        self, request_id: RequestId, destination: InstanceId, mode: Mode, now_s: float
    ) -> Reason | tuple[MigrationId, list[LlumletEffect]]:
        """An operator orders this request to be moved.

        The limit of concurrent migrations holds on the destination only. Returns the reason when
        nothing was begun, else the migration's id and the effects; Ended reports its end.
        """
        if destination == self._instance_id:
            return Reason.SAME_INSTANCE
        if request_id in self._coordinator.requests():
            return Reason.ALREADY_MIGRATING
        # The engine may still hold a request that has moved: a second migration would intercept
        # the client's abort, which has to follow the request.
        if request_id in self._moved_out:
            return Reason.REQUEST_UNKNOWN
        if request_id in self._taken_back:
            return Reason.REQUEST_IMMOVABLE
        if destination in self._incompatible_instances:
            mode = Mode.RECOMPUTE
        migration_id, effects = self._coordinator.start(request_id, destination, mode, now_s)
        return migration_id, self._then_start_and_report(effects, now_s)

    def on_copy_prefix(
        self,
        request_id: RequestId,
        destination: InstanceId,
        block_hashes: bytes,
        first_token: int,
        now_s: float,
    ) -> list[LlumletEffect]:
        """The global scheduler sends a request to the destination, and has the part of its prefix
        copied there that only this instance has: see `KeepPrefix`."""
        if destination == self._instance_id or destination in self._incompatible_instances:
            return [PrefixCopied(request_id, is_copied=False)]
        if request_id in self._leaving_prefixes:
            return []
        moving_id = prefix_id(request_id, self._num_prefix_copies)
        self._num_prefix_copies += 1
        self._leaving_prefixes.add(request_id)
        migration_id, effects = self._coordinator.start(
            moving_id, destination, Mode.STOP_AND_COPY, now_s
        )
        keep = KeepPrefix(migration_id, moving_id, block_hashes, first_token)
        return self._then_start_and_report([keep, *effects], now_s)

    def on_message(self, sender: InstanceId, message: Message, now_s: float) -> list[LlumletEffect]:
        """A message of another llumlet arrived.

        Raises:
            ProtocolError: a correct peer cannot have sent it; nothing was changed.
        """
        effects = self._coordinator.on_message(
            sender, message, now_s, is_terminating=self._is_terminating
        )
        return self._then_start_and_report(effects, now_s)

    def on_outcome(
        self, migration_id: MigrationId, event: Event, now_s: float
    ) -> list[LlumletEffect]:
        """An effect of a migration had this outcome, or something happened to its transfer.

        Raises:
            ProtocolError: the interpreter broke its contract; nothing was changed.
        """
        return self._then_start_and_report(
            self._coordinator.on_outcome(migration_id, event, now_s), now_s
        )

    def on_request_arrived(self, request_id: RequestId) -> None:
        """A dispatched request has arrived; the engine will admit it."""
        self._moved_out.pop(request_id, None)

    def on_request_admitted(self, dispatch_number: int) -> None:
        """The engine has admitted a dispatched request: its views show it, or it has ended. Reports
        say so, and the scheduler no longer counts it as in flight."""
        self._last_dispatch = max(self._last_dispatch, dispatch_number)
        self._has_changed = True

    def on_request_gone(self, request_id: RequestId) -> None:
        """The request is no longer on this instance."""
        self._taken_back.discard(request_id)

    def on_request_ended(
        self, request_id: RequestId, reason: Reason, now_s: float
    ) -> list[LlumletEffect]:
        """The request finished or was preempted: its migration, if there is one, may end now.

        A hint that saves time; the migration would find out as well.
        """
        source = self._coordinator.source_of(request_id)
        if source is None:
            return []
        return self._then_start_and_report(
            self._coordinator.notify(source, RequestEnded(reason), now_s), now_s
        )

    def on_client_abort(self, request_id: RequestId, now_s: float) -> list[LlumletEffect]:
        """The request's client has gone: end the request on the instance that has it by now."""
        if (source := self._coordinator.source_of(request_id)) is not None:
            leaving = self._coordinator.notify(source, ClientAborted(), now_s)
            return self._then_start_and_report(leaving, now_s)
        if (destination := self._coordinator.destination_of(request_id)) is not None:
            # It is the source's until it is adopted; notify both sides, so that it ends on either.
            forward = ForwardAbort(destination.peer, request_id)
            coming = self._coordinator.notify(destination, ClientAborted(), now_s)
            return [forward, *self._then_start_and_report(coming, now_s)]
        if (instance_id := self._moved_out.get(request_id)) is not None:
            return [ForwardAbort(instance_id, request_id)]
        return [AbortRequest(request_id)]

    def on_peer_dead(self, instance_id: InstanceId, now_s: float) -> list[LlumletEffect]:
        """The supervisor confirmed that an instance is dead and will never act again.

        A request that comes back from it stays here. It may have run there, and have sent other
        tokens than it sends here from now on. Its front end notices that, since the tokens of this
        instance arrive in order, but might not if a third instance continued from there.
        """
        if self._destination == instance_id:
            self._destination = None
        for request_id in [r for r, i in self._moved_out.items() if i == instance_id]:
            del self._moved_out[request_id]
        committing = self._coordinator.committing_requests()
        effects = self._coordinator.on_peer_dead(instance_id, now_s)
        taken_back = committing - self._coordinator.committing_requests()
        self._taken_back |= {each for each in taken_back if whose_prefix(each) is None}
        if self._view is not None:
            self._view = self._completed(self._view)
        return self._then_start_and_report(effects, now_s)

    def on_tick(self, now_s: float) -> list[LlumletEffect]:
        """Time has passed; due at `next_deadline_s`, harmless at any other time."""
        return self._then_start_and_report(self._coordinator.on_tick(now_s), now_s)

    def set_terminating(self, is_terminating: bool, now_s: float) -> None:
        """Set whether the instance is being emptied: it then refuses incoming requests, and
        reports a freeness of minus infinity, so that others are paired with it.

        Requests that are still here after `drain_limit_s` move without their KV cache.
        """
        limit_s = self._config.drain_limit_s
        if not is_terminating or limit_s is None:
            self._recompute_from_s, self._has_overstayed = None, False
        elif not self._is_terminating:
            self._recompute_from_s = now_s + limit_s
        self._is_terminating = is_terminating
        if self._view is not None:
            self._view = replace(self._view, is_terminating=is_terminating)
            self._has_changed = True

    def set_num_instances(self, num_instances: int) -> None:
        """Set the number of instances that report to the scheduler."""
        self._num_instances = num_instances

    def set_incompatible_instances(self, instance_ids: Iterable[InstanceId]) -> None:
        """Set the instances that cannot use the KV cache of this one, because of other weights or
        another layout. Requests move there without it."""
        self._incompatible_instances = frozenset(instance_ids)

    # --------------------------------------------------------------------------- migrations

    def _completed(self, view: InstanceView) -> InstanceView:
        """Return the view completed with facts that the engine does not know, or not yet."""
        if self._is_terminating and not view.is_terminating:
            view = replace(view, is_terminating=True)
        if self._taken_back:
            running, queuing = map(self._marked_immovable, (view.running, view.queuing))
            view = replace(view, running=running, queuing=queuing)
        return view

    def _marked_immovable(self, requests: Iterable[RequestView]) -> tuple[RequestView, ...]:
        return tuple(
            structs.replace(each, immovable=Immovable.TAKEN_BACK)
            if each.request_id in self._taken_back
            else each
            for each in requests
        )

    def _then_start_and_report(self, effects: list[Effect], now_s: float) -> list[LlumletEffect]:
        """Note the migrations and waits that have ended; return the effects, followed by those of
        migrations that begin and by the report if it is due."""
        for effect in effects:
            if isinstance(effect, Ended):
                self._note_end(effect, now_s)
        completed = [each for effect in effects for each in _with_what_prefixes_need(effect)]
        self._end_backoffs(now_s)
        if self._recompute_from_s is not None and now_s >= self._recompute_from_s:
            self._has_changed = self._has_changed or not self._has_overstayed
            self._has_overstayed = True
        if self._view is None:
            return completed
        started = self._start_migrations(self._view, now_s)
        return [*completed, *started, *self._report(self._view, now_s)]

    def _note_end(self, ended: Ended, now_s: float) -> None:
        if (request_id := whose_prefix(ended.request_id)) is not None:
            if ended.is_outgoing:
                self._leaving_prefixes.discard(request_id)
            return
        if not ended.is_outgoing:
            if ended.aborted is None:
                self._moved_out.pop(ended.request_id, None)
            return
        if ended.aborted is None:
            self._moved_out[ended.request_id] = ended.peer
            self._moved_out.move_to_end(ended.request_id)
            if len(self._moved_out) > MOVED_OUT_CAPACITY:
                self._moved_out.popitem(last=False)
            return
        retry_s = now_s + self._config.retry_backoff_s
        self._backoff_until_s[ended.request_id] = retry_s
        if ended.aborted in DESTINATION_REFUSALS and ended.peer == self._destination:
            self._paused_until_s = retry_s

    def _end_backoffs(self, now_s: float) -> None:
        if not self._backoff_until_s:
            return
        over = [r for r, until_s in self._backoff_until_s.items() if until_s <= now_s]
        for request_id in over:
            del self._backoff_until_s[request_id]
        if self._paused_until_s is not None and self._paused_until_s <= now_s:
            self._paused_until_s = None

    def _num_free_slots(self) -> int:
        if self._destination is None:
            return 0
        return self._config.policy.num_concurrent_migrations - self._coordinator.num_outgoing

    def _start_migrations(self, view: InstanceView, now_s: float) -> list[Effect]:
        """Fill the free slots with the requests that move next."""
        if not self.wants_view:
            return []
        assert self._destination is not None
        num_free_slots = self._num_free_slots()
        excluded = self._coordinator.requests()
        has_kv = not self._has_overstayed and self._destination not in self._incompatible_instances
        mode = Mode.LIVE if has_kv else Mode.RECOMPUTE
        effects: list[Effect] = []
        for request in candidates_to_move(view, self._victims_policy()):
            request_id = request.request_id
            # The view may be older than the last migrations.
            is_gone = request_id in self._moved_out
            if is_gone or request_id in excluded or request_id in self._backoff_until_s:
                continue
            _, begun = self._coordinator.start(request_id, self._destination, mode, now_s)
            effects.extend(begun)
            num_free_slots -= 1
            if num_free_slots == 0 or not self._config.policy.migrates_continuously:
                break
        if effects and not self._config.policy.migrates_continuously:
            # The next request waits until the next round names a destination.
            self._destination = None
        return effects

    # ------------------------------------------------------------------------------- reports

    def _report(self, view: InstanceView, now_s: float) -> list[Report]:
        interval_s = self._config.report_interval_s
        if interval_s is None:
            return []
        is_heartbeat_due = now_s >= self._heartbeat_due_s
        is_change_due = self._has_changed and now_s >= self._report_due_s
        if not (is_heartbeat_due or is_change_due or self._is_urgent(view)):
            return []
        self._has_changed = False
        self._report_due_s = now_s + spread_interval_s(interval_s, self._num_instances)
        last = self._last_report
        sequence = 1 if last is None else last.sequence + 1
        current = self._load(view, sequence)
        is_same = last is not None and current == structs.replace(last, sequence=sequence)
        if is_same and not is_heartbeat_due:
            return []
        self._last_report = current
        self._heartbeat_due_s = now_s + self._config.heartbeat_interval_s
        usage = usage_by_priority_of(view, self._config.policy)
        return [Report(current, tuple(sorted(usage.items())))]

    def _is_urgent(self, view: InstanceView) -> bool:
        """Whether a change must be known at the next dispatch or pairing."""
        last = self._last_report
        return last is None or (
            view.is_terminating != last.is_terminating
            or len(view.queuing) != last.num_queuing
            or self._coordinator.num_outgoing != last.num_migrating_out
            or self._coordinator.num_incoming != last.num_migrating_in
            # What the end of a request frees, the next one may need.
            or len(view.running) < last.num_running
        )

    def _victims_policy(self) -> PolicyConfig:
        """The policy that chooses what moves. What has overstayed moves in the order of the base of
        a custom class: the class may leave requests out, and the end was promised."""
        policy = self._config.policy
        if self._has_overstayed and policy.own is not None:
            return replace(policy, own=None)
        return policy

    def _load(self, view: InstanceView, sequence: int) -> InstanceLoad:
        current = load(
            view,
            self._victims_policy(),
            sequence=sequence,
            last_dispatch=self._last_dispatch,
            num_migrating_out=self._coordinator.num_outgoing,
            num_migrating_in=self._coordinator.num_incoming,
        )
        if self._has_overstayed and current.move_tokens is not None:
            # A request that moves without its KV cache queues at any destination.
            return structs.replace(current, move_tokens=0)
        return current


def spread_interval_s(interval_s: float, num_instances: int) -> float:
    """Time between two load reports of an instance of a cluster."""
    return interval_s * max(1.0, num_instances / FULL_RATE_INSTANCES)


def _with_what_prefixes_need(effect: Effect) -> list[LlumletEffect]:
    """The effect, with those that follow from it where a prefix moves alone.

    A migration that commits releases the source's blocks, and one that is given up leaves them to
    their owner, as with a request. A prefix has none. Its request may come as soon as the blocks
    are on the destination: the engine adopts them before it admits a request that arrives later.
    """
    match effect:
        case Ended(is_outgoing=True):
            request_id = whose_prefix(effect.request_id)
            if request_id is not None and effect.aborted is not None:
                release = Release(effect.migration_id, effect.request_id)
                return [release, effect, PrefixCopied(request_id, is_copied=False)]
        case Adopt():
            request_id = whose_prefix(effect.request_id)
            if request_id is not None:
                return [effect, PrefixCopied(request_id, is_copied=True)]
        case _:
            pass
    return [effect]
