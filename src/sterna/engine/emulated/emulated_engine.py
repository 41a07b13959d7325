"""An emulated engine on the wall clock, behind `engine.interface.Engine`: a step is a sleep.

"We replace the real GPU execution in vLLM with a simple sleep command, whose duration is
determined by offline measurement" (Section 6.6). `EmulatedCore` makes all decisions and gives the
duration of each step; this shell ends steps when that time has passed, sends their tokens, and
carries out the llumlet's commands between two steps. It belongs to one asyncio loop. Between its
deadlines an engine costs nothing.

A step begins at the deadline of the previous one, not when the loop noticed it, so that delays of
the loop do not add up. The time from the deadline until the next step has begun is counted all the
same, because hardware would wait meanwhile (the scheduling stalls of Section 6.6).
"""

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec import structs

from sterna.engine.cache_changes import CacheRecorder
from sterna.engine.emulated import engine_messages, outcomes
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.copies import Copies
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.engine.emulated.requests import RequestState, decode_state
from sterna.engine.emulated.step_timer import StepTimer
from sterna.engine.emulated.steps import Step, Token
from sterna.engine.emulated.tokens import (
    Vocabulary,
    block_hashes,
    first_stop,
    stream_key,
    token_at,
)
from sterna.engine.interface import (
    EngineActivity,
    EngineFacts,
    EngineListener,
    EngineReady,
    PromptHashing,
)
from sterna.engine.kv_memory import one_group
from sterna.engine.payload_parts import EngineEvent, EventType
from sterna.errors import UNREADABLE
from sterna.messages.actors import TokenSpan
from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    CopyBlocks,
    Drain,
    Drained,
    DrainRefused,
    Inspected,
    KeepPrefix,
    Reason,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.priority_classes import DEFAULT_CLASSES, PriorityClasses
from sterna.types import (
    CacheGroup,
    CacheLayout,
    FrontendId,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    whose_prefix,
)

logger = logging.getLogger(__name__)

MAX_LAG_S = 1.0
"""An engine that is further behind its deadlines skips the lost time: its machine was suspended or
is overloaded."""

STALLS_INTERVAL_S = 5.0
"""Time between two lines of the log with the stalls so far."""

UTILITY_RESULTS: dict[str, object] = {
    "get_supported_tasks": ["generate"],
    "is_scheduler_paused": False,
    "is_sleeping": False,
    "list_loras": [],
    "reset_encoder_cache": None,
    "reset_mm_cache": None,
}
"""Results of vLLM's methods for an engine without model and adapters."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmulatedOptions:
    """Options of an emulated instance; equal for all instances of a cluster.

    Attributes:
        vocabulary: the tokens of outputs.
        max_model_len: tokens of a prompt and its answer at most; they must fit into the memory.
        host: the address on which an instance listens for its peers' copies.
        classes: the priority classes of requests.
    """

    engine: EmulatedEngineConfig
    step_time: StepTime
    copy_time: CopyTime
    vocabulary: Vocabulary
    max_model_len: int
    host: str = "127.0.0.1"
    classes: PriorityClasses = DEFAULT_CLASSES


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The constant part of a request; together with `RequestState` it is all that migrates.

    Attributes:
        key: the key from which its tokens are computed.
        stop_token_id: the token that ends it, or None when its length does.
    """

    frontend_id: FrontendId
    prompt_tokens: int
    key: bytes
    stop_token_id: int | None


@dataclass(slots=True)
class _Stream:
    origin: Origin
    events: list[EngineEvent] = field(default_factory=list)
    num_cached_tokens: int = 0


