"""One instance: its core, an engine and a mailbox, driven by asyncio (Section 4.3).

The pure `InstanceCore` makes all decisions. The shell hands it messages, views and outcomes, and
carries its effects out: on the engine, to peers, the scheduler and the front ends.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from sterna.config import LlumletConfig
from sterna.engine.cache_changes import CacheChanges
from sterna.engine.interface import Engine, EngineFacts
from sterna.instance.core import (
    AddToEngine,
    CallEngine,
    FrontendGone,
    InstanceCore,
    InstanceEffect,
    OutgoingMigrationEnded,
    SetTerminating,
)
from sterna.instance.effect_runner import EffectRunner
from sterna.instance.lease_guard import LeaseGuard
from sterna.messages.actors import (
    HEARTBEAT_INTERVAL_S,
    Heartbeat,
    HeartbeatAnswer,
    Membership,
    MigrationMessage,
    TokenSpan,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.migration.messages import CopyEvent, Outcome
from sterna.types import FrontendId, InstanceId, InstanceView, MigrationId, RequestId

logger = logging.getLogger(__name__)


class Instance:
    """Shell of an instance's core and of its engine; also the engine's listener."""

    def __init__(self, instance_id: InstanceId, config: LlumletConfig, mailbox: Mailbox) -> None:
        self._instance_id = instance_id
        self._mailbox = mailbox
        self._lease: LeaseGuard | None = None
        self._supervisor: str | None = None
        self._core = InstanceCore(instance_id, config)
        self._timer: asyncio.TimerHandle | None = None
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def membership(self) -> Membership:
        """The newest membership received."""
        return self._core.membership

    async def start(self, engine: Engine) -> EngineFacts:
        """Start the engine and begin to serve messages.

        Raises:
            InstanceStartError: the engine could not be started.
        """
        self._engine = engine
        self._effects = EffectRunner(
            self._instance_id,
            engine,
            send=self._send_to_peer,
            on_outcome=self._on_outcome,
            on_failure=self.on_failure,
        )
        facts = await engine.start()
        if facts.immovable_features:
            logger.warning(
                "instance serves without migration instance=%s because of: %s",
                self._instance_id,
                "; ".join(facts.immovable_features),
            )
        if facts.cache_layout is not None:
            self._core.report_cache(facts.cache_layout)
        self._delivery = asyncio.create_task(self._mailbox.deliver(self._handle))
        self._delivery.add_done_callback(self._on_delivery_ended)
        self._tick()
        return facts

    def hold(self, lease: LeaseGuard) -> None:
        """Act from now on only while this lease lasts."""
        self._lease = lease

    async def close(self) -> None:
        """Stop serving and free the engine's resources."""
        if self._timer is not None:
            self._timer.cancel()
        self._delivery.cancel()
        await self._effects.close()
        await self._engine.close()
        self._mailbox.close()

    # ----------------------------------------------------------------------------- messages

    def _handle(self, message: WireMessage, frames: list[bytes]) -> None:
        if isinstance(message, HeartbeatAnswer):
            if message.asked_s is None:
                self._supervisor = message.supervisor
            elif self._lease is not None:
                # It may be a late one of a supervisor that has a successor by now.
                self._lease.on_answer(message.asked_s)
        elif isinstance(message, Membership):
            self.on_membership(message)
        else:
            self._carry_out(self._core.on_message(message, frames, _now_s()))

    def on_membership(self, membership: Membership) -> None:
        """Take the newest members; an actor that is no longer among them is dead for good."""
        effects = self._core.on_message(membership, [], _now_s())
        if self.membership is membership and membership.supervisor is not None:
            # A new supervisor's address is known from its first membership.
            self._supervisor = membership.supervisor
        self._carry_out(effects)

    def send_to_supervisor(self, message: WireMessage) -> None:
        """Send the message to the supervisor, if its address is known."""
        if self._supervisor is not None:
            self._send(self._supervisor, message)

    def _send(self, address: str, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        # An instance acts on others only by its mailbox, so the lease is checked here.
        if self._lease is not None:
            self._lease.check()
        if not self._mailbox.send(address, message, frames):
            self._core.on_unsent(address, message)

    # ------------------------------------------------------------------------------ effects

    def _carry_out(self, effects: Iterable[InstanceEffect]) -> None:
        for effect in effects:
            match effect:
                case ToMailbox(address, message, frames):
                    self._send(address, message, frames)
                case KeepOnly(addresses):
                    self._mailbox.keep_only(set(addresses))
                case AddToEngine(frontend_id, message, frames):
                    self._engine.add(frontend_id, frames[0], message.output_token_ids)
                case CallEngine(call, payload):
                    self._engine.call_utility(
                        call.frontend_id, call.call_id, call.method, payload, call.place
                    )
                case SetTerminating(is_terminating):
                    self._engine.set_terminating(is_terminating)
                case FrontendGone(frontend_id):
                    logger.info("front end gone, its requests end frontend=%s", frontend_id)
                case OutgoingMigrationEnded():
                    _log(effect)
                case Unexpected(message):
                    logger.error("unexpected message type=%s", type(message).__name__)
                case _:
                    self._effects.run(effect)
        self._schedule_tick()

    def _on_outcome(self, migration_id: MigrationId, outcome: Outcome) -> None:
        self._carry_out(self._core.on_outcome(migration_id, outcome, _now_s()))

    def _send_to_peer(self, peer: InstanceId, message: MigrationMessage) -> None:
        address = self._core.address_of(peer)
        if address is not None:
            self._send(address, message)

    # ------------------------------------------------------------------------ EngineListener

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        self._carry_out(self._core.on_outputs(frontend_id, spans, payloads, _now_s()))

    def on_view(self, view: InstanceView) -> None:
        self._carry_out(self._core.on_view(view, _now_s()))

    def on_sent(self, num_bytes: int) -> None:
        self._core.on_sent(num_bytes)

    def on_cache(self, changes: CacheChanges) -> None:
        self._core.on_cache(changes)

    def on_transfer(self, migration_id: MigrationId, event: CopyEvent) -> None:
        self._carry_out(self._core.on_outcome(migration_id, event, _now_s()))

    def on_utility_result(self, frontend_id: FrontendId, call_id: int, payload: bytes) -> None:
        self._carry_out(self._core.on_utility_result(frontend_id, call_id, payload))

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        self._carry_out(self._core.on_adopted(frontend_id, request_id, first_index, _now_s()))

    def on_failure(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    # --------------------------------------------------------------------------------- time

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._core.on_tick(_now_s()))

    def _schedule_tick(self) -> None:
        deadline_s = self._core.next_deadline_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline_s - _now_s()), self._tick)

    def _on_delivery_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("instance failed instance=%s", self._instance_id, exc_info=error)
            self.on_failure(error)


def _log(moved: OutgoingMigrationEnded) -> None:
    ended = moved.ended
    if ended.aborted is None:
        logger.info(
            "migration committed request=%s migration=%s stages=%d downtime_ms=%.1f",
            ended.request_id,
            ended.migration_id,
            ended.stages,
            moved.suspended_s * 1e3,
        )
    else:
        logger.info(
            "migration aborted request=%s migration=%s stages=%d reason=%s",
            ended.request_id,
            ended.migration_id,
            ended.stages,
            ended.aborted.name,
        )


def _now_s() -> float:
    return time.monotonic()


async def beat(
    instance_id: InstanceId, instance: Instance, engine: Engine, lease: LeaseGuard | None
) -> None:
    """Send heartbeats with the engine's activity to the supervisor, forever.

    They are sent from the instance's own loop, so that a loop that hangs does not look alive. The
    engine does nothing for them.
    """
    while True:
        activity = engine.activity()
        asked_s = None if lease is None else lease.now_s()
        instance.send_to_supervisor(
            Heartbeat(
                instance_id,
                activity.num_ended,
                activity.is_busy,
                asked_s,
                activity.weight_updates,
            )
        )
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
