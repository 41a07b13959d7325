"""The scheduler actor without its sockets and clock: messages in, effects out. Pure.

`GlobalScheduler` decides about dispatching, pairing and scaling (Section 4.3). The core adds the
members of the newest `Membership` and their addresses. `scheduler.shell` carries the effects out on
asyncio, `fault_simulation` in virtual time.
"""

from collections.abc import Iterable, Mapping

from sterna.config import PolicyConfig, ScalingConfig
from sterna.messages.actors import (
    HELD_INTERVAL_S,
    AddInstances,
    CacheReport,
    CancelDispatch,
    ClusterStats,
    CopyPrefix,
    Dispatched,
    DispatchRequest,
    Held,
    InstanceMember,
    InstanceStats,
    LoadReport,
    Membership,
    MigrationEnd,
    PrefixDone,
    SetDestination,
    TerminateInstance,
    WireMessage,
)
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.policy.candidate_table import CandidateTable
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.policy.virtual_usage import freeness_of
from sterna.scheduler import global_scheduler as rules
from sterna.scheduler import prefix_copies
from sterna.scheduler.prefix_index import PrefixIndex
from sterna.types import FrontendId, InstanceId, RequestId, earliest

SchedulerEffect = ToMailbox | KeepOnly | Unexpected | ScaleUp | Terminate
"""ScaleUp and Terminate are facts for the log: a message to the supervisor accompanies them."""


MAX_ENDED = 10_000
"""Ends of migrations kept for the next message to the front ends."""


