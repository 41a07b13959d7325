"""The global scheduler's driver: its pure core behind a mailbox and a clock (Section 4.3)."""

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from sterna import global_scheduler as core
from sterna.config import PolicyConfig, ScalingConfig
from sterna.mailbox import Mailbox
from sterna.messages import (
    AddInstances,
    AdminReply,
    CancelDispatch,
    ClusterStats,
    Dispatched,
    DispatchRequest,
    Instance,
    InstanceStats,
    ListInstances,
    LoadReport,
    Membership,
    SetDestination,
    TerminateInstance,
    WireMessage,
)
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.policy.virtual_usage import freeness_of
from sterna.runtime.description import describe_instances
from sterna.types import FrontendId, InstanceId

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
"""Time between two reports for the front ends' metrics."""


class Scheduler:
    """Drives one `GlobalScheduler`.

    Args:
        scaling: None where the number of instances is left alone.
    """

    def __init__(
        self, policy: PolicyConfig, mailbox: Mailbox, scaling: ScalingConfig | None = None
    ) -> None:
        self._mailbox = mailbox
        self._policy = policy
        # Numbers by the clock keep growing over restarts of the scheduler.
        self._core = core.GlobalScheduler(
            policy,
            now_s=time.monotonic(),
            scaling=scaling,
            first_dispatch_number=time.time_ns() // 1000,
        )
        self._membership = Membership(0, (), (), None)
        self._instances: dict[InstanceId, Instance] = {}
        self._everybody: set[InstanceId] = set()
        self._joined: set[InstanceId] = set()
        self._frontends: dict[FrontendId, str] = {}
        self._reports: dict[InstanceId, LoadReport] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def membership(self) -> Membership:
        """The newest that it has heard of."""
        return self._membership

    async def run(self) -> None:
        """Serve until cancelled."""
        self._tick()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mailbox.deliver(self.on_message))
            group.create_task(self._publish_stats())

    async def _publish_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_INTERVAL_S)
            stats = ClusterStats(tuple(map(_stats, self._reports.values())))
            for address in self._frontends.values():
                self._mailbox.send(address, stats)

    def on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        """Take a message in; none has payload that concerns the scheduler."""
        now_s = time.monotonic()
        match message:
            case LoadReport(load):
                # A report may arrive after the instance's end, or before its membership.
                if load.instance_id in self._instances:
                    self._reports[load.instance_id] = message
                self._carry_out(self._core.on_load(load, now_s))
            case DispatchRequest():
                self._carry_out(self._core.on_request(message, now_s))
            case CancelDispatch(request_id):
                self._carry_out(self._core.on_cancel(request_id, now_s))
            case ListInstances(reply_to, query_id):
                described = describe_instances(
                    self._membership,
                    self._reports,
                    self._core.destinations.keys(),
                    migrates=self._policy.migrates,
                )
                body = msgspec.json.encode(described)
                self._mailbox.send(reply_to, AdminReply(query_id, body))
            case Membership():
                self.on_membership(message)
            case _:
                logger.error("unexpected message type=%s", type(message).__name__)

    def on_membership(self, membership: Membership) -> None:
        """Learn who is there."""
        if membership.version <= self._membership.version:
            return
        self._membership = membership
        now_s = time.monotonic()
        instances = {i.instance_id: i for i in membership.instances}
        frontends = {f.frontend_id: f.address for f in membership.frontends}
        warm = {a.instance_id for a in membership.absent if a.state == "warm"}
        # Those that start count where it is decided how many more are needed; warm ones do not.
        coming = {a.instance_id for a in membership.absent} - warm
        everybody = instances.keys() | coming | warm
        gone_instances = sorted(self._everybody - everybody)
        new_instances = sorted((instances.keys() | coming) - self._joined)
        withdrawn = sorted(self._joined & warm)
        gone_frontends = sorted(self._frontends.keys() - frontends.keys())
        addresses = {i.address for i in membership.instances} | set(frontends.values())
        if membership.supervisor is not None:
            addresses.add(membership.supervisor)
        self._mailbox.keep_only(addresses)
        self._instances = instances
        self._everybody = everybody
        self._joined = instances.keys() | coming
        self._frontends = frontends
        for instance_id in new_instances:
            self._carry_out(self._core.on_instance_joined(instance_id, now_s))
        for instance_id in withdrawn:
            self._core.on_instance_withdrawn(instance_id)
        for instance in membership.instances:
            self._core.set_terminating(instance.instance_id, instance.is_terminating)
        for instance_id in gone_instances:
            self._reports.pop(instance_id, None)
            self._carry_out(self._core.on_instance_left(instance_id, now_s))
        for frontend_id in gone_frontends:
            self._carry_out(self._core.on_frontend_left(frontend_id, now_s))

    def _carry_out(self, effects: Iterable[core.Effect]) -> None:
        for effect in effects:
            match effect:
                case core.Dispatch(request_id, frontend_id, instance_id, number):
                    address = self._frontends.get(frontend_id)
                    if address is not None:
                        self._mailbox.send(address, Dispatched(request_id, instance_id, number))
                case core.SetDestination(source, destination):
                    if source in self._instances:
                        self._mailbox.send(
                            self._instances[source].address, SetDestination(destination)
                        )
                case ScaleUp(num_instances):
                    logger.info("more instances are needed num=%d", num_instances)
                    self._tell_supervisor(AddInstances(num_instances))
                case Terminate(instance_id):
                    logger.info("an instance is not needed instance=%s", instance_id)
                    self._tell_supervisor(TerminateInstance(instance_id))
        self._schedule_tick()

    def _tell_supervisor(self, message: AddInstances | TerminateInstance) -> None:
        """Send; where there is no supervisor, the decision falls again after another period."""
        if self._membership.supervisor is not None:
            self._mailbox.send(self._membership.supervisor, message)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._core.on_tick(time.monotonic()))

    def _schedule_tick(self) -> None:
        deadline_s = self._core.next_deadline_s
        if deadline_s is None or self._timer is not None:
            return
        delay_s = max(0.0, deadline_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)


def _stats(report: LoadReport) -> InstanceStats:
    load = report.load
    return InstanceStats(
        instance_id=load.instance_id,
        num_running=load.num_running,
        num_queuing=load.num_queuing,
        used_tokens=load.used_tokens,
        total_tokens=load.total_tokens,
        freeness_steps=freeness_of(load),
        num_migrating_out=load.num_migrating_out,
        num_migrating_in=load.num_migrating_in,
        num_committed=report.num_committed,
        num_aborted=report.num_aborted,
        num_preemptions=load.num_preemptions,
    )
