"""State of a migrating request besides its KV cache, and its restoration on the destination.

The request is sent as its front end sent it, and vLLM's own code builds it on the destination as
on the source. The state adds the outputs so far, from which penalties, stop conditions,
`min_tokens` and the grammar's position follow, and what further draws depend on.

**The worker's state** depends on vLLM's model runner. V1 gets a state of the request that was made
here, with the random generator of a seeded request, and takes it for one that missed a step. V2
gets the request with its first step, as vLLM announces one that it resumes after a preemption: all
tokens, all blocks, and the number of tokens that they hold. V2 draws by seed and position, so that
a seed is all there is to carry, also one that vLLM drew itself.
"""

import asyncio
import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class MovingRequest(msgspec.Struct, frozen=True):
    """A request as its front end sent it, for an engine to which it may move.

    Attributes:
        payload: an `EngineCoreRequest` (`payload.encode_request`).
        adapter_digest: of its LoRA adapter's files; None where it has none, or they are not in a
            folder.
    """

    payload: bytes
    adapter_digest: str | None = None

    def encode(self) -> bytes:
        """Return the bytes of `Reserve.request`."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(request: bytes) -> "MovingRequest":
        """Raises msgspec.DecodeError when the bytes are not such a request."""
        return msgspec.msgpack.decode(request, type=MovingRequest)


class RequestState(msgspec.Struct, frozen=True):
    """The state of a drained request.

    Attributes:
        output_token_ids: all outputs so far; every one has been sent to the front end.
        num_valid_tokens: tokens of prompt and output whose KV is copied; 0 for none.
        generator_state: on vLLM's V1 model runner, of a seeded request's random generator.
        seed: on V2, by which the request's tokens are drawn; None where it is not known.
        draft_token_ids: drafts of speculative decoding for the next step. They may be left out:
            that step then says one token.
        weight_updates: that of the engine where the KV is from.
        events: vLLM's events of the request that no output has delivered, as those of its
            preemption while it queues: their kind, and how many seconds ago they were, since each
            machine has a clock of its own.
    """

    output_token_ids: list[int]
    num_valid_tokens: int
    num_preemptions: int
    generator_state: bytes | None = None
    draft_token_ids: list[int] = []
    seed: int | None = None
    weight_updates: str = ""
    events: list[tuple[int, float]] = []

    def encode(self) -> bytes:
        """Return the bytes of `Commit.state`."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(state: bytes) -> "RequestState":
        """Raises msgspec.DecodeError when the bytes are not a request's state."""
        return msgspec.msgpack.decode(state, type=RequestState)


def is_too_long(core: Any, request: Request, num_output_tokens: int) -> bool:
    """Whether the engine has no room for the request's tokens and, when it generates, one more.

    Front ends check the limit of the first instance only. With `--max-model-len auto` each instance
    chooses a limit by its memory, and a request beyond it would end the engine.
    """
    num_next_tokens = 0 if request.pooling_params is not None else 1
    num_tokens = request.num_prompt_tokens + num_output_tokens + num_next_tokens
    return bool(num_tokens > core.scheduler.max_model_len)


def restore_history(core: Any, request: Request, state: RequestState) -> None:
    """Restore the state of the source in a request that was just built.

    Raises:
        ValueError: its grammar did not compile, or refuses the outputs.
    """
    if request.use_structured_output:
        if not core.structured_output_manager.accept_history(request, state.output_token_ids):
            raise ValueError("the grammar refuses the request's own outputs")
    else:
        request.append_output_token_ids(state.output_token_ids)
    if state.output_token_ids:
        # Without outputs the request is a new one here, and vLLM takes a preempted one for known:
        # it would not count its prompt, and not tell the worker of it once a connector has loaded
        # its blocks.
        request.num_preemptions = state.num_preemptions
        # Statistics of the prefill were delivered with the first token.
        request.prefill_stats = None
    now_s = time.monotonic()
    request.events = [
        EngineCoreEvent(EngineCoreEventType(kind), now_s - ago_s) for kind, ago_s in state.events
    ]
    if state.seed is not None and core.scheduler.use_v2_model_runner:
        # The request's parameters are those of the message from its front end, too.
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.seed = state.seed


