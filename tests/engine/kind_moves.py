"""Moves of requests between two cores in one process (`kind_cores`), as the migration protocol has
them: in stages, whose pages are gathered and scattered as data planes do it.

All functions run in the cores' process.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bench.kinds.workload import prompt_of

NUM_OUTPUTS = 120

_numbers = itertools.count()


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt_tokens: the length of its prompt.
        special_prompt: makes another prompt of tokens or of their number, as `bench.kinds.prompts`
            has them.
        seed: None for a greedy request, or one whose tokens are drawn by a seed of vLLM's choice.
        is_drawn: whether it is the latter.
        schema: of JSON, which its outputs follow; it then has a `special_prompt`, and comes through
            vLLM's checks as it does in a front end.
        sampling: further settings of vLLM's `SamplingParams`.
    """

    prompt_tokens: int
    special_prompt: Callable[[list[int]], dict[str, Any]] | None = None
    seed: int | None = None
    is_drawn: bool = False
    schema: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """What happens to a request that moves.

    Attributes:
        cuts: the numbers of outputs after which it moves to the other core.
        num_stages: of each move.
        left_out: the group whose pages are not copied.
        loses_drafts: the pages of the layers that draft are lost with each move.
        drops_drafts: the drafts for its next step are left behind.
        is_preempted: its blocks are taken from it a few steps after each move.
    """

    cuts: tuple[int, ...]
    num_stages: int = 1
    left_out: int | None = None
    loses_drafts: bool = False
    drops_drafts: bool = False
    is_preempted: bool = False


@dataclass(frozen=True)
class Said:
    """What became of a request.

    Attributes:
        num_steps: steps in which it was computed, its prompt included.
    """

    token_ids: list[int]
    num_steps: int


def unmoved(cores: list[Any], asked: Asked, num_neighbours: int = 0) -> Said:
    """A request that stays on the first core."""
    with _neighbours(cores[:1], num_neighbours):
        name = f"alone{next(_numbers)}"
        request = add(cores[0], name, asked)
        num_steps = run_until(cores[0], request, NUM_OUTPUTS)
        return Said(list(request.output_token_ids), num_steps)


def preempted(cores: list[Any], asked: Asked, cut: int) -> Said:
    """A request that stays on the first core, whose blocks are taken from it after this number of
    outputs."""
    with _neighbours(cores[:1], 0):
        request = add(cores[0], f"preempted{next(_numbers)}", asked)
        num_steps = run_until(cores[0], request, cut)
        _preempt(cores[0], request)
        num_steps += run_until(cores[0], request, NUM_OUTPUTS - request.num_output_tokens)
        return Said(list(request.output_token_ids), num_steps)


def moved(cores: list[Any], asked: Asked, way: Way, num_neighbours: int = 0) -> Said:
    """A request that moves to the other core, whose free pages hold something else, and back."""
    for core in cores:
        _spoil(core)
    here, there = cores
    with _neighbours(cores, num_neighbours):
        # Each has an id of its own: vLLM's worker keeps the column of a recurrent state of a
        # request that has ended until the next step that computes something.
        name = f"moved{next(_numbers)}"
        request = add(here, name, asked)
        num_steps = 0
        for cut in way.cuts:
            num_steps += run_until(here, request, cut - request.num_output_tokens)
            num_steps += _move(here, there, request, asked, way)
            here, there = there, here
            request = here.scheduler.requests[name]
            if way.is_preempted:
                num_steps += run_until(here, request, 5)
                _preempt(here, request)
        num_steps += run_until(here, request, NUM_OUTPUTS - request.num_output_tokens)
        return Said(list(request.output_token_ids), num_steps)


def moved_from_queue(cores: list[Any], asked: Asked) -> list[int]:
    """A request whose blocks are taken from it before its prompt is computed, and that moves to the
    second core while it queues for others."""
    from sterna.engine.drains import Left
    from sterna.engine.vllm.request_state import RequestState, restore_history
    from sterna.migration.messages import Drain, Mode, Reason
    from sterna.types import MigrationId, RequestId

    here, there = cores
    _spoil(there)
    migration, name = MigrationId("m"), RequestId(f"queues{next(_numbers)}")
    request = add(here, name, asked)
    step(here)
    assert request.num_output_tokens == 0
    _preempt(here, request)
    assert here.scheduler.immovable(request) is None
    reserved = there.scheduler.reserve(
        migration, there.scheduler.groups.stage_columns(0, 0, 0, is_last=True), needs_slot=True
    )
    assert not isinstance(reserved, Reason)
    drain = Drain(migration, name, Mode.LIVE, request.num_preemptions, 0, 0)
    assert isinstance(here.scheduler.begin_drain(drain), Left)
    arriving = _arrive(there, name, asked)
    restore_history(there, arriving, RequestState([], 0, request.num_preemptions))
    there.scheduler.adopt_queuing(migration, arriving)
    here.scheduler.release(name)
    _finish(here)
    run_until(there, arriving, NUM_OUTPUTS)
    assert _is_empty(here)
    assert _is_empty(there)
    return list(arriving.output_token_ids)


def recovered(cores: list[Any], asked: Asked, token_ids: list[int]) -> list[int]:
    """The rest of a request that is sent to the second core behind the outputs of one that died."""
    from sterna.engine.vllm.engine import VllmEngine

    core = cores[1]
    _spoil(core)
    name = f"again{next(_numbers)}"
    request = _arrive(core, name, asked)
    VllmEngine._restore(core, request, token_ids)
    run_until(core, request, NUM_OUTPUTS - len(token_ids))
    assert _is_empty(core)
    return list(request.output_token_ids)[len(token_ids) :]


def _move(here: Any, there: Any, request: Any, asked: Asked, way: Way) -> int:
    """Returns the number of steps that the source made between the stages."""
    from sterna.engine.drains import Left
    from sterna.engine.vllm.request_state import (
        RequestState,
        export_draws,
        import_into_workers,
        restore_history,
    )
    from sterna.migration.messages import Drain, Mode, Reason
    from sterna.types import MigrationId, RequestId

    source, destination = here.scheduler, there.scheduler
    migration, name = MigrationId("m"), RequestId(request.request_id)
    assert source.immovable(request) is None
    num_steps = first = 0
    for _ in range(way.num_stages - 1):
        position = source.progress(name)
        num_units = position.num_full_blocks - first
        if num_units > 0:
            ids = source.groups.block_ids(name)
            # The source decodes on before the stage is gathered.
            num_steps += run_until(here, request, 25)
            columns = source.groups.stage_columns(
                first, num_units, position.num_valid_tokens, is_last=False
            )
            reserved = destination.reserve(migration, columns, needs_slot=False)
            assert not isinstance(reserved, Reason)
            leaving = source.groups.blocks_of(ids, columns, position.num_valid_tokens)
            _copy([here, there], leaving, reserved, way.left_out)
            first += num_units
    position = source.progress(name)
    num_units = position.num_blocks - first + 1
    columns = source.groups.stage_columns(first, num_units, position.num_valid_tokens, is_last=True)
    reserved = destination.reserve(migration, columns, needs_slot=True)
    assert not isinstance(reserved, Reason)
    drain = Drain(migration, name, Mode.LIVE, request.num_preemptions, first, num_units)
    assert isinstance(source.begin_drain(drain), Left)
    assert source.is_drained(name)
    num_valid = request.num_computed_tokens
    assert num_valid == request.num_tokens - 1
    leaving = source.groups.blocks_of(source.groups.block_ids(name), columns, num_valid)
    _copy([here, there], leaving, reserved, way.left_out)
    if way.loses_drafts:
        _lose_drafts(there)
    generator, seed = export_draws(here, request)
    drafts = [] if way.drops_drafts else list(request.spec_token_ids)
    state = RequestState(
        list(request.output_token_ids), num_valid, request.num_preemptions, generator, drafts, seed
    )
    arriving = _arrive(there, name, asked)
    restore_history(there, arriving, state)
    assert destination.can_adopt(migration, num_valid)
    destination.adopt_running(migration, arriving, num_valid, state.draft_token_ids)
    import_into_workers(there, arriving, generator).result()
    source.release(name)
    _finish(here)
    return num_steps


def _copy(cores: list[Any], leaving: Any, reserved: Any, left_out: int | None) -> None:
    import torch

    from sterna.transport.memory.chunks import plan_tiles

    source, destination = map(_cache, cores)
    counts = [len(each) for each in leaving]
    assert all(n <= len(ids) for n, ids in zip(counts, reserved, strict=True))
    for tile in plan_tiles(source.page_bytes, counts, 1 << 20):
        if tile.group == left_out:
            continue
        buffer = torch.empty(tile.num_bytes(source.page_bytes), dtype=torch.uint8)
        source.gather(tile, torch.tensor(leaving[tile.group]), buffer)
        destination.scatter(tile, torch.tensor(reserved[tile.group]), buffer)


