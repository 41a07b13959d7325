"""Router: the front end's asyncio shell between vLLM's engine-core client and the cluster.

To vLLM's server in this process the router is the one engine core, over the two ZeroMQ sockets of
an external engine: it receives requests, aborts and utility calls, and sends outputs. To the
cluster it is a mailbox. The pure `FrontendCore` decides; the router carries out its effects.

Outputs go one way: from the core to the sockets. With `--resumable-streams`, the outputs of streams
pass the exchange between the two, which may hold them.

The scheduler's `ClusterStats` become vLLM's own metrics of one engine (the sum over instances)
and Sterna's metrics of each instance.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType

from sterna.config import FrontendConfig
from sterna.engine.interface import EngineReady
from sterna.engine.payload_parts import Annotations, EventType, annotations_of, pack_frames
from sterna.engine.vllm.payload import (
    cut_leading_tokens,
    decode_request,
    encode_cluster_stats,
    encode_failure,
)
from sterna.frontend.http.queue_limit import QueueLimit
from sterna.frontend.metrics.latencies import Latencies
from sterna.frontend.metrics.prometheus import EngineCounts, EngineGrowth, FrontendMetrics
from sterna.frontend.operators.questions import Operators
from sterna.frontend.peers import Peers
from sterna.frontend.requests.core import FrontendCore, RequestMessage
from sterna.frontend.requests.histories import Histories, Timing
from sterna.frontend.requests.request_effects import (
    Deliver,
    Effect,
    Fail,
    Failure,
    SendAgain,
    ToInstance,
    ToScheduler,
)
from sterna.frontend.requests.request_ids import client_id, without_attempt
from sterna.frontend.vllm_server.engine_sockets import EngineSockets
from sterna.frontend.vllm_server.utility_calls import Utilities
from sterna.messages.actors import (
    HEARTBEAT_INTERVAL_S,
    MAX_FRAME_BYTES,
    AbortNamed,
    AddRequest,
    AdminReply,
    ClusterStats,
    DescribeHistory,
    Dispatched,
    DispatchRequest,
    FinalAck,
    Heartbeat,
    Held,
    ListRecent,
    Membership,
    MoveEnded,
    TokenBatch,
    UtilityResult,
    WireMessage,
    frontend_name,
)
from sterna.messages.streams import StreamMessage
from sterna.messaging.mailbox import Mailbox
from sterna.priority_classes import DEFAULT_CLASSES, PriorityClasses
from sterna.types import FrontendId, RequestId

if TYPE_CHECKING:
    # Modules of resumable streams, and of prefix caches, are imported only with them.
    # So are OpenTelemetry's.
    from sterna.frontend.metrics.traces import Traces
    from sterna.frontend.resumable.exchange import StreamExchange
    from sterna.frontend.vllm_server.prompt_hashes import PromptHashes

SendToFrontend = Callable[[FrontendId, StreamMessage, Sequence[bytes]], bool]
MakeExchange = Callable[[SendToFrontend, Callable[[list[bytes]], None]], "StreamExchange"]
AbortHere = Callable[[tuple[str, ...] | None], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)

STALL_S = 0.1
"""A timer that fires as much too late was kept up by its own loop: the messages that came meanwhile
are read for as long before deadlines count."""

MAX_UNSHOWN_LATENCIES = 10_000
"""Latencies that wait until the first ClusterStats make the metrics; if there are more, the metrics
are made without them."""


class Router:
    """Connects one AsyncLLM to the instances.

    Args:
        ready: an instance's encoded `EngineReady`.
        folder: a private folder for the sockets that vLLM's client binds.
        classes: the meaning of requests' priorities.
        queue: gets the first tokens, and the number of requests that wait for memory.
        make_exchange: makes the exchange of resumable streams, from two functions: one sends to
            other front ends, one hands outputs to vLLM's client. None for no exchange.

    Attributes:
        streams: the exchange, if there is one.
        utilities: carries out the utility calls of vLLM's client.
        traces: gets the history of each request that has ended; None without OpenTelemetry.
        abort_here: aborts requests of vLLM's client (`AbortNamed`); None while there is no client.
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        config: FrontendConfig,
        mailbox: Mailbox,
        ready: bytes,
        folder: Path,
        classes: PriorityClasses = DEFAULT_CLASSES,
        queue: QueueLimit | None = None,
        make_exchange: MakeExchange | None = None,
        traces: "Traces | None" = None,
    ) -> None:
        self._frontend_id = frontend_id
        self._mailbox = mailbox
        engine = msgspec.msgpack.decode(ready, type=EngineReady)
        self._memory = engine.memory
        self._block_hashes: PromptHashes | None = None
        if engine.hashing is not None:
            from sterna.frontend.vllm_server.prompt_hashes import prompt_hashes

            self._block_hashes = prompt_hashes(engine.hashing)
        self._classes = classes
        self._num_unshown: Counter[str] = Counter()
        self._num_sent_again = 0
        self._latencies = Latencies()
        self._histories = Histories()
        self.traces = traces
        self.abort_here: AbortHere | None = None
        self._trace_headers: dict[RequestId, Mapping[str, str]] = {}
        self._engine_counts = EngineCounts()
        self.peers = Peers(mailbox)
        self.operators = Operators(
            frontend_id, self.peers, config.admin_timeout_s, self._describe_here, classes
        )
        self._sockets = EngineSockets(folder, engine.response)
        self.streams: StreamExchange | None = None
        if make_exchange is not None:
            self.streams = make_exchange(self.peers.send_to_frontend, self._sockets.push_outputs)
        self._core = FrontendCore(frontend_id, config, demand_of=self._memory.demand_tokens)
        self._metrics: FrontendMetrics | None = None
        self.utilities = Utilities(frontend_id, self.peers)
        self._tasks: set[asyncio.Task[None]] = set()
        # vLLM ends a pooling request in a different way from a generating one.
        self._pooling: set[RequestId] = set()
        # Requests with streamed input, each until its end mark or its abort has come.
        self._refused_streamed: set[RequestId] = set()
        self._queue = queue or QueueLimit(None, 0.0)
        self._unstarted: set[RequestId] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at_s = 0.0
        self._put_off_until_s = 0.0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def timing(self, names: Sequence[str], since_s: float) -> Timing | None:
        """The timing of an HTTP request that came at this time of the loop, by the names of its
        engine requests."""
        return self._histories.timing(names, since_s)

    def on_clients_left(self, request_ids: Iterable[RequestId]) -> None:
        """The clients of these requests have left; vLLM's client aborts the requests after this
        call. It aborts others too: those in whose outputs it has found a stop string."""
        for request_id in request_ids:
            self._latencies.forget(request_id)
            self._end_history(request_id, "aborted")

    def abort_elsewhere(self, names: tuple[str, ...] | None) -> None:
        """Have the other front ends abort their requests of these names; None: all requests."""
        message = AbortNamed(names)
        for each in self.peers.membership.frontends:
            if each.frontend_id != self._frontend_id:
                self.peers.send_to_frontend(each.frontend_id, message)

    @property
    def client_addresses(self) -> dict[str, str]:
        """The addresses at which vLLM's client must bind its sockets."""
        return self._sockets.client_addresses

    async def run(self) -> None:
        """Route until cancelled. Any other end is an exception, and a bug."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mailbox.deliver(self._on_message))
            group.create_task(self._serve_client())
            group.create_task(self._beat())
            await self._broken

    async def _beat(self) -> None:
        """Send heartbeats forever: they show the supervisor that the tasks of this loop get their
        turns. The latencies since the last one go to the metrics first."""
        heartbeat = Heartbeat(frontend_name(self._frontend_id), 0, False)
        while True:
            # Not with the ClusterStats, which do not come without a scheduler.
            if self._metrics or self._latencies.num_observed > MAX_UNSHOWN_LATENCIES:
                self._made_metrics().observe(self._latencies.take())
            self.peers.send_to_supervisor(heartbeat)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def close(self) -> None:
        """Close the sockets towards vLLM; the mailbox belongs to the caller."""
        if self._timer is not None:
            self._timer.cancel()
        if self.streams is not None:
            self.streams.close()
        for task in self._tasks:
            task.cancel()
        self._sockets.close()

    # --------------------------------------------------------------- from vLLM's client

    async def _serve_client(self) -> None:
        while True:
            kind, *frames = await self._sockets.receive()
            match EngineCoreRequestType(kind):
                case EngineCoreRequestType.ADD:
                    self._on_add(pack_frames(frames))
                case EngineCoreRequestType.ABORT:
                    self._on_abort(msgspec.msgpack.decode(frames[0], type=list[RequestId]))
                case EngineCoreRequestType.UTILITY:
                    self._begin(self._answer_utility(pack_frames(frames)))
                case other:
                    logger.error("unexpected message of vLLM's client kind=%s", other)
            await asyncio.sleep(0)

    def _on_add(self, payload: bytes) -> None:
        request = decode_request(payload)
        if request.abort_immediately:
            # vLLM's server has rejected the request, and sends it only for the clean-up of a KV
            # connector. An engine ends it without an output, so its end would never be known here.
            # Nothing is lost: vLLM's offloading keeps nothing for a request before it runs, and
            # connectors with remote prefill release blocks that are not fetched after a time-out.
            return
        request_id = RequestId(request.request_id)
        if request_id in self._refused_streamed:
            # A later part of a refused input, or its end mark, which looks like a whole request.
            if not request.resumable:
                self._refused_streamed.remove(request_id)
            return
        if request.pooling_params is not None:
            self._pooling.add(request_id)
        if request.resumable:
            self._refused_streamed.add(request_id)
            self._carry_out([Fail(request_id, Failure.RESUMABLE)])
            return
        if len(payload) > MAX_FRAME_BYTES:
            self._carry_out([Fail(request_id, Failure.TOO_LARGE)])
            return
        begun = None if self.streams is None else self.streams.on_begun(request_id)
        if begun is not None and begun.has_ended:
            return
        its_class = self._classes.of_vllm_priority(request.priority)
        self._unstarted.add(request_id)
        prompt_tokens = _num_prompt_tokens(request)
        ask = DispatchRequest(
            frontend_id=self._frontend_id,
            request_id=request_id,
            demand_tokens=self._memory.demand_tokens(prompt_tokens),
            arrival_s=request.arrival_time,
            scheduling_priority=its_class.scheduling_priority,
            execution_priority=its_class.execution_priority,
            session=request.session_id or "",
            prompt_tokens=prompt_tokens,
            block_hashes=b"" if self._block_hashes is None else self._block_hashes(request),
            has_adapter=request.lora_request is not None,
        )
        token_ids = () if begun is None else begun.output_token_ids
        self._histories.begin(
            ask, its_class.name, _now_s(), arrived_s=time.time(), goes_on=bool(token_ids)
        )
        if self.traces is not None:
            self._trace_headers[request_id] = request.trace_headers or {}
        if not token_ids:
            # The front end where it began has counted one that goes on here; its beginning is not
            # known.
            self._num_unshown[its_class.name] += 1
            self._latencies.begin(request_id, its_class.name, _now_s())
        self._carry_out(self._core.on_request(ask, payload, _now_s(), token_ids))

    def _on_abort(self, request_ids: list[RequestId]) -> None:
        self._pooling.difference_update(request_ids)
        self._unstarted.difference_update(request_ids)
        self._refused_streamed.difference_update(request_ids)
        for request_id in request_ids:
            # Where the client has left, this has no effect, since `on_clients_left` came first.
            # Other requests have ended at a stop string, which vLLM's client finds and the engine
            # does not. But one without tokens has none: its client left before it arrived here.
            num_tokens = self._core.num_delivered(request_id) or 0
            state = "finished" if num_tokens else "aborted"
            self._latencies.on_stopped(request_id)
            self._end_history(request_id, state, output_tokens=num_tokens or None)
        self._carry_out(self._core.on_abort(request_ids, _now_s()))
        if self.streams is not None:
            self.streams.on_abort(request_ids)

    async def _answer_utility(self, payload: bytes) -> None:
        self._sockets.push(await self.utilities.answer(payload))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this in a task of its own, whose failure is the router's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    # ----------------------------------------------------------------- from the cluster

    def _on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        match message:
            case Membership():
                self.on_membership(message)
            case message if isinstance(message, RequestMessage):
                self._note(message, frames)
                self._carry_out(self._core.on_message(message, frames, _now_s()))
            case UtilityResult(_, call_id):
                self.utilities.on_result(call_id, frames[0])
            case ClusterStats():
                self._show(message)
            case AdminReply():
                self.operators.on_reply(message)
            case MoveEnded():
                self._histories.on_move_ended(message, _now_s())
            case AbortNamed(names):
                if self.abort_here is not None:
                    self._begin(self.abort_here(names))
            case DescribeHistory() | ListRecent():
                body = msgspec.json.encode(self._describe_here(message))
                self._mailbox.send(message.reply_to, AdminReply(message.query_id, body))
            case message if self.streams is not None and isinstance(message, StreamMessage):
                self.streams.on_message(message, frames)
            case _:
                logger.error("unexpected message type=%s", type(message).__name__)

    def _describe_here(self, question: DescribeHistory | ListRecent) -> Any:
        """The answer to another front end's question, or to one of this front end's operators."""
        if isinstance(question, DescribeHistory):
            return self._histories.described(question.name)
        return self._histories.recent(question.last_s, _now_s())

    def _note(self, message: RequestMessage, payloads: Sequence[bytes]) -> None:
        """Enter into histories and latencies what the message alone says."""
        match message:
            case TokenBatch(_, spans):
                for span, payload in zip(spans, payloads, strict=True):
                    if span.has_events:
                        self._note_engine_events(span.request_id, annotations_of(payload))
                    if span.is_finished:
                        output_tokens = span.first_index + span.num_tokens
                        self._histories.on_last_token(span.request_id, output_tokens)
            case Dispatched():
                self._histories.on_dispatched(message)
            case Held():
                self._histories.on_held(message, _now_s())

    def _note_engine_events(self, attempt_id: RequestId, annotations: Annotations) -> None:
        if not self._histories.on_engine_events(attempt_id, annotations, _now_s()):
            return
        for kind, ago_s in annotations.events:
            if kind == EventType.PREEMPTED:
                self._latencies.on_preempted(without_attempt(attempt_id), ago_s)

    def _end_history(
        self,
        request_id: RequestId,
        state: str,
        *,
        reason: str | None = None,
        output_tokens: int | None = None,
    ) -> None:
        self._histories.on_ended(
            request_id, state, _now_s(), reason=reason, output_tokens=output_tokens
        )
        headers = self._trace_headers.pop(request_id, None)
        if self.traces is not None and headers is not None:
            history = self._histories.of(request_id)
            if history is not None:
                self.traces.add(history, headers)

    def _made_metrics(self) -> FrontendMetrics:
        if self._metrics is None:
            # A process can register its metrics only once, and may have had another router.
            names = [each.name for each in self._classes.classes]
            self._metrics = FrontendMetrics(class_names=names)
            self._metrics.show_members(self.peers.membership)
        return self._metrics

    def _show(self, stats: ClusterStats) -> None:
        metrics = self._made_metrics()
        metrics.show(stats)
        metrics.count(self._num_unshown)
        self._num_unshown.clear()
        metrics.count_sent_again(self._num_sent_again)
        self._num_sent_again = 0
        growth = self._engine_counts.take(stats.instances)
        if self.peers.first_frontend == self._frontend_id:
            metrics.count_migrations(stats.migrations)
            metrics.count_scaling(stats.num_scaled_up, stats.num_scaled_down)
        else:
            growth = EngineGrowth()
        self._sockets.push(encode_cluster_stats(stats, *growth))
        self._queue.on_queuing(stats.num_waiting, _now_s())

    def on_membership(self, membership: Membership) -> None:
        """Take in a membership; members that it no longer contains are dead for good."""
        if not self.peers.on_membership(membership):
            return
        self.utilities.on_instances(self.peers.instances)
        self._engine_counts.keep_only(self.peers.instances)
        if self._metrics is not None:
            self._metrics.show_members(membership)
        self.operators.on_membership(membership)
        self._carry_out(self._core.on_message(membership, (), _now_s()))
        if self.streams is not None:
            self.streams.on_frontends([each.frontend_id for each in membership.frontends])

    # -------------------------------------------------------------------------- effects

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        now_s = _now_s()
        outputs: list[bytes] = []
        unsent: list[RequestId] = []
        for effect in effects:
            match effect:
                case ToScheduler(message):
                    self.peers.send_to_scheduler(message)
                case ToInstance(instance_id, message, payload):
                    frames = () if payload is None else (payload,)
                    is_sent = self.peers.send_to_instance(instance_id, message, frames)
                    if isinstance(message, FinalAck) and not is_sent:
                        self._core.on_final_ack_unsent(instance_id, now_s)
                    if isinstance(message, AddRequest):
                        if is_sent:
                            self._latencies.on_dispatched(message.request_id, now_s)
                            self._histories.on_sent(
                                message.request_id, instance_id, message.dispatch_number, now_s
                            )
                        else:
                            unsent.append(message.request_id)
                case Deliver(request_id, payload, num_repeated, is_finished):
                    if num_repeated:
                        payload = cut_leading_tokens(payload, num_repeated)
                    if not self._holds(request_id, payload, is_finished=is_finished):
                        outputs.append(payload)
                    self._latencies.on_output(request_id, now_s, is_finished=is_finished)
                    if request_id in self._histories.awaited:
                        self._histories.on_output(request_id, now_s)
                    if request_id in self._unstarted:
                        self._unstarted.discard(request_id)
                        self._queue.on_first_token(client_id(request_id), now_s)
                    if is_finished:
                        self._pooling.discard(request_id)
                        self._end_history(request_id, "finished")
                case SendAgain(request_id, attempt_id, num_tokens):
                    self._num_sent_again += 1
                    self._latencies.on_lost(request_id)
                    self._histories.on_sent_again(request_id, num_tokens, now_s)
                    logger.info(
                        "request sent again request=%s attempt=%s num_tokens=%d",
                        request_id,
                        attempt_id,
                        num_tokens,
                    )
                case Fail(request_id, failure):
                    payload = self._failed(request_id, failure)
                    if not self._holds(request_id, payload, is_finished=True):
                        outputs.append(payload)
        self._sockets.push_outputs(outputs)
        if self.streams is not None:
            self.streams.flush()
        if unsent:
            self._carry_out(self._core.on_unsent(unsent, _now_s()))
        self._schedule_tick()

    def _holds(self, request_id: RequestId, payload: bytes, *, is_finished: bool) -> bool:
        """Whether the exchange has taken the output, and will hand it over itself."""
        if self.streams is None:
            return False
        return self.streams.on_output(request_id, payload, is_finished=is_finished)

    def _failed(self, request_id: RequestId, failure: Failure) -> bytes:
        logger.warning("request failed request=%s reason=%s", request_id, failure.value)
        payload = encode_failure(request_id, failure.value, is_pooling=request_id in self._pooling)
        self._pooling.discard(request_id)
        self._unstarted.discard(request_id)
        self._latencies.forget(request_id)
        self._end_history(request_id, "failed", reason=failure.value)
        return payload

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    # ----------------------------------------------------------------------------- time

    def _schedule_tick(self) -> None:
        """Wake at the next deadline, or earlier: a deadline that has moved back costs one needless
        wake-up, which is cheaper than a new timer at every token."""
        next_s = self._core.next_deadline_s
        if next_s is None:
            return
        next_s = max(next_s, self._put_off_until_s)
        # The time is kept here: uvloop's handle for a timer that is due already has no time.
        if self._timer is not None and self._tick_at_s <= next_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._tick_at_s = next_s
        self._timer = asyncio.get_running_loop().call_at(next_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = _now_s()
        if now_s > self._tick_at_s + STALL_S and self._tick_at_s != self._put_off_until_s:
            # The loop stood still. What came meanwhile lies unread, and would count as silence. A
            # loop that goes on standing still puts no deadline off twice.
            self._put_off_until_s = now_s + STALL_S
            self._schedule_tick()
            return
        try:
            self._carry_out(self._core.on_time(now_s))
        except Exception as error:
            self._break(error)


def _now_s() -> float:
    """Return the time of the loop's own clock, by which timers are set."""
    return asyncio.get_running_loop().time()


def _num_prompt_tokens(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)
