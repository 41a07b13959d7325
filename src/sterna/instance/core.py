"""One instance without its sockets, engine and clock: messages and outcomes in, effects out. Pure.

`Llumlet` decides about load and migrations (Section 4.3). This core has the rest: the requests on
the instance and their front ends, the members of the cluster, the answers to front ends and
operators, and the end of an instance that is being emptied. `shell` carries the effects out on
asyncio and a real engine, `fault_simulation` in virtual time.

Every `on_...` method returns effects, which are to be carried out in order. For effects of
`migration`, the contract of `sterna.migration.messages` holds.
"""

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import msgspec

from sterna.config import LlumletConfig
from sterna.engine.cache_changes import CacheChanges
from sterna.instance.admissions import Admissions
from sterna.instance.cache_contents import CacheContents
from sterna.instance.llumlet import ForwardAbort, Llumlet, LlumletEffect, PrefixCopied, Report
from sterna.instance.termination import Termination
from sterna.messages.actors import (
    BY_OPERATOR,
    COMMITTED,
    UNKNOWN_CAUSE,
    AbortRequests,
    AddRequest,
    AdminReply,
    CacheReport,
    CallUtility,
    CopyPrefix,
    Emptied,
    FinalAck,
    HandedBack,
    ListRequests,
    LoadReport,
    Membership,
    MigrateRequest,
    MigrationEnd,
    MigrationMessage,
    MoveEnded,
    OwnerQuery,
    OwnerReply,
    PrefixDone,
    RequestNews,
    RequestsMoved,
    SetDestination,
    TokenBatch,
    TokenSpan,
    UtilityResult,
    WireMessage,
)
from sterna.messages.actors import InstanceMember as Member
from sterna.messages.reasons import MoveReason
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Drained,
    Effect,
    Ended,
    Event,
    Reason,
)
from sterna.types import (
    CacheLayout,
    FrontendId,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    RequestView,
    earliest,
    whose_prefix,
)

MAX_UNREPORTED = 1_000
"""Ends of migrations kept for the next load report; beyond, the oldest are dropped."""

MAX_KEPT_MESSAGES = 10_000
"""Messages kept for front ends that are not known yet; beyond, the oldest are dropped."""


REPEAT_NEWS_S = 1.0
"""Time between two attempts to tell a front end, whose mailbox is full, of requests that left."""


@dataclass(frozen=True, slots=True)
class AddToEngine:
    """Have the engine queue the request that a front end sent."""

    frontend_id: FrontendId
    message: AddRequest
    frames: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CallEngine:
    """Call a method of the engine; `on_utility_result` takes the result."""

    message: CallUtility
    payload: bytes