class SchedulerCore:
    """The decisions of one scheduler.

    Args:
        now_s: the time, on the same clock as that of all methods.
        scaling: None leaves the number of instances alone.
        first_dispatch_number: above those of any predecessor.
        explains: whether decisions have reasons.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        *,
        now_s: float,
        scaling: ScalingConfig | None = None,
        first_dispatch_number: int = 1,
        explains: bool = True,
    ) -> None:
        self._prefixes = self._new_index()
        self._core = rules.GlobalScheduler(
            policy,
            now_s=now_s,
            scaling=scaling,
            first_dispatch_number=first_dispatch_number,
            prefixes=self._prefixes,
            explains=explains,
        )
        self._membership = Membership(0, (), (), None)
        self._instances: dict[InstanceId, InstanceMember] = {}
        self._present: set[InstanceId] = set()
        self._joined: set[InstanceId] = set()
        self._frontends: dict[FrontendId, str] = {}
        self._gone_frontends: set[FrontendId] = set()
        self._reports: dict[InstanceId, LoadReport] = {}
        # Migrations and instances that the front ends' metrics do not count yet.
        self._ended: list[MigrationEnd] = []
        self._num_scaled_up = self._num_scaled_down = 0
        # Instances that have reported and were in no membership yet, and in which ones they are.
        self._early: dict[InstanceId, int] = {}
        # The requests of whose wait their front ends know, and when these are to hear of it again.
        self._told: set[RequestId] = set()
        self._tell_s: float | None = None

    # -------------------------------------------------------------------------- queries

    @property
    def membership(self) -> Membership:
        """The newest membership that it knows."""
        return self._membership

    @property
    def reports(self) -> Mapping[InstanceId, LoadReport]:
        """The newest report of each announced instance."""
        return self._reports

    @property
    def candidates(self) -> CandidateTable:
        """See `GlobalScheduler.candidates`."""
        return self._core.candidates

    @property
    def num_held(self) -> int:
        """See `GlobalScheduler.num_held`."""
        return self._core.num_held

    @property
    def undispatched(self) -> list[DispatchRequest]:
        """See `GlobalScheduler.undispatched`."""
        return self._core.undispatched

    @property
    def destinations(self) -> Mapping[InstanceId, InstanceId]:
        """See `GlobalScheduler.destinations`."""
        return self._core.destinations

    @property
    def prefixes(self) -> PrefixIndex:
        """The prefix caches of the instances; to be looked at only."""
        return self._prefixes

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_tick` is due, or None."""
        return earliest((self._core.next_deadline_s, self._tell_s))

    def stats(self) -> list[ToMailbox]:
        """Return the messages with the cluster's load for the metrics of the front ends."""
        stats = ClusterStats(
            tuple(map(self._stats_of, self._reports.values())),
            self.num_held,
            self._core.head_demand_tokens,
            tuple(self._ended),
            self._num_scaled_up,
            self._num_scaled_down,
        )
        self._ended = []
        self._num_scaled_up = self._num_scaled_down = 0
        return [ToMailbox(address, stats) for address in self._frontends.values()]

    def _stats_of(self, report: LoadReport) -> InstanceStats:
        candidate = self.candidates.find(report.load.instance_id)
        freeness = freeness_of(report.load) if candidate is None else candidate.freeness
        return _stats(report, freeness)

    # -------------------------------------------------------------------------- events

    def on_message(self, message: WireMessage, now_s: float) -> list[SchedulerEffect]:
        """Take in a message; no message to the scheduler has payload frames."""
        match message:
            case LoadReport(load):
                if not self._expects(load.instance_id, message.listed_in):
                    return []
                self._ended += message.migrations
                del self._ended[:-MAX_ENDED]
                if load.instance_id in self._instances:
                    self._reports[load.instance_id] = message
                effects = self._translate(self._core.on_load(load, now_s))
                if self._tell_s is None and self._core.has_waiting:
                    # They came before the first report, when there was no memory to wait for.
                    self._tell_s = now_s
                return effects
            case CacheReport(instance_id):
                if self._expects(instance_id, message.listed_in):
                    self._prefixes.on_report(message)
                return []
            case DispatchRequest(frontend_id) if frontend_id in self._gone_frontends:
                # It was under way when its front end died.
                return []
            case DispatchRequest(frontend_id, request_id):
                effects = self._translate(self._core.on_request(message, now_s))
                if self._core.waits(request_id):
                    effects += self._tell(frontend_id, [request_id], now_s)
                return effects
            case PrefixDone(request_id, is_copied):
                done = self._core.on_prefix_done(request_id, now_s, is_copied=is_copied)
                return self._translate(done)
            case CancelDispatch(request_id):
                return self._translate(self._core.on_cancel(request_id, now_s))
            case Membership():
                return self.on_membership(message, now_s)
            case _:
                return [Unexpected(message)]

    def on_membership(self, membership: Membership, now_s: float) -> list[SchedulerEffect]:
        """Take in a membership; an old one is ignored."""
        if membership.version <= self._membership.version:
            return []
        self._membership = membership
        instances = {i.instance_id: i for i in membership.instances}
        frontends = {f.frontend_id: f.address for f in membership.frontends}
        # Starting instances count in the number that auto-scaling still needs; warm ones do not,
        # nor those that become warm.
        warm = {a.instance_id for a in membership.absent if a.state == "warm" or a.is_for_pool}
        coming = {a.instance_id for a in membership.absent} - warm
        present = instances.keys() | coming | warm
        # The membership in which an early one was may never have come.
        overdue = {each for each, since in self._early.items() if 0 < since <= membership.version}
        gone_instances = sorted((self._present | overdue) - present)
        for instance_id in overdue | (self._early.keys() & present):
            del self._early[instance_id]
        new_instances = sorted((instances.keys() | coming) - self._joined)
        withdrawn = sorted(self._joined & warm)
        gone_frontends = sorted(self._frontends.keys() - frontends.keys())
        addresses = {i.address for i in membership.instances} | set(frontends.values())
        if membership.supervisor is not None:
            addresses.add(membership.supervisor)
        self._instances = instances
        self._present = present
        self._joined = instances.keys() | coming
        self._frontends = frontends
        self._gone_frontends = (self._gone_frontends | set(gone_frontends)) - frontends.keys()
        effects: list[rules.Effect] = []
        for instance_id in new_instances:
            effects += self._core.on_instance_joined(instance_id, now_s)
        for instance_id in withdrawn:
            self._core.withdraw_instance(instance_id)
        self._core.set_kv_formats({i.instance_id: i.kv_format for i in membership.instances})
        self._core.set_pending(a.instance_id for a in membership.absent if a.state == "pending")
        for instance in membership.instances:
            self._core.set_terminating(instance.instance_id, instance.is_terminating)
        for instance_id in gone_instances:
            self._reports.pop(instance_id, None)
            self._prefixes.on_instance_left(instance_id)
            effects += self._core.on_instance_left(instance_id, now_s)
        for frontend_id in gone_frontends:
            effects += self._core.on_frontend_left(frontend_id, now_s)
        return [KeepOnly(frozenset(addresses)), *self._translate(effects)]

    def _expects(self, instance_id: InstanceId, listed_in: int) -> bool:
        """Whether a report can be of an instance that lives: one may arrive after the instance's
        end, or before its membership."""
        if instance_id in self._present:
            return True
        if 0 < listed_in <= self._membership.version:
            return False
        self._early[instance_id] = listed_in
        return True

    def on_tick(self, now_s: float) -> list[SchedulerEffect]:
        """Time has passed; due at `next_deadline_s`, harmless at any other time."""
        effects = self._translate(self._core.on_tick(now_s))
        if self._tell_s is not None and now_s >= self._tell_s:
            effects += self._tell_all(now_s)
        return effects

    # ------------------------------------------------------------------------ held requests

    def _tell_all(self, now_s: float) -> list[ToMailbox]:
        """Tell the front ends that their requests wait here."""
        self._tell_s = None
        waiting = self._core.waiting()
        self._told &= waiting.keys()
        untold: dict[FrontendId, list[RequestId]] = {each: [] for each in waiting.values()}
        for request_id, frontend_id in waiting.items():
            if request_id not in self._told:
                untold[frontend_id].append(request_id)
        return [
            each
            for frontend_id, request_ids in untold.items()
            for each in self._tell(frontend_id, request_ids, now_s)
        ]

    def _tell(
        self, frontend_id: FrontendId, request_ids: list[RequestId], now_s: float
    ) -> list[ToMailbox]:
        if self._tell_s is None:
            self._tell_s = now_s + HELD_INTERVAL_S
        address = self._frontends.get(frontend_id)
        if address is None:
            return []
        self._told.update(request_ids)
        causes = tuple(map(self._core.held_cause, request_ids))
        held = Held(tuple(request_ids), self._core.most_room_tokens, causes)
        return [ToMailbox(address, held)]

    # ------------------------------------------------------------------------------ effects

    def _translate(self, effects: Iterable[rules.Effect]) -> list[SchedulerEffect]:
        translated: list[SchedulerEffect] = []
        for effect in effects:
            match effect:
                case rules.Dispatch(request_id, frontend_id, instance_id, number, reason):
                    address = self._frontends.get(frontend_id)
                    if address is not None:
                        answer = Dispatched(request_id, instance_id, number, reason)
                        translated.append(ToMailbox(address, answer))
                case rules.SetDestination(source, destination, reason):
                    if source in self._instances:
                        order = SetDestination(destination, reason)
                        address = self._instances[source].address
                        translated.append(ToMailbox(address, order))
                case prefix_copies.CopyPrefix(request, source, destination, first_token):
                    if source in self._instances:
                        copy = CopyPrefix(
                            request.request_id, destination, request.block_hashes, first_token
                        )
                        address = self._instances[source].address
                        translated.append(ToMailbox(address, copy))
                case ScaleUp(num_instances):
                    asked = self._to_supervisor(AddInstances(num_instances))
                    self._num_scaled_up += num_instances if asked else 0
                    translated += [effect, *asked]
                case Terminate(instance_id):
                    asked = self._to_supervisor(TerminateInstance(instance_id))
                    self._num_scaled_down += len(asked)
                    translated += [effect, *asked]
        return translated

    def _new_index(self) -> PrefixIndex:
        return PrefixIndex()

    def _to_supervisor(self, message: AddInstances | TerminateInstance) -> list[ToMailbox]:
        """The message, if there is a supervisor; otherwise the decision comes again after another
        period."""
        supervisor = self._membership.supervisor
        return [] if supervisor is None else [ToMailbox(supervisor, message)]


def _stats(report: LoadReport, freeness: float) -> InstanceStats:
    load = report.load
    return InstanceStats(
        instance_id=load.instance_id,
        num_running=load.num_running,
        num_queuing=load.num_queuing,
        used_tokens=load.used_tokens,
        total_tokens=load.total_tokens,
        freeness_steps=freeness,
        num_migrating_out=load.num_migrating_out,
        num_migrating_in=load.num_migrating_in,
        num_committed=report.num_committed,
        num_aborted=report.num_aborted,
        num_preemptions=load.num_preemptions,
        num_prefix_tokens=report.num_prefix_tokens,
        num_prefix_hits=report.num_prefix_hits,
        head_demand_tokens=load.head_demand_tokens,
        num_sent_bytes=report.num_sent_bytes,
        num_by_priority=load.num_by_priority,
        usage_by_priority=report.usage_by_priority,
        external_counts=report.external_counts,
        draft_counts=report.draft_counts,
    )
