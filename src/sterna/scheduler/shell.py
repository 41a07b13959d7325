"""The global scheduler's shell: its pure core behind a mailbox and a clock (Section 4.3)."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable

import msgspec

from sterna.config import PolicyConfig, ScalingConfig
from sterna.messages.actors import (
    HEARTBEAT_INTERVAL_S,
    SCHEDULER_NAME,
    STATS_INTERVAL_S,
    AdminReply,
    Heartbeat,
    ListInstances,
    ListRequests,
    Membership,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.scheduler.core import SchedulerCore, SchedulerEffect
from sterna.scheduler.description import Description, describe_held, describe_instances

logger = logging.getLogger(__name__)


class Scheduler:
    """Drives one `SchedulerCore`.

    Args:
        scaling: None leaves the number of instances alone.
    """

    def __init__(
        self, policy: PolicyConfig, mailbox: Mailbox, scaling: ScalingConfig | None = None
    ) -> None:
        self._mailbox = mailbox
        self._policy = policy
        # Numbers by the clock keep growing over restarts of the scheduler.
        self._core = SchedulerCore(
            policy,
            now_s=time.monotonic(),
            scaling=scaling,
            first_dispatch_number=time.time_ns() // 1000,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at_s = math.inf

    @property
    def membership(self) -> Membership:
        """The newest membership that it knows."""
        return self._core.membership

    async def run(self) -> None:
        """Serve until cancelled."""
        self._tick()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mailbox.deliver(self.on_message))
            group.create_task(self._publish_stats())
            group.create_task(self._beat())

    async def _beat(self) -> None:
        """Send heartbeats forever: they show that all tasks of this loop get their turn."""
        while True:
            if (supervisor := self._core.membership.supervisor) is not None:
                self._mailbox.send(supervisor, Heartbeat(SCHEDULER_NAME, 0, False))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _publish_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_INTERVAL_S)
            self._carry_out(self._core.stats())

    def on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        """Take in a message; no message to the scheduler has payload frames."""
        match message:
            case ListInstances():
                self._answer(message, self._described_instances())
            case ListRequests():
                self._answer(message, describe_held(self._core.undispatched))
            case _:
                self._carry_out(self._core.on_message(message, time.monotonic()))

    def on_membership(self, membership: Membership) -> None:
        """Take in a membership."""
        self._carry_out(self._core.on_membership(membership, time.monotonic()))

    def _described_instances(self) -> list[Description]:
        return describe_instances(
            self._core.membership,
            self._core.reports,
            self._core.candidates,
            self._core.destinations.keys(),
            migrates=self._policy.migrates,
        )

    def _answer(self, query: ListInstances | ListRequests, described: list[Description]) -> None:
        body = msgspec.json.encode(described)
        self._mailbox.send(query.reply_to, AdminReply(query.query_id, body))

    def _carry_out(self, effects: Iterable[SchedulerEffect]) -> None:
        for effect in effects:
            match effect:
                case ToMailbox(address, message):
                    self._mailbox.send(address, message)
                case KeepOnly(addresses):
                    self._mailbox.keep_only(set(addresses))
                case ScaleUp(num_instances):
                    logger.info("more instances are needed num=%d", num_instances)
                case Terminate(instance_id):
                    logger.info("an instance is not needed instance=%s", instance_id)
                case Unexpected(message):
                    logger.error("unexpected message type=%s", type(message).__name__)
        self._schedule_tick()

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._core.on_tick(time.monotonic()))

    def _schedule_tick(self) -> None:
        deadline_s = self._core.next_deadline_s
        if deadline_s is None:
            return
        if self._timer is not None:
            # A request that begins to wait may be due before what the timer is set for.
            if self._tick_at_s <= deadline_s:
                return
            self._timer.cancel()
        self._tick_at_s = deadline_s
        delay_s = max(0.0, deadline_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)