@dataclass(frozen=True, slots=True)
class SetTerminating:
    """Set whether the engine's views say that the instance is being emptied."""

    is_terminating: bool


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A fact for the log: a front end is gone for good, and its requests end."""

    frontend_id: FrontendId


@dataclass(frozen=True, slots=True)
class OutgoingMigrationEnded:
    """A fact for the log: a migration from here has committed or aborted.

    Attributes:
        suspended_s: time from the drain to the verdict; 0 without a drain.
    """

    ended: Ended
    suspended_s: float


InstanceEffect = (
    Effect
    | ToMailbox
    | KeepOnly
    | AddToEngine
    | CallEngine
    | SetTerminating
    | FrontendGone
    | OutgoingMigrationEnded
    | Unexpected
)


class InstanceCore:
    """The decisions of one instance."""

    def __init__(self, instance_id: InstanceId, config: LlumletConfig) -> None:
        self._instance_id = instance_id
        self._hands_back = config.hands_back
        self._migrates = config.policy.migrates
        self._llumlet = self._new_llumlet(config)
        self._membership = Membership(0, (), (), None)
        self._listed_in = 0
        self._addresses: dict[InstanceId, str] = {}
        self._frontends: dict[FrontendId, str] = {}
        # The ids of dead instances are never used again.
        self._dead_instances: set[InstanceId] = set()
        self._gone_frontends: set[FrontendId] = set()
        # A front end may know this instance before this instance knows it.
        self._kept: deque[tuple[FrontendId, WireMessage, Sequence[bytes]]] = deque(
            maxlen=MAX_KEPT_MESSAGES
        )
        self._requests: dict[RequestId, FrontendId] = {}
        self._admissions = Admissions()
        self._orders: dict[MigrationId, MigrateRequest] = {}
        # Why the scheduler set each destination, the last time.
        self._move_reasons: dict[InstanceId, MoveReason] = {}
        self._drained_s: dict[MigrationId, float] = {}
        self._num_committed = 0
        self._num_prefix_tokens = self._num_prefix_hits = self._num_sent_bytes = 0
        self._external_counts = (0, 0)
        self._draft_counts: tuple[int, ...] = ()
        self._unreported: list[MigrationEnd] = []
        self._num_aborted = 0
        self._termination = Termination()
        # Requests that have left, of which the mailbox has refused the last news.
        self._refused_news: dict[FrontendId, list[RequestId]] = {}
        self._repeat_news_s = 0.0
        self._cache: CacheContents | None = None

    def report_cache(self, layout: CacheLayout) -> None:
        """Report the contents of the engine's prefix cache from now on."""
        self._cache = CacheContents(self._instance_id, layout)

    # ------------------------------------------------------------------------------ queries

    @property
    def membership(self) -> Membership:
        """The newest membership received."""
        return self._membership

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_tick` is due, or None."""
        repeat_news_s = self._repeat_news_s if self._refused_news else None
        return earliest((self._llumlet.next_deadline_s, repeat_news_s))

    @property
    def llumlet(self) -> Llumlet:
        """The part of the core that decides what moves; to be looked at only."""
        return self._llumlet

    @property
    def kept_messages(self) -> list[WireMessage]:
        """Messages for front ends of which no membership has told yet."""
        return [message for _, message, _ in self._kept]

    @property
    def gone_frontends(self) -> Set[FrontendId]:
        """The front ends of whose death the instance has heard."""
        return self._gone_frontends

    @property
    def has_open_migrations(self) -> bool:
        """See `Llumlet.has_open_migrations`."""
        return self._llumlet.has_open_migrations

    def requests(self) -> frozenset[RequestId]:
        """The requests on this instance."""
        return frozenset(self._requests)

    def address_of(self, instance_id: InstanceId) -> str | None:
        """A live peer's mailbox, or None: messages to this peer are void."""
        return self._addresses.get(instance_id)

    # ----------------------------------------------------------------------------- messages

    def on_message(
        self, message: WireMessage, frames: Sequence[bytes], now_s: float
    ) -> list[InstanceEffect]:
        """Handle a message of another actor.

        Raises:
            ProtocolError: a correct peer cannot have sent it.
        """
        return [*self._handle(message, frames, now_s), *self._notify_if_emptied()]

    def _handle(
        self, message: WireMessage, frames: Sequence[bytes], now_s: float
    ) -> list[InstanceEffect]:
        match message:
            case AddRequest(frontend_id) if frontend_id in self._gone_frontends:
                return []
            case AddRequest(frontend_id, request_id, dispatch_number, _):
                self._requests[request_id] = frontend_id
                self._admissions.add(request_id, dispatch_number)
                self._llumlet.on_request_arrived(request_id)
                return [AddToEngine(frontend_id, message, frames)]
            case AbortRequests(request_ids):
                return self._abort(request_ids, now_s)
            case MigrationMessage(sender) if sender in self._dead_instances:
                # It was under way when its sender died. The request goes on elsewhere.
                return []
            case MigrationMessage(sender, inner):
                return self._on_llumlet(self._llumlet.on_message(sender, inner, now_s), now_s)
            case SetDestination(destination, reason):
                if destination is None or destination not in self._addresses:
                    # The order may overtake the membership, which has the destination's KV format;
                    # the scheduler repeats it in every round.
                    destination = None
                elif reason is not None:
                    self._move_reasons[destination] = reason
                return self._on_llumlet(self._llumlet.on_destination(destination, now_s), now_s)
            case CopyPrefix(request_id, destination) if destination not in self._addresses:
                return self._on_llumlet([PrefixCopied(request_id, is_copied=False)], now_s)
            case CopyPrefix(request_id, destination, block_hashes, first_token):
                copied = self._llumlet.on_copy_prefix(
                    request_id, destination, block_hashes, first_token, now_s
                )
                return self._on_llumlet(copied, now_s)
            case CallUtility():
                return [CallEngine(message, frames[0])]
            case OwnerQuery(frontend_id, query_id, request_ids):
                return self._answer_owner_query(frontend_id, query_id, request_ids)
            case ListRequests(reply_to, query_id):
                body = msgspec.json.encode(self._describe_requests())
                return [ToMailbox(reply_to, AdminReply(query_id, body))]
            case MigrateRequest():
                return self._order(message, now_s)
            case FinalAck(frontend_id, emptied_since, num_heard):
                self._termination.on_final_ack(frontend_id, emptied_since, num_heard)
                return []
            case Membership():
                return self.on_membership(message, now_s)
            case _:
                return [Unexpected(message)]

    def on_membership(self, membership: Membership, now_s: float) -> list[InstanceEffect]:
        """Take the newest members; an actor that is no longer among them is dead for good."""
        if membership.version <= self._membership.version:
            return []
        has_other_scheduler = membership.scheduler != self._membership.scheduler
        self._membership = membership
        instances = {i.instance_id: i.address for i in membership.instances}
        frontends = {f.frontend_id: f.address for f in membership.frontends}
        dead = self._addresses.keys() - instances.keys()
        gone = self._frontends.keys() - frontends.keys()
        self._addresses = instances
        self._frontends = frontends
        self._gone_frontends |= gone
        self._dead_instances |= dead
        others = (membership.scheduler, membership.supervisor)
        known = {*instances.values(), *frontends.values(), *(x for x in others if x is not None)}
        self._llumlet.set_num_instances(len(instances))
        # The own format is not known until the instance itself is listed: until then none fits.
        formats = {i.instance_id: i.kv_format for i in membership.instances}
        own_format = formats.get(self._instance_id)
        self._llumlet.set_incompatible_instances(
            each for each, kv_format in formats.items() if kv_format != own_format
        )
        coming = {each.instance_id for each in membership.absent}
        if self._instance_id in coming or self._instance_id in instances:
            self._listed_in = membership.version
        effects: list[InstanceEffect] = [KeepOnly(frozenset(known))]
        if has_other_scheduler:
            if self._cache is not None:
                self._cache.owe_all()
            # Migration is disabled while the scheduler is gone (Section 5).
            effects += self._on_llumlet(self._llumlet.on_scheduler(now_s), now_s)
        effects += self._send_kept()
        for instance_id in sorted(dead):
            effects += self._on_llumlet(self._llumlet.on_peer_dead(instance_id, now_s), now_s)
            # Behind the ends of the migrations to it, which have these reasons.
            self._move_reasons.pop(instance_id, None)
        for frontend_id in sorted(gone):
            effects.append(FrontendGone(frontend_id))
            effects += self._abort(
                [r for r, f in self._requests.items() if f == frontend_id], now_s
            )
        for instance in membership.instances:
            if instance.instance_id == self._instance_id:
                effects += self._on_membership_of_itself(instance, now_s)
        return effects

    def _on_membership_of_itself(self, instance: Member, now_s: float) -> list[InstanceEffect]:
        self._termination.on_membership(instance.emptied_since if instance.is_terminating else None)
        self._llumlet.set_terminating(instance.is_terminating, now_s)
        return [SetTerminating(instance.is_terminating), *self.on_tick(now_s)]

    def _notify_if_emptied(self) -> list[InstanceEffect]:
        """Notify the supervisor when the instance may end: no request is here, none will arrive,
        and no peer waits for an answer."""
        if self._requests or self._llumlet.has_open_migrations:
            return []
        since = self._termination.next_notice(self._frontends, self._membership.version)
        if since is None or self._membership.supervisor is None:
            return []
        return [ToMailbox(self._membership.supervisor, Emptied(self._instance_id, since))]

    def _abort(self, request_ids: Iterable[RequestId], now_s: float) -> list[InstanceEffect]:
        return [
            effect
            for request_id in request_ids
            for effect in self._on_llumlet(self._llumlet.on_client_abort(request_id, now_s), now_s)
        ]

    def _answer_owner_query(
        self, frontend_id: FrontendId, query_id: int, request_ids: Iterable[RequestId]
    ) -> list[InstanceEffect]:
        # A request that is being committed may have died with the peer. If it were claimed here,
        # the front end would stop asking, and the late verdict of the dead would free it here.
        committing = self._llumlet.committing_requests()
        sure = self._requests.keys() - committing
        unsure = (self._llumlet.arriving_requests() | committing) - sure
        here = tuple(each for each in request_ids if each in sure)
        arriving = tuple(each for each in request_ids if each in unsure)
        version = self._membership.version
        reply = OwnerReply(self._instance_id, query_id, here, arriving, version)
        return self._to_frontend(frontend_id, reply)

    def on_unsent(self, address: str, message: WireMessage) -> None:
        """The mailbox has dropped this message: it will never arrive."""
        if isinstance(message, RequestNews):
            for frontend_id, each in self._frontends.items():
                if each == address:
                    self._termination.on_dropped(frontend_id)
                    if gone := _gone_with(message):
                        self._refused_news.setdefault(frontend_id, []).extend(gone)
        elif isinstance(message, CacheReport) and self._cache is not None:
            self._cache.owe_all()

    # ---------------------------------------------------------------------------- operators

    def _order(self, order: MigrateRequest, now_s: float) -> list[InstanceEffect]:
        """Begin a migration that an operator ordered; the answer is sent when it has ended."""
        if order.destination not in self._addresses:
            return [_error(order, f"no instance is called {order.destination}")]
        outcome = self._llumlet.on_order(order.request_id, order.destination, order.mode, now_s)
        if isinstance(outcome, Reason):
            return [_error(order, outcome.value)]
        migration_id, effects = outcome
        self._orders[migration_id] = order
        return self._on_llumlet(effects, now_s)

    def _describe_requests(self) -> list[dict[str, object]]:
        if (view := self._llumlet.view) is None:
            return []
        return [self._describe(request) for request in (*view.running, *view.queuing)]

    def _describe(self, request: RequestView) -> dict[str, object]:
        return {
            "id": request.request_id,
            "instance": self._instance_id,
            "status": request.status.value,
            "num_tokens": request.num_tokens,
            "num_output_tokens": request.num_output_tokens,
            "used_tokens": request.physical_usage_tokens,
            "demand_tokens": request.demand_tokens,
            "priority": int(request.scheduling_priority),
            "num_preemptions": request.num_preemptions,
            "arrival_s": request.arrival_s,
            "immovable": _reason(request),
        }

    # ---------------------------------------------------------------------- from the engine

    def on_outcome(
        self, migration_id: MigrationId, event: Event, now_s: float
    ) -> list[InstanceEffect]:
        """An effect of a migration had this outcome, or something happened to its transfer."""
        if isinstance(event, Drained):
            self._drained_s[migration_id] = now_s
        effects = self._on_llumlet(self._llumlet.on_outcome(migration_id, event, now_s), now_s)
        # The view without its reservation may have come before, while the migration was open.
        return [*effects, *self._notify_if_emptied()]

    def on_outputs(
        self,
        frontend_id: FrontendId,
        spans: tuple[TokenSpan, ...],
        payloads: Sequence[bytes],
        now_s: float,
    ) -> list[InstanceEffect]:
        """A step produced these tokens for this front end, with one payload for each span."""
        effects = self._to_frontend(frontend_id, TokenBatch(self._instance_id, spans), payloads)
        for span in spans:
            if span.is_finished:
                self._forget(span.request_id)
                ended = self._llumlet.on_request_ended(
                    span.request_id, Reason.REQUEST_FINISHED, now_s
                )
                effects += self._on_llumlet(ended, now_s)
        # A request that the engine refuses ends here; no view would show it.
        return [*effects, *self._notify_if_emptied()]

    def on_view(self, view: InstanceView, now_s: float) -> list[InstanceEffect]:
        """The state has changed, at the beginning of a step or between two."""
        self._num_prefix_tokens = view.num_prefix_tokens
        self._num_prefix_hits = view.num_prefix_hits
        self._external_counts = view.external_counts
        self._draft_counts = view.draft_counts
        for dispatch_number in self._admissions.seen(view):
            self._llumlet.on_request_admitted(dispatch_number)
        effects = self._on_llumlet(self._llumlet.on_view(view, now_s), now_s)
        return [*effects, *self._hand_back(), *self._notify_if_emptied()]

    def on_sent(self, num_bytes: int) -> None:
        """These bytes of a KV cache have been sent to another instance."""
        self._num_sent_bytes += num_bytes

    def on_cache(self, changes: CacheChanges) -> None:
        """The contents of the prefix cache have changed; the next load report shows it."""
        if self._cache is not None:
            self._cache.on_changes(changes)

    def _forget(self, request_id: RequestId) -> None:
        """The request has left, whether the engine has ever shown it or not."""
        self._requests.pop(request_id, None)
        self._llumlet.on_request_gone(request_id)
        for dispatch_number in self._admissions.ended(request_id):
            self._llumlet.on_request_admitted(dispatch_number)

    def on_utility_result(
        self, frontend_id: FrontendId, call_id: int, payload: bytes
    ) -> list[InstanceEffect]:
        """A utility call ended."""
        result = UtilityResult(self._instance_id, call_id)
        return self._to_frontend(frontend_id, result, [payload])

    def on_adopted(
        self, frontend_id: FrontendId, request_id: RequestId, first_index: int, now_s: float
    ) -> list[InstanceEffect]:
        """The engine steps this migrated request of the front end, from token `first_index` on."""
        self._requests[request_id] = frontend_id
        if frontend_id in self._gone_frontends:
            # Its source may have died before it could forward the abort.
            return self._abort([request_id], now_s)
        version = self._membership.version
        moved = RequestsMoved(self._instance_id, (request_id,), (first_index,), version)
        return self._to_frontend(frontend_id, moved)

    def on_tick(self, now_s: float) -> list[InstanceEffect]:
        """Time has passed; due at `next_deadline_s`, harmless at any other time."""
        effects = self._on_llumlet(self._llumlet.on_tick(now_s), now_s)
        told = self._repeat_news(now_s)
        return [*effects, *self._hand_back(), *told, *self._notify_if_emptied()]

    def _repeat_news(self, now_s: float) -> list[InstanceEffect]:
        """Tell front ends that requests have left of which they have not heard it: else they would
        wait for these for ever. Those that have ended here are computed again from the tokens that
        were told."""
        if not self._refused_news or now_s < self._repeat_news_s:
            return []
        self._repeat_news_s = now_s + REPEAT_NEWS_S
        refused, self._refused_news = self._refused_news, {}
        return [
            effect
            for frontend_id, request_ids in refused.items()
            for effect in self._to_frontend(
                frontend_id, HandedBack(self._instance_id, tuple(request_ids))
            )
        ]

    def _hand_back(self) -> list[InstanceEffect]:
        """Give back to their front ends the requests that cannot leave otherwise while they run,
        when the emptying has lasted too long and another instance could serve them."""
        view = self._llumlet.view
        is_due = self._hands_back and self._llumlet.has_overstayed and self._has_successor()
        if view is None or not is_due:
            return []
        migrating = self._llumlet.migrating_requests()
        effects: list[InstanceEffect] = []
        for request in (*view.running, *view.queuing):
            request_id = request.request_id
            is_lasting = request.immovable is not None and request.immovable.is_lasting
            is_stuck = is_lasting or not self._migrates
            if not is_stuck or request_id in migrating or request_id not in self._requests:
                continue
            frontend_id = self._requests[request_id]
            self._forget(request_id)
            handed_back = HandedBack(self._instance_id, (request_id,))
            effects += [AbortRequest(request_id), *self._to_frontend(frontend_id, handed_back)]
        return effects

    def _has_successor(self) -> bool:
        return any(
            not each.is_terminating and each.instance_id != self._instance_id
            for each in self._membership.instances
        )

    # ------------------------------------------------------------------------------ effects

    def _new_llumlet(self, config: LlumletConfig) -> Llumlet:
        return Llumlet(self._instance_id, config)

    def _on_llumlet(self, effects: Iterable[LlumletEffect], now_s: float) -> list[InstanceEffect]:
        """Note the requests and migrations that end by these effects, and return the effects with
        addresses in place of ids, and with the answers to operators."""
        addressed: list[InstanceEffect] = []
        for effect in effects:
            match effect:
                case Report():
                    if self._membership.scheduler is not None:
                        addressed += self._report(self._membership.scheduler, effect)
                case PrefixCopied(request_id, is_copied):
                    if self._membership.scheduler is not None:
                        done = PrefixDone(request_id, is_copied)
                        addressed.append(ToMailbox(self._membership.scheduler, done))
                case ForwardAbort(instance_id, request_id):
                    if (address := self._addresses.get(instance_id)) is not None:
                        addressed.append(ToMailbox(address, AbortRequests((request_id,))))
                case AbortRequest(request_id) | AbortDrained(_, request_id):
                    self._forget(request_id)
                    addressed.append(effect)
                case Ended():
                    addressed += [effect, *self._record_end(effect, now_s)]
                case _:
                    addressed.append(effect)
        return addressed

    def _report(self, scheduler: str, due: Report) -> list[ToMailbox]:
        report = LoadReport(
            due.load,
            num_committed=self._num_committed,
            num_aborted=self._num_aborted,
            listed_in=self._listed_in,
            num_prefix_tokens=self._num_prefix_tokens,
            num_prefix_hits=self._num_prefix_hits,
            migrations=tuple(self._unreported),
            num_sent_bytes=self._num_sent_bytes,
            usage_by_priority=due.usage_by_priority,
            external_counts=self._external_counts,
            draft_counts=self._draft_counts,
        )
        self._unreported.clear()
        cached = None if self._cache is None else self._cache.next_report(self._listed_in)
        messages: list[WireMessage] = [report] if cached is None else [cached, report]
        return [ToMailbox(scheduler, each) for each in messages]

    def _record_end(self, ended: Ended, now_s: float) -> list[InstanceEffect]:
        """Count the migration; returns a fact for the log, one for the request's history, and the
        answer to its operator."""
        drained_s = self._drained_s.pop(ended.migration_id, None)
        order = self._orders.pop(ended.migration_id, None)
        if not ended.is_outgoing or whose_prefix(ended.request_id) is not None:
            return []
        frontend_id = self._requests.get(ended.request_id)
        if ended.aborted is None:
            self._num_committed += 1
            self._forget(ended.request_id)
        else:
            self._num_aborted += 1
        suspended_s = 0.0 if drained_s is None else now_s - drained_s
        outcome = COMMITTED if ended.aborted is None else ended.aborted.name.lower()
        reason = self._move_reasons.get(ended.peer) if order is None else None
        cause = UNKNOWN_CAUSE if reason is None else reason.cause.value
        cause = cause if order is None else BY_OPERATOR
        self._unreported.append(MigrationEnd(outcome, ended.stages, suspended_s, cause))
        del self._unreported[:-MAX_UNREPORTED]
        moved = OutgoingMigrationEnded(ended, suspended_s)
        effects: list[InstanceEffect] = [moved]
        if frontend_id is not None:
            effects += self._to_frontend(
                frontend_id,
                MoveEnded(
                    self._instance_id,
                    ended.request_id,
                    ended.peer,
                    outcome,
                    ended.stages,
                    suspended_s,
                    reason,
                ),
            )
        return effects if order is None else [*effects, self._answer(order, moved)]

    def _answer(self, order: MigrateRequest, moved: OutgoingMigrationEnded) -> ToMailbox:
        ended = moved.ended
        if ended.aborted is not None:
            return _error(order, ended.aborted.value)
        body = {
            "request": ended.request_id,
            "from": self._instance_id,
            "to": order.destination,
            "stages": ended.stages,
            "suspended_ms": moved.suspended_s * 1e3,
        }
        return ToMailbox(order.reply_to, AdminReply(order.query_id, msgspec.json.encode(body)))

    def _to_frontend(
        self, frontend_id: FrontendId, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> list[InstanceEffect]:
        address = self._frontends.get(frontend_id)
        if address is not None:
            if isinstance(message, RequestNews):
                self._termination.on_sent(frontend_id)
            return [ToMailbox(address, message, frames)]
        if frontend_id not in self._gone_frontends:
            self._kept.append((frontend_id, message, frames))
        return []

    def _send_kept(self) -> list[InstanceEffect]:
        """Send the messages kept for front ends that have become known."""
        kept = list(self._kept)
        self._kept.clear()
        return [effect for each in kept for effect in self._to_frontend(*each)]


def _error(order: MigrateRequest, reason: str) -> ToMailbox:
    body = msgspec.json.encode({"request": order.request_id, "reason": reason})
    return ToMailbox(order.reply_to, AdminReply(order.query_id, body, reason))


def _reason(request: RequestView) -> str | None:
    """Why the request cannot move now, for operators."""
    if request.immovable is None:
        return None
    text = request.immovable.value
    return f"{text}: {request.unsupported}" if request.unsupported else text


def _gone_with(message: WireMessage) -> Sequence[RequestId]:
    """The requests that are no longer here, as no later message says."""
    if isinstance(message, HandedBack):
        return message.request_ids
    if isinstance(message, TokenBatch):
        return [span.request_id for span in message.spans if span.is_finished]
    return ()