class EmulatedEngine:
    """One emulated engine; see `engine.interface.Engine` for the methods.

    Args:
        reports_cache: whether the listener hears of the contents of the prefix cache.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        options: EmulatedOptions,
        listener: EngineListener,
        *,
        reports_cache: bool = False,
    ) -> None:
        self._instance_id = instance_id
        self._options = options
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._recorder: CacheRecorder | None = None
        if reports_cache and options.engine.prefix_caching:
            self._recorder = CacheRecorder()
        self._core = EmulatedCore(options.engine, options.step_time, self._recorder)
        self._copies = Copies(options.host, options.copy_time, listener.on_transfer)
        self._commands: deque[Callable[[], None]] = deque()
        self._streams: dict[RequestId, _Stream] = {}
        # Requests that migrate in and have not been adopted.
        self._prepared: dict[MigrationId, Origin] = {}
        # For the commands of an idle engine.
        self._wake: asyncio.Handle | None = None
        # For the end of the step under way.
        self._timer = StepTimer(self._loop, self._between_steps)
        self._deadline_s: float | None = None
        self._is_between_steps = False
        self._is_terminating = False
        self._last_view: InstanceView | None = None
        self._is_closed = False
        self._num_ended = 0
        # When the step under way had begun.
        self._begun_s = 0.0
        self._reported_s = _now_s()
        self._step_s = 0.0
        self._num_followed = 0
        self._steps_s = self._stalled_s = 0.0

    # --------------------------------------------------------------------------- life cycle

    async def start(self) -> EngineFacts:
        await self._copies.open()
        self._do(lambda: None)
        options = self._options
        block_size = options.engine.block_size
        hashing = layout = None
        if self._recorder is not None:
            hashing = PromptHashing(None, block_size)
            layout = CacheLayout(block_size, block_size, (CacheGroup(0, block_size),), moves=True)
        return EngineFacts(
            total_tokens=options.engine.total_tokens,
            ready=EngineReady(
                engine_messages.encode_ready(
                    options.engine, options.max_model_len, self._instance_id
                ),
                one_group(block_size),
                hashing,
            ).encode(),
            kv_format=f"emulated; block_size={block_size}",
            cache_layout=layout,
        )

    async def close(self) -> None:
        self._is_closed = True
        if self._wake is not None:
            self._wake.cancel()
        self._timer.close()
        await self._copies.close()
        self._report_stalls()

    def set_terminating(self, is_terminating: bool) -> None:
        """Set `is_terminating` of further views."""

        def set_terminating() -> None:
            self._is_terminating = is_terminating

        self._do(set_terminating)

    def activity(self) -> EngineActivity:
        return EngineActivity(self._num_ended, self._core.is_stepping)

    # ----------------------------------------------------------------------------- requests

    def add(
        self, frontend_id: FrontendId, payload: bytes, output_token_ids: Sequence[int] = ()
    ) -> None:
        request = engine_messages.decode_request(payload)
        try:
            state, origin = self._read(frontend_id, request)
            state = self._with_history(state, origin, output_token_ids)
        except ValueError as error:
            # The front end refuses such requests before they reach an engine.
            logger.error("request refused request=%s reason=%s", request.request_id, error)
            self._fail(frontend_id, RequestId(request.request_id), len(output_token_ids))
            return

        def add() -> None:
            if self._core.progress(state.request_id) is not None:
                logger.error("request refused, its id is taken request=%s", state.request_id)
                return
            self._streams[state.request_id] = _Stream(origin, [_event(EventType.QUEUED)])
            self._core.add(state)

        self._do(add)

    def _read(
        self, frontend_id: FrontendId, request: engine_messages.Request
    ) -> tuple[RequestState, Origin]:
        """Raises ValueError: the request is too long or needs more than tokens."""
        if (unsupported := request.unsupported()) is not None:
            raise ValueError(f"an emulated engine has no {unsupported}")
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None
        assert prompt is not None
        room = self._options.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for an answer")
        max_tokens = min(room, params.max_tokens or room)
        key = stream_key(prompt, params.seed)
        vocabulary = self._options.vocabulary
        stop = first_stop(
            key, params.stop_token_ids or (), params.min_tokens, max_tokens, vocabulary
        )
        its_class = self._options.classes.of_vllm_priority(request.priority)
        num_outputs = max_tokens if stop is None else stop + 1
        hashes = b""
        if self._options.engine.prefix_caching:
            block_size = self._options.engine.block_size
            hashes = block_hashes(
                prompt, key, num_outputs, vocabulary, block_size, request.cache_salt
            )
        state = RequestState(
            request_id=RequestId(request.request_id),
            prompt_tokens=len(prompt),
            output_tokens=num_outputs,
            arrival_s=request.arrival_time,
            scheduling_priority=its_class.scheduling_priority,
            execution_priority=its_class.execution_priority,
            block_hashes=hashes,
        )
        stop_token_id = None if stop is None else token_at(key, stop, vocabulary)
        return state, Origin(frontend_id, len(prompt), key, stop_token_id)

    def _with_history(
        self, state: RequestState, origin: Origin, output_token_ids: Sequence[int]
    ) -> RequestState:
        """The request after these outputs. Raises ValueError: they are not its own."""
        vocabulary = self._options.vocabulary
        num_tokens = len(output_token_ids)
        own = [token_at(origin.key, index, vocabulary) for index in range(num_tokens)]
        if own != list(output_token_ids) or num_tokens >= state.output_tokens:
            raise ValueError(f"its {num_tokens} earlier outputs are not its first ones")
        return structs.replace(state, num_output_tokens=num_tokens)

    def _fail(self, frontend_id: FrontendId, request_id: RequestId, num_delivered: int) -> None:
        output = engine_messages.Output(
            request_id, [], finish_reason=engine_messages.FinishReason.ERROR
        )
        self._listener.on_outputs(
            frontend_id, (TokenSpan(request_id, num_delivered, 0, True),), [_encode(output)]
        )

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        def abort() -> None:
            for request_id in request_ids:
                self._core.abort(request_id)
                self._streams.pop(request_id, None)

        self._do(abort)

    def call_utility(
        self, frontend_id: FrontendId, call_id: int, method: str, payload: bytes, place: int
    ) -> None:
        def answer(failure: str | None, result: tuple[None, object] | None) -> None:
            output = engine_messages.UtilityOutput(call_id, failure, result)
            payload = engine_messages.encode_outputs(
                engine_messages.Outputs(timestamp=_now_s(), utility_output=output)
            )
            self._loop.call_soon(self._listener.on_utility_result, frontend_id, call_id, payload)

        if method == "reset_prefix_cache":
            self._do(lambda: answer(None, (None, self._core.forget_prefixes())))
        elif method in UTILITY_RESULTS:
            answer(None, (None, UTILITY_RESULTS[method]))
        else:
            answer(f"the emulated engine has no {method}", None)

    # ------------------------------------------------------------------------------- source

    def keep_prefix(self, effect: KeepPrefix) -> None:
        hashes = memoryview(effect.block_hashes).cast("q").tolist()
        first_block = effect.first_token // self._options.engine.block_size
        self._do(lambda: self._core.keep_prefix(effect.request_id, hashes, first_block))

    async def inspect(self, migration_id: MigrationId, request_id: RequestId) -> Inspected:
        return await self._call(lambda: outcomes.inspect(self._core, request_id, self._encode))

    async def drain(self, effect: Drain) -> Drained | DrainRefused:
        return await self._call(lambda: outcomes.drain(self._core, effect, self._export))

    def _encode(self, request_id: RequestId) -> bytes:
        if whose_prefix(request_id) is not None:
            return b""
        return msgspec.msgpack.encode(self._streams[request_id].origin)

    def _export(self, request_id: RequestId) -> bytes:
        if whose_prefix(request_id) is not None:
            return array("q", self._core.kept_hashes(request_id)).tobytes()
        return self._core.export(request_id).encode()

    def resume(self, request_id: RequestId) -> None:
        self._do(lambda: self._core.resume(request_id))

    def release(self, request_id: RequestId) -> None:
        def release() -> None:
            self._core.release(request_id)
            self._streams.pop(request_id, None)

        self._do(release)

    def copy(self, effect: CopyBlocks) -> None:
        self._copies.send(effect.migration_id, effect.stage, effect.num_blocks, effect.receivers)

    def stop_copying(self, migration_id: MigrationId) -> None:
        self._copies.stop_sending(migration_id)

    def forget_migration(self, migration_id: MigrationId) -> None:
        """Drop the records of a migration that has ended on this side."""
        self._prepared.pop(migration_id, None)

    # -------------------------------------------------------------------------- destination

    async def reserve(self, effect: ReserveBlocks) -> BlocksReserved | ReserveFailed:
        if effect.request is not None and whose_prefix(effect.request_id) is None:
            try:
                origin = msgspec.msgpack.decode(effect.request, type=Origin)
            except UNREADABLE:
                # The source is an engine of another kind.
                return ReserveFailed(effect.stage, Reason.UNSUPPORTED)
            self._prepared[effect.migration_id] = origin
        return await self._call(lambda: outcomes.reserve(self._core, effect, self._expect))

    def _expect(self, effect: ReserveBlocks) -> tuple[str, ...]:
        return self._copies.expect(effect.migration_id, effect.stage, effect.num_blocks)

    async def free_reservation(self, migration_id: MigrationId) -> None:
        self._copies.forget(migration_id)
        self._prepared.pop(migration_id, None)
        await self._call(lambda: self._core.free_reservation(migration_id))

    async def adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        if whose_prefix(effect.request_id) is not None:
            return await self._adopt_prefix(effect)
        origin = self._prepared.get(effect.migration_id)
        if origin is None:
            return AdoptFailed(Reason.UNSUPPORTED)
        self._copies.forget(effect.migration_id)
        try:
            state = decode_state(effect.state)
        except UNREADABLE:
            return AdoptFailed(Reason.UNSUPPORTED)

        def take_in() -> None:
            self._core.adopt(effect.migration_id, state, effect.num_blocks)
            self._streams[effect.request_id] = _Stream(origin)

        outcome = await self._call(lambda: outcomes.adopt(self._core, effect, take_in))
        if isinstance(outcome, Adopted):
            self._listener.on_adopted(
                origin.frontend_id, effect.request_id, state.num_output_tokens
            )
        return outcome

    async def _adopt_prefix(self, effect: Adopt) -> Adopted | AdoptFailed:
        self._copies.forget(effect.migration_id)
        if len(effect.state) != effect.num_blocks * 8:
            # The source is an engine of another kind.
            return AdoptFailed(Reason.UNSUPPORTED)
        hashes = memoryview(effect.state).cast("q").tolist()
        await self._call(lambda: self._core.adopt_prefix(effect.migration_id, hashes))
        return Adopted()

    # -------------------------------------------------------------------------------- steps

    def _do(self, command: Callable[[], None]) -> None:
        """Run the command between two steps; commands run in the order of the calls."""
        self._commands.append(command)
        self._wake_up()

    def _wake_up(self) -> None:
        """Schedule the queued commands, unless the end of a step will run them."""
        waits = self._wake is not None or self._timer.is_set
        if not waits and not self._is_between_steps and not self._is_closed:
            self._wake = self._loop.call_soon(self._between_steps)

    async def _call(self, command: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._do(run)
        return await future

    def _between_steps(self) -> None:
        """End the step under way, if any, run commands, and begin the next step.

        The listener may add commands at once, in answer to the events of the ended step.
        """
        self._wake = None
        self._is_between_steps = True
        # A step that makes lost time up ends at once.
        due_s = None if self._deadline_s is None else max(self._deadline_s, self._begun_s)
        try:
            if self._core.is_stepping:
                self._num_ended += 1
                self._steps_s += self._step_s
                self._deliver(self._core.end_step())
            while self._commands:
                self._commands.popleft()()
            self._begin_step()
            self._publish_view()
            self._begun_s = _now_s()
            if due_s is not None and self._core.is_stepping:
                self._count_stall(self._begun_s - due_s)
        except Exception as error:
            logger.exception("engine failed")
            self._is_closed = True
            self._listener.on_failure(error)
        self._is_between_steps = False
        if self._commands:
            self._wake_up()

    def _begin_step(self) -> None:
        step = self._core.begin_step()
        self._note_events(step)
        if not self._core.is_stepping:
            # The next step begins with a command that adds work.
            self._deadline_s = None
            return
        now_s = _now_s()
        began_s = now_s if self._deadline_s is None else self._deadline_s
        if now_s - began_s > MAX_LAG_S:
            logger.warning(
                "engine gives up lost time instance=%s lag_s=%.1f",
                self._instance_id,
                now_s - began_s,
            )
            began_s = now_s
        self._deadline_s = began_s + step.duration_s
        self._step_s = step.duration_s
        self._timer.set(self._deadline_s)

    def _count_stall(self, stall_s: float) -> None:
        """Count the time between two steps, unless it was given up."""
        if stall_s <= MAX_LAG_S:
            self._num_followed += 1
            self._stalled_s += stall_s
        if self._begun_s >= self._reported_s + STALLS_INTERVAL_S:
            self._report_stalls()

    def _report_stalls(self) -> None:
        self._reported_s = self._begun_s
        logger.debug(
            "stalls counted instance=%s steps=%d seconds=%.3f following=%d stalled_seconds=%.3f",
            self._instance_id,
            self._num_ended,
            self._steps_s,
            self._num_followed,
            self._stalled_s,
        )

    def _note_events(self, step: Step) -> None:
        for request_ids, kind in (
            (step.preempted, EventType.PREEMPTED),
            (step.admitted, EventType.SCHEDULED),
        ):
            for request_id in request_ids:
                self._streams[request_id].events.append(_event(kind))
        for request_id, num_tokens in zip(step.admitted, step.cached, strict=True):
            self._streams[request_id].num_cached_tokens = num_tokens

    def _deliver(self, tokens: Sequence[Token]) -> None:
        """Send the tokens to their front ends, one batch each."""
        batches: dict[FrontendId, tuple[list[TokenSpan], list[bytes]]] = {}
        for token in tokens:
            frontend_id = self._streams[token.request_id].origin.frontend_id
            spans, payloads = batches.setdefault(frontend_id, ([], []))
            output = self._output(token)
            has_events = bool(output.events)
            spans.append(TokenSpan(token.request_id, token.index, 1, token.is_last, has_events))
            payloads.append(_encode(output))
        for frontend_id, (spans, payloads) in batches.items():
            self._listener.on_outputs(frontend_id, tuple(spans), payloads)

    def _output(self, token: Token) -> engine_messages.Output:
        stream = self._streams[token.request_id]
        origin = stream.origin
        token_id = token_at(origin.key, token.index, self._options.vocabulary)
        output = engine_messages.Output(token.request_id, [token_id])
        if token.index == 0:
            num_cached_tokens = stream.num_cached_tokens
            output.prefill_stats = engine_messages.PrefillStats(
                origin.prompt_tokens,
                origin.prompt_tokens - num_cached_tokens,
                num_cached_tokens,
                num_cached_tokens,
            )
        if stream.events:
            output.events, stream.events = stream.events, []
        if token.is_last:
            is_stopped = origin.stop_token_id is not None
            output.finish_reason = (
                engine_messages.FinishReason.STOP
                if is_stopped
                else engine_messages.FinishReason.LENGTH
            )
            output.stop_reason = origin.stop_token_id
            del self._streams[token.request_id]
        return output

    def _publish_view(self) -> None:
        if self._recorder is not None and (changes := self._recorder.take()) is not None:
            self._listener.on_cache(changes)
        view = self._core.view(self._instance_id, is_terminating=self._is_terminating)
        if view != self._last_view:
            self._last_view = view
            self._listener.on_view(view)


def _encode(output: engine_messages.Output) -> bytes:
    return engine_messages.encode_outputs(
        engine_messages.Outputs(outputs=[output], timestamp=_now_s())
    )


def _event(kind: EventType) -> EngineEvent:
    return EngineEvent(kind, _now_s())


def _now_s() -> float:
    return time.monotonic()
