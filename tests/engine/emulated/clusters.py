"""Emulated engines behind the production instances, in one process and without Ray.

The test is their front end, their scheduler and their operator in one: everything that they say
arrives at one mailbox.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sterna.config import LlumletConfig, MigrationConfig
from sterna.engine.emulated import engine_messages
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.engine.emulated.emulated_engine import EmulatedEngine, EmulatedOptions
from sterna.engine.emulated.tokens import Vocabulary, stream_key, token_at
from sterna.engine.payload_parts import EventType, annotations_of
from sterna.frontend.requests.token_streams import TokenStreams
from sterna.instance.shell import Instance as RunningInstance
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    AdminReply,
    CallUtility,
    FrontendMember,
    InstanceMember,
    LoadReport,
    Membership,
    MigrateRequest,
    RequestsMoved,
    SetDestination,
    TokenBatch,
    UtilityResult,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox
from sterna.migration.messages import Mode
from sterna.policy.presets import LLUMNIX
from sterna.types import FrontendId, InstanceId, InstanceLoad, RequestId

HOST = "127.0.0.1"
FRONTEND = FrontendId(7)
HANG_TIMEOUT_S = 60.0
"""Nothing here takes so long unless something hangs."""

VOCABULARY = Vocabulary(100, 900)
FAST = StepTime(
    prefill_s=0.001,
    prefill_token_s=1e-5,
    prefill_pair_s=0.0,
    prefill_min_s=0.002,
    decode_s=0.003,
    decode_request_s=1e-5,
    decode_token_s=1e-7,
)
QUICK_COPY = CopyTime(block_s=0.0002, stage_s=0.001)


def options(
    num_blocks: int = 64,
    *,
    step_time: StepTime = FAST,
    copy_time: CopyTime = QUICK_COPY,
    max_model_len: int | None = None,
    **engine: Any,
) -> EmulatedOptions:
    """Engines with blocks of four tokens and steps of three milliseconds."""
    config = EmulatedEngineConfig(num_blocks=num_blocks, block_size=4, **engine)
    return EmulatedOptions(
        engine=config,
        step_time=step_time,
        copy_time=copy_time,
        vocabulary=VOCABULARY,
        max_model_len=max_model_len or config.total_tokens,
    )


def payload(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    arrival_s: float = 0.0,
    mm_features: object = None,
    cache_salt: str | None = None,
    **params: object,
) -> bytes:
    """A request in vLLM's encoding, its fields in vLLM's order."""
    fields = [request_id, list(prompt), mm_features, params, None, arrival_s]
    more = [None, cache_salt, None, None, None, 0, 0, priority]
    return msgspec.msgpack.encode([*fields, *more])


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """What a request must be answered with."""
    key = stream_key(prompt, seed)
    return [token_at(key, index, VOCABULARY) for index in range(num_tokens)]


@dataclass(slots=True)
class Answer:
    """What a client has got so far.

    Attributes:
        times_s: when the engine sent each output.
        num_cached_tokens: of its prompt, as the engine said with the first token.
    """

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish_reason: engine_messages.FinishReason | None = None
    stop_reason: int | None = None
    events: list[EventType] = field(default_factory=list)
    num_cached_tokens: int | None = None


class EmulatedCluster:
    """Instances `i0`, `i1`, ... of one kind."""

    def __init__(self, engine_options: EmulatedOptions, config: LlumletConfig) -> None:
        self._options = engine_options
        self._config = config
        self._mailbox = Mailbox(HOST)
        self._changed = asyncio.Condition()
        self._streams = TokenStreams(gap_timeout_s=HANG_TIMEOUT_S)
        self._numbers = itertools.count(1)
        self._boxes: dict[InstanceId, Mailbox] = {}
        self._running: dict[InstanceId, RunningInstance] = {}
        self._terminating: dict[InstanceId, InstanceId] = {}
        self.engines: dict[InstanceId, EmulatedEngine] = {}
        self.loads: dict[InstanceId, InstanceLoad] = {}
        self.answers: dict[str, Answer] = {}
        self.owners: dict[str, InstanceId] = {}
        self.replies: dict[int, AdminReply] = {}
        self.results: dict[int, object] = {}

    async def start(self, num_instances: int) -> None:
        for number in range(num_instances):
            instance_id = InstanceId(f"i{number}")
            box = self._boxes[instance_id] = Mailbox(HOST)
            instance = self._running[instance_id] = RunningInstance(instance_id, self._config, box)
            engine = self.engines[instance_id] = EmulatedEngine(
                instance_id, self._options, instance
            )
            await instance.start(engine)
        self._reading = asyncio.create_task(self._read())
        self.announce()

    def announce(self) -> None:
        """Tell the instances who is there."""
        instances = tuple(
            InstanceMember(each, box.address, each in self._terminating)
            for each, box in self._boxes.items()
        )
        frontends = (FrontendMember(FRONTEND, self._mailbox.address),)
        version = next(self._numbers)
        for box in self._boxes.values():
            self._mailbox.send(
                box.address, Membership(version, instances, frontends, self._mailbox.address)
            )

    async def close(self) -> None:
        self._reading.cancel()
        for instance_id in list(self._running):
            await self.end(instance_id)
        self._mailbox.close()

    async def end(self, instance_id: InstanceId) -> None:
        """The instance dies."""
        await self._running.pop(instance_id).close()
        del self._boxes[instance_id]
        self.loads.pop(instance_id, None)

    # ----------------------------------------------------------------------------- clients

    def send(self, instance: str, request_id: str, prompt: Sequence[int], **params: Any) -> None:
        """Send a request to the instance."""
        self._streams.open(RequestId(request_id))
        self.answers[request_id] = Answer()
        self.owners[request_id] = InstanceId(instance)
        message = AddRequest(FRONTEND, RequestId(request_id), 0)
        self._tell(instance, message, payload(request_id, prompt, **params))

    def abort(self, request_id: str) -> None:
        """The client goes away."""
        self._streams.close(RequestId(request_id))
        self._tell(self.owners[request_id], AbortRequests((RequestId(request_id),)))

    async def call_utility(self, instance: str, method: str) -> object:
        """The result of a method of the engine."""
        call_id = next(self._numbers)
        self._tell(instance, CallUtility(FRONTEND, call_id, method), msgspec.msgpack.encode(()))
        await self.until(lambda: call_id in self.results)
        return self.results[call_id]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is asked whenever something was said."""
        async with asyncio.timeout(HANG_TIMEOUT_S), self._changed:
            await self._changed.wait_for(condition)

    async def until_finished(self, *request_ids: str) -> None:
        answers = [self.answers[each] for each in request_ids or self.answers]
        await self.until(lambda: all(each.finish_reason is not None for each in answers))

    async def until_empty(self) -> None:
        """Wait until no instance holds or moves anything."""

        def is_empty() -> bool:
            held = (
                load.used_tokens + load.num_running + load.num_queuing + load.num_migrating_in
                for load in self.loads.values()
            )
            return self.loads.keys() == self._boxes.keys() and not any(held)

        await self.until(is_empty)

    def num_queuing(self, instance: str) -> int:
        load = self.loads.get(InstanceId(instance))
        return 0 if load is None else load.num_queuing

    def num_migrating_in(self, instance: str) -> int:
        load = self.loads.get(InstanceId(instance))
        return 0 if load is None else load.num_migrating_in

    # --------------------------------------------------------------------------- operators

    async def migrate(
        self, request_id: str, destination: str, mode: Mode = Mode.LIVE
    ) -> AdminReply:
        """Move the request; returns when that has ended."""
        query_id = next(self._numbers)
        order = MigrateRequest(
            self._mailbox.address, query_id, RequestId(request_id), InstanceId(destination), mode
        )
        self._tell(self.owners[request_id], order)
        await self.until(lambda: query_id in self.replies)
        return self.replies[query_id]

    def empty(self, instance: str, into: str) -> None:
        """Terminate the instance: what it has moves to the other one.

        As the global scheduler does, name the destination anew whenever the instance reports.
        """
        self._terminating[InstanceId(instance)] = InstanceId(into)
        self.announce()

    # -------------------------------------------------------------------------------- inbox

    def _tell(self, instance: str, message: WireMessage, *frames: bytes) -> None:
        self._mailbox.send(self._boxes[InstanceId(instance)].address, message, frames)

    async def _read(self) -> None:
        while True:
            message, frames = await self._mailbox.receive()
            async with self._changed:
                match message:
                    case TokenBatch(instance_id, spans):
                        self._take(instance_id, spans, frames)
                    case LoadReport(load) if load.instance_id in self._boxes:
                        self.loads[load.instance_id] = load
                        if (into := self._terminating.get(load.instance_id)) is not None:
                            self._tell(load.instance_id, SetDestination(into))
                    case RequestsMoved(instance_id, request_ids):
                        self._streams.on_moved(message)
                        self.owners.update(dict.fromkeys(request_ids, instance_id))
                    case AdminReply(query_id):
                        self.replies[query_id] = message
                    case UtilityResult(_, call_id):
                        outputs = msgspec.msgpack.decode(frames[0], type=engine_messages.Outputs)
                        assert outputs.utility_output is not None
                        assert outputs.utility_output.result is not None
                        self.results[call_id] = outputs.utility_output.result[1]
                self._changed.notify_all()

    def _take(self, instance_id: InstanceId, spans: Sequence[Any], frames: Sequence[bytes]) -> None:
        now_s = asyncio.get_running_loop().time()
        for span, payload in zip(spans, frames, strict=True):
            assert span.has_events == bool(annotations_of(payload).events)
        for delivery in self._streams.on_batch(instance_id, spans, frames, now_s).deliveries:
            assert delivery.num_repeated == 0, "an emulated engine says nothing twice"
            outputs = msgspec.msgpack.decode(delivery.payload, type=engine_messages.Outputs)
            (output,) = outputs.outputs
            answer = self.answers[delivery.request_id]
            assert answer.finish_reason is None
            answer.token_ids += output.new_token_ids
            answer.times_s.append(outputs.timestamp)
            answer.finish_reason = output.finish_reason
            answer.stop_reason = output.stop_reason
            answer.events += [event.type for event in output.events or ()]
            if output.prefill_stats is not None:
                answer.num_cached_tokens = output.prefill_stats.num_cached_tokens


@asynccontextmanager
async def emulated_cluster(
    num_instances: int = 2, engine_options: EmulatedOptions | None = None
) -> AsyncIterator[EmulatedCluster]:
    """Instances that a test talks to; ended behind it."""
    # Steps of milliseconds outrun copies where the machine is busy, but not for ever.
    migration = MigrationConfig(max_stages=1000, lease_s=HANG_TIMEOUT_S)
    policy = replace(LLUMNIX, num_concurrent_migrations=4)
    config = LlumletConfig(policy, migration, report_interval_s=0.005)
    cluster = EmulatedCluster(engine_options or options(), config)
    await cluster.start(num_instances)
    try:
        yield cluster
    finally:
        await cluster.close()
