"""The real engine behind `engine.interface.Engine`: vLLM in this process, unpatched.

Its work is split between two threads. The asyncio loop decodes and builds requests, commands
transfers and counts their notices. The step thread carries out all changes of the scheduler and
the worker, as commands between two steps. Neither ever blocks on the other.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
)
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.request import Request, RequestStatus

from sterna.config import TransportConfig
from sterna.engine.drains import DrainOutcome, Left, refused
from sterna.engine.emulated.durations import StepTime
from sterna.engine.interface import (
    EngineActivity,
    EngineFacts,
    EngineListener,
    EngineReady,
    PromptHashing,
)
from sterna.engine.vllm.adapters import Adapters, adapter_number
from sterna.engine.vllm.facts import kv_format
from sterna.engine.vllm.hosted_core import HostedCore, build_core
from sterna.engine.vllm.kv_groups import KvGroups, MovingPrefixes
from sterna.engine.vllm.payload import (
    decode_request,
    decode_utility_call,
    encode_failure,
    encode_request,
    encode_span,
    encode_utility_result,
)
from sterna.engine.vllm.request_state import (
    MovingRequest,
    RequestState,
    export_draws,
    export_events,
    import_into_workers,
    is_too_long,
    restore_history,
    until_grammar_ready,
)
from sterna.engine.vllm.scheduler import MigratingScheduler
from sterna.engine.vllm.step_thread import Pace, StepThread, Views
from sterna.engine.vllm.transfers import Transfers
from sterna.engine.vllm.weight_updates import WeightUpdates
from sterna.errors import InstanceStartError
from sterna.messages.actors import MAX_FRAME_BYTES, TokenSpan
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
    Mode,
    Reason,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.priority_classes import DEFAULT_CLASSES, PriorityClasses
from sterna.types import FrontendId, InstanceId, MigrationId, RequestId, whose_prefix

GRAMMAR_TIMEOUT_S = 10.0
"""How long a move waits at its destination until the request's grammar has been compiled."""

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Leaving:
    """The blocks of a request that migrates away.

    Attributes:
        block_ids: of each KV cache group, column by column.
        state: that of a prefix that moves without a request; it does not change.
    """

    block_ids: list[list[int]]
    num_valid_tokens: int
    state: bytes = b""