def export_events(request: Request) -> list[tuple[int, float]]:
    """Return `events` of a request that leaves."""
    now_s = time.monotonic()
    return [(int(event.type), now_s - event.timestamp) for event in request.events]


def is_grammar_ready(request: Request) -> bool:
    """Whether the request's grammar, if it has one, has been compiled.

    Raises:
        ValueError: it cannot be compiled.
    """
    structured = request.structured_output_request
    if structured is None:
        return True
    if not structured.is_grammar_ready:
        return False
    if isinstance(structured.grammar, Exception):
        raise ValueError(f"the grammar does not compile: {structured.grammar}")
    return True


async def until_grammar_ready(request: Request, timeout_s: float | None = None) -> bool:
    """Wait until the request's grammar has been compiled; False after the timeout, if there is one.

    Raises:
        ValueError: it cannot be compiled.
    """
    structured = request.structured_output_request
    grammar = None if structured is None else structured._grammar
    if isinstance(grammar, Future):
        try:
            await asyncio.wait_for(asyncio.wrap_future(grammar), timeout_s)
        except TimeoutError:
            return False
    return is_grammar_ready(request)


def export_draws(core: Any, request: Request) -> tuple[bytes | None, int | None]:
    """Return `generator_state` and `seed` of a request that leaves: what its further draws depend
    on at the workers."""
    params = request.sampling_params
    if params is None or params.sampling_type == SamplingType.GREEDY:
        return None, None
    # Every tensor-parallel rank draws the same numbers.
    if not core.scheduler.use_v2_model_runner:
        if params.seed is None:
            return None, None
        return core.collective_rpc("sterna_export_generator", args=(request.request_id,))[0], None
    if params.seed is not None:
        return None, params.seed
    return None, core.collective_rpc("sterna_drawn_seed", args=(request.request_id,))[0]


def import_into_workers(
    core: Any,
    request: Request,
    generator_state: bytes | None = None,
    *,
    is_continued: bool = False,
) -> Future[Any]:
    """Register a request with a history at the workers, before the next step; see
    `sterna_import_request`.

    Returns a future for its end. To wait for it is to wait for all that the ranks have queued.
    """
    if core.scheduler.use_v2_model_runner:
        # It gets the request with its first step.
        registered: Future[Any] = Future()
        registered.set_result(None)
        return registered
    block_ids = core.scheduler.groups.block_ids(request.request_id)
    registering: Future[Any] = core.model_executor.collective_rpc(
        "sterna_import_request",
        args=(worker_state(request, block_ids), generator_state),
        kwargs={"is_continued": is_continued},
        non_block=True,
    )
    return registering


def announce_with_history(
    output: SchedulerOutput,
    request: Request,
    block_ids: tuple[list[int], ...],
    *,
    uses_mrope: bool,
) -> None:
    """Announce an adopted request to V2 workers in its first step, as vLLM announces a request that
    it resumes after a preemption.

    Args:
        output: of the scheduler, for which the request ran before, so that the workers would be
            told of its new blocks alone.
        block_ids: of each KV cache group, column by column, with those of this step.
    """
    known = output.scheduled_cached_reqs
    index = known.req_ids.index(request.request_id)
    for column in (
        known.req_ids,
        known.new_block_ids,
        known.num_computed_tokens,
        known.num_output_tokens,
    ):
        del column[index]
    output.scheduled_new_reqs.append(
        NewRequestData.from_request(
            request, block_ids, request._all_token_ids, uses_mrope=uses_mrope
        )
    )


def worker_state(request: Request, block_ids: Sequence[list[int]]) -> CachedRequestState:
    """Return a V1 worker's state of a request with a history.

    The generator is restored on the worker, where its device is.

    Args:
        block_ids: of each KV cache group, column by column.
    """
    return CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        pooling_params=None,
        generator=None,
        block_ids=tuple(block_ids),
        num_computed_tokens=request.num_computed_tokens,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )
