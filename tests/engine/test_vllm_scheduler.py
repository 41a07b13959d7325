"""vLLM's scheduler as Sterna's sees it: views of prompts in chunks, and reservations."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from sterna.migration.messages import Reason
from sterna.types import Immovable, InstanceId, MigrationId
from tests.engine.vllm_cores import tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_SIZE = 32
NUM_BLOCKS = 10
MAX_NUM_BATCHED_TOKENS = 64


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM engine core of a tiny random model, stepped by hand."""
    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS + 1,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=4,
        enable_chunked_prefill=True,
    ) as core:
        yield core


def with_scheduler(core: Any, *, max_num_seqs: int = 4, watermark: float = 0.0) -> Any:
    """The core with a scheduler of Sterna's that has seen no request."""
    from sterna.engine.vllm.scheduler import MigratingScheduler

    config = copy.deepcopy(core.vllm_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.watermark = watermark
    core.scheduler = MigratingScheduler(
        vllm_config=config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.hash_block_size,
    )
    return core


def add(core: Any, name: str, prompt_tokens: int, *, output_tokens: int = 8) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    wire_request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[100] * prompt_tokens,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=0,
    )
    core.add_request(*core.preprocess_add_request(wire_request))


def step(core: Any) -> None:
    _, is_executed = core.step_fn()
    core.post_step(is_executed)


def finish(core: Any) -> None:
    """Let the worker hear of all ends."""
    for _ in range(100):
        if not core.scheduler.has_requests():
            return
        step(core)
    raise AssertionError("requests are left")


def test_a_prompt_in_chunks_is_shown_with_the_demand_of_all_of_it(vllm_core: Any) -> None:
    """By hand: with 64 tokens a step, a prompt of 150 takes 5 blocks in the end and holds 2, 4
    and 5 of them after its three steps, the last of which brings its first token."""
    core = with_scheduler(vllm_core)
    add(core, "a", 150)
    held = []
    for _ in range(4):
        step(core)
        (view,) = core.scheduler.view(InstanceId("i0"), False).running
        held.append((view.physical_usage_tokens, view.demand_tokens, view.immovable))
    assert held == [
        (64, 160, Immovable.PREFILLING),
        (128, 160, Immovable.PREFILLING),
        (160, 0, None),
        (160, 0, None),
    ]
    finish(core)


def test_a_preempted_request_is_shown_with_the_demand_of_its_output_too(vllm_core: Any) -> None:
    """By hand: 96 tokens of prompt and 2 of output are 4 blocks; the first chunk holds 2."""
    core = with_scheduler(vllm_core)
    add(core, "a", 96)
    for _ in range(3):
        step(core)
    request = core.scheduler.requests["a"]
    assert request.num_output_tokens == 2
    core.scheduler.running.remove(request)
    core.scheduler._preempt_request(request, 0.0)
    step(core)
    (view,) = core.scheduler.view(InstanceId("i0"), False).running
    assert (view.physical_usage_tokens, view.demand_tokens) == (64, 128)
    assert view.immovable is Immovable.PREFILLING
    step(core)
    (view,) = core.scheduler.view(InstanceId("i0"), False).running
    assert (view.physical_usage_tokens, view.demand_tokens) == (128, 0)
    finish(core)


def test_a_request_that_will_queue_is_reserved_neither_slot_nor_memory(vllm_core: Any) -> None:
    """By hand: a, with the only slot, leaves 5 of 10 blocks free, as many as the watermark."""
    core = with_scheduler(vllm_core, max_num_seqs=1, watermark=0.5)
    add(core, "a", 160)
    step(core)
    step(core)
    step(core)
    scheduler, migration_id = core.scheduler, MigrationId("m")
    assert scheduler.reserve(migration_id, 1, needs_slot=True) is Reason.NO_MEMORY
    assert scheduler.reserve(migration_id, 0, needs_slot=True) == []
    scheduler.free_reservation(migration_id)
    finish(core)
    assert scheduler.reserve(migration_id, 0, needs_slot=True) == []
    add(core, "b", 16)
    step(core)
    assert [each.request_id for each in scheduler.running] == ["b"]
    scheduler.free_reservation(migration_id)
    finish(core)