class VllmEngine:
    """One vLLM engine core; see `engine.interface.Engine` for the methods.

    Args:
        reports_cache: whether the listener hears of the contents of the prefix cache.
        step_time: how long steps last, in experiments; None: as long as they take.
        num_threads: see `build_core`.
        binds_core: see `build_core`.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        vllm_config: Any,
        transport: TransportConfig,
        listener: EngineListener,
        *,
        classes: PriorityClasses = DEFAULT_CLASSES,
        log_stats: bool = False,
        reports_cache: bool = False,
        step_time: StepTime | None = None,
        num_threads: int | None = None,
        binds_core: bool = False,
    ) -> None:
        self._listener = listener
        self._classes = classes
        self._loop = asyncio.get_running_loop()
        self._transfers = Transfers(
            transport, listener.on_transfer, listener.on_sent, listener.on_failure
        )
        self._reports_cache = reports_cache
        self._views = Views(
            instance_id,
            lambda view: self._to_loop(listener.on_view, view),
            lambda changes: self._to_loop(listener.on_cache, changes),
        )
        self._thread = StepThread(
            lambda: build_core(
                vllm_config,
                log_stats=log_stats,
                num_threads=num_threads,
                binds=binds_core,
            ),
            on_step=self._on_step,
            on_idle_command=self._views.publish,
            on_failure=lambda error: self._to_loop(listener.on_failure, error),
            pace=None if step_time is None else Pace(step_time),
        )
        # Of the step thread: each request as its front end sent it, and the number of its tokens
        # that were delivered.
        self._sent_requests: dict[str, EngineCoreRequest] = {}
        self._num_delivered: dict[str, int] = {}
        self._waiting_drains: list[tuple[Drain, Future[Drained | DrainRefused]]] = []
        self._adapters = Adapters()
        # With `--enable-logging-iteration-details`; vLLM's front end would log its engine's.
        self._iterations: LoggingStatLogger | None = None
        self._weights = WeightUpdates()
        # Of the loop: requests built for migrations that have not committed.
        self._core: HostedCore | None = None
        self._prepared: dict[MigrationId, tuple[Request, EngineCoreRequest]] = {}
        # Requests with a history whose grammar is being compiled.
        self._adding: dict[str, asyncio.Task[None]] = {}
        # Blocks of requests that migrate away, as they last were.
        self._leaving: dict[MigrationId, _Leaving | None] = {}

    # --------------------------------------------------------------------------- life cycle

    async def start(self) -> EngineFacts:
        try:
            await asyncio.wrap_future(self._thread.start())
        except Exception as error:
            raise InstanceStartError(f"vLLM could not start: {error}") from error
        facts = await self._call(self._open_planes)
        self._transfers.start()
        return facts

    def _open_planes(self, core: HostedCore) -> EngineFacts:
        scheduler: MigratingScheduler = core.scheduler
        scheduler.classes = self._classes
        self._views.follow(core)
        self._core = core
        if core.vllm_config.observability_config.enable_logging_iteration_details:
            self._iterations = LoggingStatLogger(core.vllm_config)
        hashing = layout = None
        if self._reports_cache:
            scheduler.report_cache()
        if scheduler.cache_reports is not None:
            layout = scheduler.cache_reports.layout
            algorithm = core.vllm_config.cache_config.prefix_caching_hash_algo
            hashing = PromptHashing(algorithm, layout.hash_tokens)
        # vLLM notices the death of a rank also while nothing is stepped.
        core.model_executor.register_failure_callback(
            lambda: self._to_loop(
                self._listener.on_failure, RuntimeError("a rank of the engine has died")
            )
        )
        with core.unbound():
            core.collective_rpc("sterna_prepare", args=(os.getpid(),))
        # Where features of the engine forbid that KV moves, requests may still migrate to it.
        moves_kv = not scheduler.immovable_features
        page_layouts = ["no page moves"]
        if moves_kv:
            page_layouts = core.collective_rpc("sterna_page_layout")
        label = kv_format(core.vllm_config, page_layouts)
        if moves_kv:
            with core.unbound():
                self._transfers.open(core, scheduler.groups.shards_of(core.vllm_config), label)
        return EngineFacts(
            total_tokens=scheduler.total_tokens,
            ready=EngineReady(core.ready_response(), scheduler.groups.memory, hashing).encode(),
            kv_format=label,
            immovable_features=scheduler.immovable_features,
            cache_layout=layout,
        )

    async def close(self) -> None:
        for adding in self._adding.values():
            adding.cancel()
        await self._transfers.close()
        await asyncio.to_thread(self._thread.close, CLOSE_TIMEOUT_S)

    def set_terminating(self, is_terminating: bool) -> None:
        """Set `is_terminating` of further views."""
        self._views.is_terminating = is_terminating
        self._thread.post(self._views.publish)

    def activity(self) -> EngineActivity:
        return replace(self._thread.activity, weight_updates=self._weights.label)

    # ----------------------------------------------------------------------------- requests

    def add(
        self, frontend_id: FrontendId, payload: bytes, output_token_ids: Sequence[int] = ()
    ) -> None:
        sent_request = decode_request(payload)
        # A step's outputs are sorted by this index, which vLLM's client sets without knowledge of
        # other front ends.
        sent_request.client_index = frontend_id
        assert self._core is not None
        try:
            request, _ = self._core.preprocess_add_request(sent_request)
        except Exception:
            logger.exception("request refused by the engine request=%s", sent_request.request_id)
            self._fail(sent_request, len(output_token_ids))
            return
        if is_too_long(self._core, request, len(output_token_ids)):
            logger.error("request refused, it is too long request=%s", request.request_id)
            self._fail(sent_request, len(output_token_ids))
            return
        if not output_token_ids:
            self._add(sent_request, request, ())
            return
        adding = self._add_with_history(sent_request, request, output_token_ids)
        task = self._adding[request.request_id] = self._loop.create_task(adding)
        task.add_done_callback(lambda _: self._adding.pop(request.request_id, None))

    async def _add_with_history(
        self, sent_request: EngineCoreRequest, request: Request, output_token_ids: Sequence[int]
    ) -> None:
        """Add the request after its grammar was compiled, which has to accept its outputs. As in
        vLLM, this may take any time."""
        try:
            await until_grammar_ready(request)
        except Exception:
            logger.exception("request refused by the engine request=%s", request.request_id)
            self._fail(sent_request, len(output_token_ids))
            return
        self._add(sent_request, request, output_token_ids)

    def _add(
        self, sent_request: EngineCoreRequest, request: Request, output_token_ids: Sequence[int]
    ) -> None:
        num_delivered = len(output_token_ids)

        def add(core: HostedCore) -> None:
            if request.request_id in core.scheduler.requests and not request.resumable:
                logger.error("request refused, its id is taken request=%s", request.request_id)
                return
            if request.lora_request is not None:
                self._adapters.load(core, request.lora_request)
            if output_token_ids:
                self._restore(core, request, output_token_ids)
            else:
                core.add_request(request)
            self._sent_requests[request.request_id] = sent_request
            self._num_delivered[request.request_id] = num_delivered

        def check(future: Future[None]) -> None:
            if future.exception() is not None:
                logger.error("request refused by the engine", exc_info=future.exception())
                self._to_loop(self._fail, sent_request, num_delivered)

        # To load an adapter may take long.
        may_last = request.lora_request is not None
        self._thread.call(add, may_last=may_last).add_done_callback(check)

    @staticmethod
    def _restore(core: HostedCore, request: Request, output_token_ids: Sequence[int]) -> None:
        """Continue a request after outputs of an engine that has died."""
        restore_history(core, request, RequestState(list(output_token_ids), 0, 0))
        # One that a worker cannot register is refused.
        import_into_workers(core, request, is_continued=True).result()
        core.scheduler.add_with_history(request)

    def _fail(self, sent_request: EngineCoreRequest, num_delivered: int) -> None:
        request_id = sent_request.request_id
        span = TokenSpan(RequestId(request_id), num_delivered, 0, True)
        is_pooling = sent_request.pooling_params is not None
        reason = "the engine refused it"
        payload = encode_failure(request_id, reason, is_pooling=is_pooling)
        self._listener.on_outputs(FrontendId(sent_request.client_index), (span,), [payload])

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if (adding := self._adding.pop(request_id, None)) is not None:
                adding.cancel()
        self._thread.post(lambda core: self._abort(core, request_ids))

    def _abort(self, core: HostedCore, request_ids: Sequence[str]) -> None:
        core.abort_requests(list(request_ids))
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._sent_requests.pop(request_id, None)
        self._num_delivered.pop(request_id, None)

    def call_utility(
        self, frontend_id: FrontendId, call_id: int, method: str, payload: bytes, place: int
    ) -> None:
        call = decode_utility_call(payload)

        def answer(output: Any) -> None:
            result = None if output.result is None else output.result.result
            is_done = output.failure_message is None and result is not False
            self._weights.on_call(method, call.args, payload, is_done=is_done)
            encoded = encode_utility_result(call_id, result, output.failure_message)
            self._to_loop(self._listener.on_utility_result, frontend_id, call_id, encoded)

        # The method may take long: it may load weights, for example.
        self._thread.post(
            lambda core: core.call_utility(method, call.args, answer, place), may_last=True
        )

    # ------------------------------------------------------------------------------- source

    def keep_prefix(self, effect: KeepPrefix) -> None:
        self._thread.post(lambda core: core.scheduler.keep_prefix(effect))

    async def inspect(self, migration_id: MigrationId, request_id: RequestId) -> Inspected:
        def inspect(core: HostedCore) -> tuple[Inspected, _Leaving | None]:
            progress = core.scheduler.progress(request_id)
            if progress is not None and whose_prefix(request_id) is not None:
                prefixes: MovingPrefixes = core.scheduler.prefixes
                state = prefixes.export(request_id, self._weights.label)
                table = prefixes.block_ids(request_id)
                return Inspected(progress, b""), _Leaving(table, progress.num_valid_tokens, state)
            sent_request = self._sent_requests.get(request_id)
            if progress is None or sent_request is None:
                return Inspected(None), None
            block_ids = core.scheduler.groups.block_ids(request_id)
            leaving = _Leaving(block_ids, progress.num_valid_tokens)
            if not is_first:
                return Inspected(progress), leaving
            digest = None
            if sent_request.lora_request is not None:
                try:
                    digest = self._adapters.load(core, sent_request.lora_request)
                except Exception:
                    # vLLM may have dropped it while the request queues, and its files be gone.
                    logger.exception("request stays, its adapter is lost request=%s", request_id)
                    return Inspected(replace(progress, is_immovable=True)), None
            moving = MovingRequest(encode_request(sent_request), digest)
            return Inspected(progress, moving.encode()), leaving

        # Embeddings of images are large: they are encoded once.
        is_first = self._leaving.get(migration_id) is None
        # The migration may end, and be forgotten, while this is under way.
        self._leaving.setdefault(migration_id, None)
        inspected, leaving = await self._call(inspect)
        if leaving is not None and migration_id in self._leaving:
            self._leaving[migration_id] = leaving
        return inspected

    async def drain(self, effect: Drain) -> Drained | DrainRefused:
        if whose_prefix(effect.request_id) is not None:
            # It is in no step.
            leaving = self._leaving[effect.migration_id]
            assert leaving is not None
            return Drained(len(leaving.block_ids[0]), leaving.state)

        def drain(core: HostedCore) -> Future[Drained | DrainRefused]:
            future: Future[Drained | DrainRefused] = Future()
            outcome: DrainOutcome = core.scheduler.begin_drain(effect)
            if not isinstance(outcome, Left):
                future.set_result(refused(outcome))
                return future
            if self._transfers.is_open and _copies_kv(effect, outcome) and _queues_steps(core):
                # The request is in no step that is queued after this. The answer is not
                # read: to wait for it is to wait for all that the ranks have queued.
                core.model_executor.collective_rpc(
                    "sterna_mark_steps", args=(effect.migration_id,), non_block=True
                )
            if core.scheduler.is_drained(effect.request_id):
                future.set_result(self._export(core, effect))
            else:
                self._waiting_drains.append((effect, future))
            return future

        return await asyncio.wrap_future(await self._call(drain))

    def _export(self, core: HostedCore, effect: Drain) -> Drained | DrainRefused:
        scheduler: MigratingScheduler = core.scheduler
        request = scheduler.drained_request(effect.request_id)
        if request is None:
            return DrainRefused(Reason.REQUEST_FINISHED)
        has_kv = request.status == RequestStatus.RUNNING and effect.mode is not Mode.RECOMPUTE
        num_valid_tokens = request.num_computed_tokens if has_kv else 0
        generator_state, seed = export_draws(core, request)
        state = RequestState(
            output_token_ids=list(request.output_token_ids),
            num_valid_tokens=num_valid_tokens,
            num_preemptions=request.num_preemptions,
            generator_state=generator_state,
            draft_token_ids=list(request.spec_token_ids),
            seed=seed,
            weight_updates=self._weights.label,
            events=export_events(request),
        )
        block_ids = scheduler.groups.block_ids(RequestId(effect.request_id))
        self._leaving[effect.migration_id] = _Leaving(block_ids, num_valid_tokens)
        return Drained(scheduler.groups.num_units(num_valid_tokens), state.encode())

    def resume(self, request_id: RequestId) -> None:
        if whose_prefix(request_id) is not None:
            return
        self._thread.post(lambda core: core.scheduler.resume(request_id))

    def release(self, request_id: RequestId) -> None:
        def release(core: HostedCore) -> None:
            if whose_prefix(request_id) is not None:
                core.scheduler.prefixes.release(request_id)
                return
            core.scheduler.release(request_id)
            self._forget(request_id)

        self._thread.post(release)

    def copy(self, effect: CopyBlocks) -> None:
        assert self._core is not None
        leaving = self._leaving[effect.migration_id]
        assert leaving is not None
        groups: KvGroups = self._core.scheduler.groups
        columns = groups.stage_columns(
            effect.first_block,
            effect.num_blocks,
            effect.num_valid_tokens,
            is_last=effect.is_last,
        )
        self._transfers.send(
            effect.migration_id,
            effect.stage,
            groups.blocks_of(leaving.block_ids, columns, leaving.num_valid_tokens),
            effect.receivers,
            is_paced=not effect.is_last,
        )

    def stop_copying(self, migration_id: MigrationId) -> None:
        self._transfers.stop_sending(migration_id)

    def forget_migration(self, migration_id: MigrationId) -> None:
        """Drop the records of a migration that has ended on this side."""
        self._leaving.pop(migration_id, None)
        self._prepared.pop(migration_id, None)

    # -------------------------------------------------------------------------- destination

    async def reserve(self, effect: ReserveBlocks) -> BlocksReserved | ReserveFailed:
        is_prefix = whose_prefix(effect.request_id) is not None
        if effect.request is not None and not is_prefix:
            try:
                refusal = await self._prepare(effect, effect.request)
            except Exception:
                logger.exception("migrating request refused request=%s", effect.request_id)
                refusal = Reason.UNSUPPORTED
            if refusal is not None:
                return ReserveFailed(effect.stage, refusal)
        needs_slot = effect.is_last and not is_prefix
        if needs_slot and not await self._is_grammar_compiled(effect.migration_id):
            return ReserveFailed(effect.stage, Reason.UNSUPPORTED)

        def reserve(core: HostedCore) -> list[list[int]] | Reason:
            has_kv = effect.first_block + effect.num_blocks > 0
            if has_kv and core.scheduler.immovable_features:
                return Reason.UNSUPPORTED
            if is_prefix and not core.scheduler.prefixes.can_move:
                return Reason.UNSUPPORTED
            if effect.request_id in core.scheduler.requests:
                return Reason.DUPLICATE_REQUEST
            if not core.scheduler.may_be_reserved(effect.first_block, effect.num_blocks):
                return Reason.TOO_LONG
            columns = core.scheduler.groups.stage_columns(
                effect.first_block,
                effect.num_blocks,
                effect.num_valid_tokens,
                is_last=effect.is_last,
            )
            prepared = self._prepared.get(effect.migration_id)
            return core.scheduler.reserve(
                effect.migration_id,
                columns,
                needs_slot=needs_slot,
                adapter=None if prepared is None else adapter_number(prepared[0]),
            )

        blocks = await self._call(reserve)
        if isinstance(blocks, Reason):
            return ReserveFailed(effect.stage, blocks)
        if effect.num_blocks == 0:
            blocks = []
        receivers = await self._transfers.expect(
            effect.migration_id, effect.stage, blocks, is_last=effect.is_last
        )
        return BlocksReserved(effect.stage, receivers)

    async def _prepare(self, effect: ReserveBlocks, arriving: bytes) -> Reason | None:
        """Build the arriving request and load its adapter; returns why it cannot be reserved for.

        Raises:
            Exception: the request or its adapter cannot be used here.
        """
        moving = MovingRequest.decode(arriving)
        assert self._core is not None
        sent_request = decode_request(moving.payload)
        request, _ = self._core.preprocess_add_request(sent_request)
        if (adapter := sent_request.lora_request) is not None:

            def load(core: HostedCore) -> Reason | None:
                if effect.num_blocks and not core.scheduler.has_place_for(adapter.lora_int_id):
                    return Reason.NO_ADAPTER_SLOT
                self._adapters.load_equal(core, adapter, moving.adapter_digest)
                return None

            refusal: Reason | None = await self._call(load, may_last=True)
            if refusal is not None:
                return refusal
        self._prepared[effect.migration_id] = (request, sent_request)
        return None

    async def _is_grammar_compiled(self, migration_id: MigrationId) -> bool:
        prepared = self._prepared.get(migration_id)
        if prepared is None:
            return False
        try:
            return await until_grammar_ready(prepared[0], GRAMMAR_TIMEOUT_S)
        except Exception:
            logger.exception("grammar of a migrating request failed migration=%s", migration_id)
            return False

    async def free_reservation(self, migration_id: MigrationId) -> None:
        await self._transfers.stop(migration_id)
        self._prepared.pop(migration_id, None)
        await self._call(lambda core: core.scheduler.free_reservation(migration_id))

    async def adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        prepared = self._prepared.get(effect.migration_id)
        is_prefix = whose_prefix(effect.request_id) is not None
        if prepared is None and not is_prefix:
            return AdoptFailed(Reason.UNSUPPORTED)
        if self._transfers.is_expecting(effect.migration_id):
            # A stage that was given up must no longer write to the request's blocks.
            await self._transfers.stop(effect.migration_id)

        def adopt(core: HostedCore) -> Adopted | AdoptFailed:
            if prepared is not None:
                return self._adopt(core, effect, *prepared)
            is_adopted = core.scheduler.adopt_prefix(
                effect.migration_id, effect.state, self._weights.label
            )
            return Adopted() if is_adopted else AdoptFailed(Reason.UNSUPPORTED)

        outcome: Adopted | AdoptFailed = await self._call(adopt)
        return outcome

    def _adopt(
        self,
        core: HostedCore,
        effect: Adopt,
        request: Request,
        sent_request: EngineCoreRequest,
    ) -> Adopted | AdoptFailed:
        scheduler: MigratingScheduler = core.scheduler
        if effect.request_id in scheduler.requests:
            return AdoptFailed(Reason.DUPLICATE_REQUEST)
        try:
            state = RequestState.decode(effect.state)
            if is_too_long(core, request, len(state.output_token_ids)):
                logger.warning("migrating request too long request=%s", effect.request_id)
                return AdoptFailed(Reason.TOO_LONG)
            restore_history(core, request, state)
            if state.num_valid_tokens not in (0, request.num_tokens - 1):
                raise ValueError(
                    f"{state.num_valid_tokens} of {request.num_tokens} tokens are valid"
                )
        except Exception:
            logger.exception("migrating request not restored request=%s", effect.request_id)
            return AdoptFailed(Reason.UNSUPPORTED)
        if state.num_valid_tokens:
            if state.weight_updates != self._weights.label:
                return AdoptFailed(Reason.OTHER_WEIGHTS)
            if not scheduler.can_adopt(effect.migration_id, state.num_valid_tokens):
                logger.error("migrating request lacks blocks request=%s", effect.request_id)
                return AdoptFailed(Reason.UNSUPPORTED)
            scheduler.adopt_running(
                effect.migration_id, request, state.num_valid_tokens, state.draft_token_ids
            )
        else:
            scheduler.adopt_queuing(effect.migration_id, request)
        if state.output_token_ids:
            registering = import_into_workers(core, request, state.generator_state)
            registering.add_done_callback(self._check_registered)
        self._sent_requests[effect.request_id] = sent_request
        first_index = self._num_delivered[effect.request_id] = len(state.output_token_ids)
        # Queued from this thread, so that it precedes the outputs of any further step.
        frontend_id = FrontendId(request.client_index)
        self._to_loop(self._listener.on_adopted, frontend_id, effect.request_id, first_index)
        return Adopted()

    def _check_registered(self, registering: Future[Any]) -> None:
        """An adopted request that a rank does not have is a failure of the engine: its next step
        would fail, or wait for ever for that rank."""
        if (error := registering.exception()) is not None:
            self._to_loop(self._listener.on_failure, error)

    # -------------------------------------------------------------------------- step thread

    def _on_step(self, core: HostedCore, outputs: dict[int, Any]) -> None:
        for client_index, client_outputs in outputs.items():
            stats = client_outputs.scheduler_stats
            if self._iterations is not None and stats is not None:
                self._iterations._log_iteration_details(stats, core.engine_index)
            spans = tuple(self._span(output) for output in client_outputs.outputs)
            if spans:
                self._to_loop(self._deliver, FrontendId(client_index), spans, client_outputs)
        if self._waiting_drains:
            self._export_drained(core)
        self._views.on_step_end(core)

    def _span(self, output: Any) -> TokenSpan:
        request_id = output.request_id
        first_index = self._num_delivered.get(request_id, 0)
        num_tokens = len(output.new_token_ids)
        if output.finished:
            self._forget(request_id)
        else:
            self._num_delivered[request_id] = first_index + num_tokens
        return TokenSpan(
            RequestId(request_id),
            first_index,
            num_tokens,
            output.finished,
            has_events=bool(output.events),
        )

    def _export_drained(self, core: HostedCore) -> None:
        waiting, self._waiting_drains = self._waiting_drains, []
        for effect, future in waiting:
            if not core.scheduler.is_drained(effect.request_id):
                self._waiting_drains.append((effect, future))
            elif future.set_running_or_notify_cancel():
                future.set_result(self._export(core, effect))

    # --------------------------------------------------------------------------------- loop

    def _deliver(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], outputs: EngineCoreOutputs
    ) -> None:
        parts = [
            encode_span(span, output, MAX_FRAME_BYTES, outputs.weight_version)
            for span, output in zip(spans, outputs.outputs, strict=True)
        ]
        for (sent, _), span in zip(parts, spans, strict=True):
            if sent is not span:
                logger.error("answer is too large to be sent request=%s", span.request_id)
                self.abort([span.request_id])
        self._listener.on_outputs(frontend_id, tuple(s for s, _ in parts), [p for _, p in parts])

    async def _call(self, command: Any, *, may_last: bool = False) -> Any:
        return await asyncio.wrap_future(self._thread.call(command, may_last=may_last))

    def _to_loop(self, function: Any, *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _copies_kv(drain: Drain, left: Left) -> bool:
    """Whether the migration copies blocks of the request that has left."""
    return not left.was_queuing and drain.mode is not Mode.RECOMPUTE


def _queues_steps(core: HostedCore) -> bool:
    """Whether steps may still be under way when the next command runs."""
    return bool(core.vllm_config.device_config.device_type == "cuda")