def _cache(core: Any) -> Any:
    from sterna.engine.vllm.worker import kv_cache

    return kv_cache(_runner(core))


def _runner(core: Any) -> Any:
    return core.model_executor.driver_worker.worker.model_runner


def _spoil(core: Any) -> None:
    """Fills every page of the core, in which no request is."""
    assert _is_empty(core)
    core.scheduler.kv_cache_manager.reset_prefix_cache()
    for layer in _runner(core).kv_caches:
        for tensor in [layer] if hasattr(layer, "fill_") else layer:
            tensor.fill_(0.75)


def _lose_drafts(core: Any) -> None:
    """Fills the pages of the layers that draft."""
    layers = core.vllm_config.compilation_config.static_forward_context
    for name in _runner(core).drafter._draft_attn_layer_names:
        layers[name].kv_cache.fill_(0.75)


@contextmanager
def _neighbours(cores: Sequence[Any], number: int) -> Iterator[None]:
    """Other requests in the batch of each core; at the end nothing is left on them."""
    names = [f"beside{next(_numbers)}" for _ in range(number)]
    for core in cores:
        for place, name in enumerate(names):
            add(core, name, Asked(50 + 90 * place), max_tokens=800)
    try:
        yield
    except BaseException:
        # The next test finds the cores empty all the same.
        names += [name for core in cores for name in core.scheduler.requests]
        raise
    finally:
        for core in cores:
            core.abort_requests(names)
            _finish(core)
    assert all(map(_is_empty, cores))


@cache
def _processor(core: Any) -> Any:
    from vllm.v1.engine.input_processor import InputProcessor

    return InputProcessor(core.vllm_config)


def _wire(core: Any, name: str, asked: Asked, max_tokens: int = NUM_OUTPUTS) -> Any:
    """The request as it comes from a front end, or with a migration."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine import EngineCoreRequest

    from sterna.engine.vllm.payload import decode_request, encode_request

    sampling = SamplingParams(
        temperature=1.0 if asked.is_drawn or asked.seed is not None else 0.0,
        seed=asked.seed,
        ignore_eos=True,
        max_tokens=max_tokens,
        structured_outputs=None
        if asked.schema is None
        else StructuredOutputsParams(json=asked.schema),
        **asked.sampling,
    )
    token_ids = prompt_of(asked.prompt_tokens)
    if asked.special_prompt is not None:
        prompt = asked.special_prompt(token_ids)
        request = _processor(core).process_inputs(name, prompt, sampling, ("generate",))
        return decode_request(encode_request(request))
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _arrive(core: Any, name: str, asked: Asked) -> Any:
    """The request where it is to go on, with its grammar compiled."""
    request, _ = core.preprocess_add_request(_wire(core, name, asked))
    if request.use_structured_output:
        request.structured_output_request._grammar.result()
    return request


def add(core: Any, name: str, asked: Asked, max_tokens: int = NUM_OUTPUTS) -> Any:
    core.scheduler.kv_cache_manager.reset_prefix_cache()
    request, wave = core.preprocess_add_request(_wire(core, name, asked, max_tokens))
    core.add_request(request, wave)
    return request


def run_until(core: Any, request: Any, num_outputs: int) -> int:
    """Steps until the request has at least this number of further outputs; returns the number of
    steps."""
    num_steps, wanted = 0, request.num_output_tokens + num_outputs
    while request.num_output_tokens < wanted:
        step(core)
        num_steps += 1
    if request.is_finished():
        _finish(core)
    return num_steps


def _preempt(core: Any, request: Any) -> None:
    core.scheduler.running.remove(request)
    core.scheduler._preempt_request(request, 0.0)


def step(core: Any) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state

    kv_transfer_state._KV_CONNECTOR_AGENT = core.kv_connector_of_worker
    _, is_executed = core.step_fn()
    core.post_step(is_executed)


def _finish(core: Any) -> None:
    """Let the worker hear of all ends."""
    for _ in range(3):
        if core.scheduler.has_requests():
            step(core)


def _is_empty(core: Any) -> bool:
    pool = core.scheduler.kv_cache_manager.block_pool
    is_free = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return is_free and not core.scheduler.requests
