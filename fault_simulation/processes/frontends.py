"""Front ends: the production core, interpreted in virtual time."""

from collections.abc import Iterable, Sequence

from fault_simulation.engine.kv_cache import prompt_hashes
from fault_simulation.oracle.token_oracle import Ask, decode_output, encode, encode_output
from fault_simulation.processes.actors import Actor
from fault_simulation.processes.streams import FrontendStreams
from fault_simulation.processes.world import World
from fault_simulation.virtual.mailboxes import LATEST_S
from fault_simulation.virtual.settings import FRONTEND
from fault_simulation.virtual.timeline import Violation
from sterna.frontend.requests.core import RequestMessage
from sterna.frontend.requests.request_effects import (
    Deliver,
    Fail,
    Failure,
    SendAgain,
    ToInstance,
    ToScheduler,
)
from sterna.frontend.requests.request_effects import Effect as FrontendEffect
from sterna.frontend.requests.request_ids import client_id
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    DispatchRequest,
    FinalAck,
    Membership,
    TokenBatch,
    WireMessage,
)
from sterna.messages.streams import StreamMessage
from sterna.types import FrontendId, InstanceId, RequestId, earliest


class FrontendProcess(Actor):
    """A front end, with its clients behind it."""

    def __init__(self, name: str, world: World, frontend_id: FrontendId) -> None:
        super().__init__(name, world)
        self.frontend_id = frontend_id
        self.core = world.cores.frontend(frontend_id, FRONTEND)
        self.membership = Membership(-1, (), (), None)
        self._addresses: dict[InstanceId, str] = {}
        self._frontends: dict[FrontendId, str] = {}
        self.streams: FrontendStreams | None = None
        if world.streams is not None:
            self.streams = FrontendStreams(self, world.streams)

    def queue_limit(self) -> int:
        return self.world.network.queues.of_frontends

    @property
    def is_served(self) -> bool:
        """Whether it knows an instance, and its clients' streams would be found."""
        is_known = self.streams is None or self.streams.reading.is_introduced
        return bool(self._addresses) and is_known

    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        if isinstance(message, Membership) and not self._on_membership(message):
            return
        if isinstance(message, RequestMessage):
            unawaited = self._unawaited(message)
            effects = self.core.on_message(message, frames, self.now_s)
            self._check_told(unawaited, effects)
            self._carry_out(effects)
        if self.streams is not None:
            if isinstance(message, Membership):
                self.streams.on_frontends([each.frontend_id for each in message.frontends])
            elif isinstance(message, StreamMessage):
                self.streams.on_message(message, frames)

    def _unawaited(self, message: RequestMessage) -> set[tuple[InstanceId, RequestId]]:
        """The attempts of these tokens that continue, and that no client waits for."""
        if not isinstance(message, TokenBatch):
            return set()
        going_on = {each.request_id for each in message.spans if not each.is_finished}
        is_awaited = self.world.ledger.is_awaited
        return {(message.instance_id, each) for each in going_on if not is_awaited(each)}

    def _check_told(
        self,
        unawaited: set[tuple[InstanceId, RequestId]],
        effects: Iterable[FrontendEffect],
    ) -> None:
        """An instance that steps a request that no client waits for must be told to end it.

        Raises:
            Violation: it is not.
        """
        for effect in effects:
            match effect:
                case ToInstance(instance_id, AbortRequests(request_ids)):
                    unawaited = unawaited - {(instance_id, each) for each in request_ids}
        if unawaited:
            instance_id, attempt_id = min(unawaited)
            raise Violation(
                f"{instance_id} steps {attempt_id}, for which no client waits, and {self.name} "
                "does not tell it to end it"
            )

    def _on_membership(self, membership: Membership) -> bool:
        """As `frontend.peers`: returns whether the membership is new."""
        if membership.version <= self.membership.version:
            return False
        self.membership = membership
        self._addresses = {each.instance_id: each.address for each in membership.instances}
        self._frontends = {each.frontend_id: each.address for each in membership.frontends}
        others = (membership.scheduler, membership.supervisor)
        addresses = {
            *self._addresses.values(),
            *self._frontends.values(),
            *(each for each in others if each is not None),
        }
        self.world.network.keep_only(self, frozenset(addresses))
        return True

    def next_deadline_s(self) -> float | None:
        if self.streams is None:
            return self.core.next_deadline_s
        return earliest((self.core.next_deadline_s, self.streams.next_deadline_s))

    def on_time(self) -> None:
        self._carry_out(self.core.on_time(self.now_s), is_by_time=True)
        if self.streams is not None:
            self.streams.on_time()

    # ------------------------------------------------------------------------------- clients

    def on_client(self, ask: Ask) -> None:
        """A client's request is accepted."""
        self.submit(ask, ())

    def submit(self, ask: Ask, output_token_ids: tuple[int, ...]) -> None:
        """Have the request generated after the tokens that its client has."""
        question = DispatchRequest(
            frontend_id=self.frontend_id,
            request_id=ask.request_id,
            demand_tokens=self.world.kind.memory.demand_tokens(ask.prompt_tokens),
            arrival_s=ask.arrival_s,
            scheduling_priority=ask.priority,
            execution_priority=ask.priority,
            # Each is the only turn of its session; whether another one comes makes no difference.
            session=ask.request_id,
            prompt_tokens=ask.prompt_tokens,
            block_hashes=prompt_hashes(ask, self.world.kind.cache_layout)
            if self.world.policy.looks_at_prefixes
            else b"",
        )
        effects = self.core.on_request(question, encode(ask), self.now_s, output_token_ids)
        self._carry_out(effects)

    def on_client_gone(self, request_id: RequestId) -> None:
        """A client aborts its request, if that has not ended."""
        if self.world.streams is not None:
            self.world.streams.streams[client_id(request_id)].leave()
        else:
            self.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        """Have the request end, if it has not."""
        if self.world.ledger.on_client_gone(request_id):
            self._carry_out(self.core.on_abort([request_id], self.now_s))

    def _carry_out(self, effects: Sequence[FrontendEffect], *, is_by_time: bool = False) -> None:
        failures = [each for each in effects if isinstance(each, Fail)]
        self.world.ledger.on_judgement(
            [each.request_id for each in failures if each.failure is Failure.KILLED_INSTANCES]
        )
        unsent: list[RequestId] = []
        for effect in effects:
            self.begin_effect()
            match effect:
                case ToScheduler(message):
                    self.send(self.membership.scheduler, message)
                case ToInstance(instance_id, message, payload):
                    frames = () if payload is None else (payload,)
                    if isinstance(message, AddRequest):
                        self.world.ledger.on_sent(message.request_id, instance_id)
                    is_sent = self.send(self._addresses.get(instance_id), message, frames)
                    if isinstance(message, FinalAck) and not is_sent:
                        self.core.on_final_ack_unsent(instance_id, self.now_s)
                    if isinstance(message, AddRequest) and not is_sent:
                        self.world.ledger.on_unsent(message.request_id)
                        unsent.append(message.request_id)
                case Deliver(request_id, payload, num_repeated, is_finished):
                    output = decode_output(payload)
                    token_ids = output.token_ids[num_repeated:]
                    digests = output.digests[num_repeated:]
                    self.world.ledger.on_tokens(
                        request_id, token_ids, digests, is_finished=is_finished
                    )
                    if self.streams is not None:
                        payload = encode_output(request_id, token_ids, digests)
                        self.streams.on_output(request_id, payload, is_finished=is_finished)
                case SendAgain(request_id, attempt_id, num_tokens):
                    self.world.counts["request sent again"] += 1
                    self.world.ledger.on_sent_again(
                        request_id,
                        attempt_id,
                        num_tokens,
                        is_by_time=is_by_time,
                        is_late=is_by_time and self._may_be_late(),
                    )
                case Fail(request_id, failure):
                    self.world.counts[f"request failed: {failure.value}"] += 1
                    self.world.ledger.on_failure(request_id, failure)
                    if self.streams is not None:
                        self.streams.on_failure(request_id)
        if self.streams is not None:
            self.streams.flush()
        if unsent:
            self._carry_out(self.core.on_unsent(unsent, self.now_s))
        self.schedule_tick()

    def _may_be_late(self) -> bool:
        """Whether a message may be on its way for longer than it should be, or a process that was
        stopped may have sent it late."""
        hindered_until_s = self.world.ledger.hindered_until_s + LATEST_S
        return self.now_s < hindered_until_s or self.world.network.is_late()

    def send_to_frontend(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes]
    ) -> None:
        """Send, unless the other front end is gone, or not known yet."""
        self.send(self._frontends.get(frontend_id), message, frames)
