"""Moves of requests of each kind of model between two cores in one process.

The stages are those of the migration protocol, and pages are copied as data planes copy them, by
gather and scatter. Engines, protocol and wires together are in tests/cluster.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.tiny_models import KINDS
from tests.engine.kind_cores import KindCore, kind_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

_numbers = itertools.count()

NUM_OUTPUTS = 120
CUTS = (1, 12, 45, 90)
"""Outputs after which a request moves."""


@dataclass(frozen=True)
class Case:
    """One move: the prompt's length, outputs before it, and groups whose pages are left out."""

    prompt_tokens: int
    cut: int
    num_stages: int = 1
    left_out: int | None = None
    seed: int | None = None


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cores(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    folder: Path = tmp_path_factory.mktemp("models") / kind
    with kind_core(kind, folder, num_cores=2) as made:
        yield made


@pytest.mark.parametrize("prompt_tokens", [20, 230])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_request_goes_on_as_if_it_had_not_moved(
    cores: KindCore, prompt_tokens: int, seed: int | None
) -> None:
    expected = cores.run(unmoved, prompt_tokens, seed)
    assert len(set(expected)) > 20
    for cut in CUTS:
        case = Case(prompt_tokens, cut, seed=seed)
        assert cores.run(moved, case) == expected, cut


def test_stages_are_copied_while_windows_move_on(cores: KindCore) -> None:
    expected = cores.run(unmoved, 300, None)
    assert cores.run(moved, Case(300, 20, num_stages=4)) == expected


def test_pages_of_every_group_matter(cores: KindCore, kind: str) -> None:
    """Otherwise the tests above would show nothing."""
    expected = cores.run(unmoved, 230, None)
    for group in range(len(KINDS[kind].groups)):
        assert cores.run(moved, Case(230, 45, left_out=group)) != expected, group


# ------------------------------------------------------------------------- in the cores' process


def unmoved(cores: list[Any], prompt_tokens: int, seed: int | None) -> list[int]:
    request = _add(cores[0], f"alone{next(_numbers)}", prompt_tokens, seed)
    return _run(cores[0], request, NUM_OUTPUTS)


def moved(cores: list[Any], case: Case) -> list[int]:
    """The outputs of a request that moves from the first core to the second, whose free pages
    hold something else."""
    source, destination = cores
    # Each has an id of its own: vLLM's worker keeps the column of a recurrent state of a request
    # that has ended until the next step that computes something.
    name = f"moved{next(_numbers)}"
    request = _add(source, name, case.prompt_tokens, case.seed)
    outputs = _run(source, request, case.cut)
    caches = [_cache(core) for core in cores]
    _spoil(destination, caches[1])
    outputs += _move(source, destination, caches, request, case)
    assert _is_empty(source)
    rest = destination.scheduler.requests[name]
    outputs += _run(destination, rest, NUM_OUTPUTS - len(outputs))
    assert _is_empty(destination)
    return outputs


def _move(source: Any, destination: Any, caches: list[Any], request: Any, case: Case) -> list[int]:
    """Returns the outputs that came between the stages."""
    from sterna.engine.vllm.request_state import (
        RequestState,
        import_into_workers,
        restore_history,
    )
    from sterna.migration.messages import Drain, Mode, Reason
    from sterna.migration.messages import RequestPosition as Position
    from sterna.types import MigrationId, RequestId

    here, there = source.scheduler, destination.scheduler
    migration, name = MigrationId("m"), RequestId(request.request_id)
    outputs: list[int] = []
    first = 0
    for _ in range(case.num_stages - 1):
        position = here.progress(name)
        assert isinstance(position, Position)
        num_units = position.num_full_blocks - first
        if num_units > 0:
            ids = here.groups.block_ids(name)
            # The source decodes on before the stage is gathered.
            outputs += _run(source, request, 25)
            columns = here.groups.stage_columns(
                first, num_units, position.num_valid_tokens, is_last=False
            )
            reserved = there.reserve(migration, columns, needs_slot=False)
            assert not isinstance(reserved, Reason)
            leaving = here.groups.blocks_of(ids, columns, position.num_valid_tokens)
            _copy(caches, leaving, reserved, case.left_out)
            first += num_units
    position = here.progress(name)
    num_units = position.num_blocks - first + 1
    columns = here.groups.stage_columns(first, num_units, position.num_valid_tokens, is_last=True)
    reserved = there.reserve(migration, columns, needs_slot=True)
    assert not isinstance(reserved, Reason)
    here.begin_drain(Drain(migration, name, Mode.LIVE, 0, first, num_units))
    assert here.is_drained(name)
    num_valid = request.num_computed_tokens
    leaving = here.groups.blocks_of(here.groups.block_ids(name), columns, num_valid)
    _copy(caches, leaving, reserved, case.left_out)
    generator = source.collective_rpc("sterna_export_generator", args=(name,))[0]
    state = RequestState(list(request.output_token_ids), num_valid, 0, generator)
    arriving, _ = destination.preprocess_add_request(_wire(name, case.prompt_tokens, case.seed))
    restore_history(destination, arriving, state)
    assert there.can_adopt(migration, num_valid)
    there.adopt_running(migration, arriving, num_valid)
    import_into_workers(destination, arriving, generator)
    here.release(name)
    _finish(source)
    return outputs


def _copy(caches: list[Any], leaving: Any, reserved: Any, left_out: int | None) -> None:
    import torch

    from sterna.transport.memory.chunks import plan_tiles

    source, destination = caches
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

    return kv_cache(core.model_executor.driver_worker.worker.model_runner)


def _spoil(core: Any, cache: Any) -> None:
    """Fills every page of the core, in which no request is."""
    assert _is_empty(core)
    core.scheduler.kv_cache_manager.reset_prefix_cache()
    runner = core.model_executor.driver_worker.worker.model_runner
    for layer in runner.kv_caches:
        for tensor in [layer] if hasattr(layer, "fill_") else layer:
            tensor.fill_(0.75)


def _wire(name: str, prompt_tokens: int, seed: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    temperature = 0.0 if seed is None else 1.0
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[3 + (7 * token) % 500 for token in range(prompt_tokens)],
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=temperature, seed=seed, ignore_eos=True, max_tokens=NUM_OUTPUTS
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _add(core: Any, name: str, prompt_tokens: int, seed: int | None) -> Any:
    core.scheduler.kv_cache_manager.reset_prefix_cache()
    request, wave = core.preprocess_add_request(_wire(name, prompt_tokens, seed))
    core.add_request(request, wave)
    return request


def _run(core: Any, request: Any, num_outputs: int) -> list[int]:
    """Steps until the request has this number of further outputs."""
    begin = request.num_output_tokens
    while request.num_output_tokens - begin < num_outputs:
        _, is_executed = core.step_fn()
        core.post_step(is_executed)
    if request.is_finished():
        _finish(core)
    return list(request.output_token_ids)[begin:]


def _finish(core: Any) -> None:
    for _ in range(3):
        if core.scheduler.has_requests():
            _, is_executed = core.step_fn()
            core.post_step(is_executed)


def _is_empty(core: Any) -> bool:
    pool = core.scheduler.kv_cache_manager.block_pool
    is_free = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return is_free and not core.scheduler.requests
