"""One instance: an engine and its llumlet, driven by asyncio (Section 4.3).

Everything is decided by the pure `Llumlet`; here messages, views and outcomes go in and effects
come out, to the engine, to peers, to the scheduler and to the front ends.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from sterna.config import LlumletConfig
from sterna.engine.interface import Engine, EngineFacts
from sterna.llumlet import ForwardAbort, Llumlet, LlumletEffect, Report
from sterna.mailbox import Mailbox
from sterna.messages import (
    AbortRequests,
    AddRequest,
    AdminReply,
    CallUtility,
    Emptied,
    Farewell,
    ListRequests,
    LoadReport,
    Membership,
    MigrateRequest,
    MigrationMessage,
    OwnerQuery,
    OwnerReply,
    RequestsMoved,
    SetDestination,
    TokenBatch,
    TokenSpan,
    UtilityResult,
    WireMessage,
)
from sterna.messages import Instance as Member
from sterna.migration.messages import AbortDrained, AbortRequest, Drained, Ended, Event, Reason
from sterna.runtime.effects import EffectRunner
from sterna.runtime.emptying import Emptying
from sterna.types import FrontendId, InstanceId, InstanceView, MigrationId, RequestId, RequestView

logger = logging.getLogger(__name__)


class Instance:
    """Drives one engine and its llumlet; is the engine's listener."""

    def __init__(self, instance_id: InstanceId, config: LlumletConfig, mailbox: Mailbox) -> None:
        self._instance_id = instance_id
        self._mailbox = mailbox
        self._llumlet = Llumlet(instance_id, config)
        self._membership = Membership(0, (), (), None)
        self._addresses: dict[InstanceId, str] = {}
        self._frontends: dict[FrontendId, str] = {}
        self._requests: dict[RequestId, FrontendId] = {}
        self._view: InstanceView | None = None
        self._orders: dict[MigrationId, MigrateRequest] = {}
        self._drained_s: dict[MigrationId, float] = {}
        self._num_committed = 0
        self._num_aborted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._emptying = Emptying()
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def membership(self) -> Membership:
        """The newest that it has heard of."""
        return self._membership

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
            on_ended=self._on_ended,
            on_failure=self.on_failure,
        )
        facts = await engine.start()
        if facts.immovable_features:
            logger.warning(
                "instance serves without migration instance=%s because of: %s",
                self._instance_id,
                "; ".join(facts.immovable_features),
            )
        self._delivery = asyncio.create_task(self._mailbox.deliver(self._handle))
        self._delivery.add_done_callback(self._on_delivery_ended)
        self._tick()
        return facts

    async def close(self) -> None:
        """Stop serving and give the engine's resources back."""
        if self._timer is not None:
            self._timer.cancel()
        self._delivery.cancel()
        await self._effects.close()
        await self._engine.close()
        self._mailbox.close()

    # ----------------------------------------------------------------------------- messages

    def _handle(self, message: WireMessage, frames: list[bytes]) -> None:
        match message:
            case AddRequest(frontend_id, request_id, dispatch_number):
                self._requests[request_id] = frontend_id
                self._llumlet.on_request_admitted(request_id, dispatch_number)
                self._engine.add(frontend_id, frames[0])
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    self._carry_out(self._llumlet.on_client_abort(request_id, _now_s()))
            case MigrationMessage(sender, inner):
                self._carry_out(self._llumlet.on_message(sender, inner, _now_s()))
            case SetDestination(destination):
                self._carry_out(self._llumlet.on_destination(destination, _now_s()))
            case CallUtility(frontend_id, call_id, method):
                self._engine.call_utility(frontend_id, call_id, method, frames[0])
            case OwnerQuery(frontend_id, query_id, request_ids):
                self._answer_owner_query(frontend_id, query_id, request_ids)
            case ListRequests(reply_to, query_id):
                body = msgspec.json.encode(self._describe_requests())
                self._mailbox.send(reply_to, AdminReply(query_id, body))
            case MigrateRequest():
                self._order(message)
            case Farewell(frontend_id, emptied_since):
                self._emptying.on_farewell(frontend_id, emptied_since)
            case Membership():
                self.on_membership(message)
            case _:
                logger.error("unexpected message type=%s", type(message).__name__)
        self._tell_if_emptied()

    def on_membership(self, membership: Membership) -> None:
        """Learn who is there; whoever is not there any more is dead for good."""
        if membership.version <= self._membership.version:
            return
        if membership.scheduler != self._membership.scheduler:
            # Migration is disabled while the scheduler is gone (Section 5); its successor says
            # anew what it wants.
            self._carry_out(self._llumlet.on_destination(None, _now_s()))
        self._membership = membership
        instances = {i.instance_id: i.address for i in membership.instances}
        frontends = {f.frontend_id: f.address for f in membership.frontends}
        dead = self._addresses.keys() - instances.keys()
        gone = self._frontends.keys() - frontends.keys()
        self._addresses = instances
        self._frontends = frontends
        known = {*instances.values(), *frontends.values()}
        known.update(
            each for each in (membership.scheduler, membership.supervisor) if each is not None
        )
        self._mailbox.keep_only(known)
        for instance_id in sorted(dead):
            self._carry_out(self._llumlet.on_peer_dead(instance_id, _now_s()))
        for frontend_id in sorted(gone):
            logger.info("front end gone, its requests end frontend=%s", frontend_id)
            for request_id in [r for r, f in self._requests.items() if f == frontend_id]:
                self._carry_out(self._llumlet.on_client_abort(request_id, _now_s()))
        for instance in membership.instances:
            if instance.instance_id == self._instance_id:
                self._on_membership_of_itself(instance)

    def _on_membership_of_itself(self, instance: Member) -> None:
        self._llumlet.set_strangers(
            each.instance_id
            for each in self._membership.instances
            if each.kv_format != instance.kv_format
        )
        self._emptying.on_membership(instance.emptied_since if instance.is_terminating else None)
        self._llumlet.set_terminating(instance.is_terminating, _now_s())
        self._engine.set_terminating(instance.is_terminating)
        self._carry_out(self._llumlet.on_tick(_now_s()))

    def _tell_if_emptied(self) -> None:
        """Tell the supervisor when the instance may end: nothing is here, nothing will come, and
        no peer waits for an answer from here."""
        if self._requests or self._llumlet.has_open_migrations:
            return
        since = self._emptying.to_tell(self._frontends, self._membership.version)
        if since is not None and self._membership.supervisor is not None:
            self._mailbox.send(self._membership.supervisor, Emptied(self._instance_id, since))

    def _answer_owner_query(
        self, frontend_id: FrontendId, query_id: int, request_ids: Iterable[RequestId]
    ) -> None:
        arriving = self._llumlet.arriving_requests()
        here = tuple(r for r in request_ids if r in self._requests or r in arriving)
        self._send_to_frontend(frontend_id, OwnerReply(self._instance_id, query_id, here))

    def _order(self, order: MigrateRequest) -> None:
        """Begin a migration that an operator wants; the answer goes out when it has ended."""
        if order.destination not in self._addresses:
            self._reply_error(order, f"no instance is called {order.destination}")
            return
        outcome = self._llumlet.on_order(order.request_id, order.destination, order.mode, _now_s())
        if isinstance(outcome, Reason):
            self._reply_error(order, outcome.value)
            return
        migration_id, effects = outcome
        self._orders[migration_id] = order
        self._carry_out(effects)

    def _reply_error(self, order: MigrateRequest, reason: str) -> None:
        body = msgspec.json.encode({"request": order.request_id, "reason": reason})
        self._mailbox.send(order.reply_to, AdminReply(order.query_id, body, reason))

    def _describe_requests(self) -> list[dict[str, object]]:
        if self._view is None:
            return []
        requests = (*self._view.running, *self._view.queuing)
        return [self._describe(request) for request in requests]

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
            "immovable": None if request.immovable is None else request.immovable.value,
        }

    # ------------------------------------------------------------------------------ effects

    def _carry_out(self, effects: Iterable[LlumletEffect]) -> None:
        for effect in effects:
            match effect:
                case Report(load):
                    if self._membership.scheduler is not None:
                        report = LoadReport(load, self._num_committed, self._num_aborted)
                        self._mailbox.send(self._membership.scheduler, report)
                case AbortRequest(request_id) | AbortDrained(_, request_id):
                    self._requests.pop(request_id, None)
                    self._effects.run(effect)
                case ForwardAbort(instance_id, request_id):
                    if instance_id in self._addresses:
                        self._mailbox.send(
                            self._addresses[instance_id], AbortRequests((request_id,))
                        )
                case _:
                    self._effects.run(effect)
        self._schedule_tick()

    def _on_outcome(self, migration_id: MigrationId, event: Event) -> None:
        if isinstance(event, Drained):
            self._drained_s[migration_id] = _now_s()
        self._carry_out(self._llumlet.on_outcome(migration_id, event, _now_s()))

    def _on_ended(self, ended: Ended) -> None:
        drained_s = self._drained_s.pop(ended.migration_id, None)
        order = self._orders.pop(ended.migration_id, None)
        if not ended.is_outgoing:
            return
        if ended.aborted is None:
            self._num_committed += 1
            self._requests.pop(ended.request_id, None)
            downtime_ms = 0.0 if drained_s is None else (_now_s() - drained_s) * 1e3
            logger.info(
                "migration committed request=%s migration=%s stages=%d downtime_ms=%.1f",
                ended.request_id,
                ended.migration_id,
                ended.stages,
                downtime_ms,
            )
        else:
            self._num_aborted += 1
            logger.info(
                "migration aborted request=%s migration=%s stages=%d reason=%s",
                ended.request_id,
                ended.migration_id,
                ended.stages,
                ended.aborted.name,
            )
        if order is None:
            return
        if ended.aborted is not None:
            self._reply_error(order, ended.aborted.value)
            return
        body = {
            "request": ended.request_id,
            "from": self._instance_id,
            "to": order.destination,
            "stages": ended.stages,
            "suspended_ms": downtime_ms,
        }
        self._mailbox.send(order.reply_to, AdminReply(order.query_id, msgspec.json.encode(body)))

    def _send_to_peer(self, peer: InstanceId, message: MigrationMessage) -> None:
        address = self._addresses.get(peer)
        if address is not None:
            self._mailbox.send(address, message)

    def _send_to_frontend(
        self, frontend_id: FrontendId, message: WireMessage, frames: Iterable[bytes] = ()
    ) -> None:
        address = self._frontends.get(frontend_id)
        if address is not None:
            self._mailbox.send(address, message, list(frames))

    # ------------------------------------------------------------------------ EngineListener

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        self._send_to_frontend(frontend_id, TokenBatch(self._instance_id, spans), payloads)
        for span in spans:
            if span.is_finished:
                self._requests.pop(span.request_id, None)
                self._carry_out(
                    self._llumlet.on_request_ended(
                        span.request_id, Reason.REQUEST_FINISHED, _now_s()
                    )
                )

    def on_view(self, view: InstanceView) -> None:
        self._view = view
        self._carry_out(self._llumlet.on_view(view, _now_s()))
        self._tell_if_emptied()

    def on_transfer(self, migration_id: MigrationId, event: Event) -> None:
        self._carry_out(self._llumlet.on_outcome(migration_id, event, _now_s()))

    def on_utility_result(self, frontend_id: FrontendId, call_id: int, payload: bytes) -> None:
        self._send_to_frontend(frontend_id, UtilityResult(self._instance_id, call_id), [payload])

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId) -> None:
        self._requests[request_id] = frontend_id
        self._send_to_frontend(frontend_id, RequestsMoved(self._instance_id, (request_id,)))

    def on_failure(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    # --------------------------------------------------------------------------------- time

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._llumlet.on_tick(_now_s()))

    def _schedule_tick(self) -> None:
        deadline_s = self._llumlet.next_deadline_s
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


def _now_s() -> float:
    return time.monotonic()
