"""Loads of models with several KV cache groups, against vLLM's own allocator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.tiny_models import KINDS
from sterna.types import InstanceId, InstanceView, MigrationId, RequestStatus
from tests.engine.kind_cores import PLAIN_KINDS, KindCore, kind_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_STEPS = 2000
LENGTHS = (250, 20, 270, 20, 280, 20, 600, 20)
"""Of prompts; each request generates 200 tokens more."""

NUM_BLOCKS = {
    "llama": 48,
    "fp8_kv": 48,
    "gemma3": 52,
    "gpt_oss": 52,
    "llama4": 60,
    "deepseek": 90,
    "granite4": 40,
    "qwen3_next": 30,
    "qwen2_vl": 48,
}
"""Pools that hold the longest request, and not all of them."""


@pytest.fixture(scope="module", params=PLAIN_KINDS)
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A small pool, in which requests queue and are preempted."""
    folder: Path = tmp_path_factory.mktemp("models") / request.param
    options = {"num_gpu_blocks_override": NUM_BLOCKS[request.param], "max_model_len": 816}
    with kind_core(request.param, folder, **options) as made:
        yield made


def test_groups_are_those_of_the_kind(core: KindCore, request: pytest.FixtureRequest) -> None:
    assert core.run(names_of_groups) == KINDS[request.node.callspec.params["core"]].groups


def test_what_views_count_is_what_vllm_has_allocated(core: KindCore) -> None:
    """At each step of requests that are prefilled in chunks, decode, queue and are preempted."""
    seen = core.run(compare_at_each_step)
    assert seen["running"] > 0
    assert seen["queuing"] > 0
    assert seen["preempted"] > 0
    assert seen["reserved"] > 0


def test_its_profile_has_the_memory_that_it_has(core: KindCore) -> None:
    """Also where blocks of its groups have several lengths, and lie in one allocation."""
    emulated_tokens, total_tokens, block_bytes, allocated_bytes, watermarks = core.run(profiled)
    assert emulated_tokens == total_tokens
    assert block_bytes == allocated_bytes
    assert watermarks == [1, 2, 3, 0]


def test_its_profile_has_a_prefix_cache_where_an_emulated_engine_can_have_one(
    core: KindCore, request: pytest.FixtureRequest
) -> None:
    """That of models with one group that keeps all blocks, and only where the engine has one."""
    kind = request.node.callspec.params["core"]
    assert core.run(profiled_caching) == (kind in ("llama", "fp8_kv", "qwen2_vl"), False)


def profiled_caching(core: Any) -> tuple[bool, bool]:
    """Whether the profile has a prefix cache: as the core is, and were the core's off."""
    from sterna.engine.vllm.step_timing import ProfiledEngine

    engine = ProfiledEngine.__new__(ProfiledEngine)
    engine.core, cache_config = core, core.scheduler.cache_config
    found = engine.emulated().prefix_caching
    is_on = cache_config.enable_prefix_caching
    cache_config.enable_prefix_caching = False
    without = engine.emulated().prefix_caching
    cache_config.enable_prefix_caching = is_on
    return found, without


def profiled(core: Any) -> tuple[int, int, int, int, list[int]]:
    """The memory in tokens of the profile and of the core, a block's bytes of both, and the
    profile's watermarks where vLLM's is 1, 2, 3 and 0 blocks."""
    from sterna.engine.vllm.step_timing import ProfiledEngine

    engine = ProfiledEngine.__new__(ProfiledEngine)
    engine.core = core
    (num_bytes,) = core.model_executor.collective_rpc(allocated_bytes)
    num_blocks = core.scheduler.kv_cache_config.num_blocks
    found = engine.emulated().total_tokens, engine.total_tokens
    manager, watermarks = core.scheduler.kv_cache_manager, []
    for num_blocks_kept in (1, 2, 3, 0):
        manager.watermark_blocks = num_blocks_kept
        watermarks.append(engine.emulated().watermark_blocks)
    return *found, engine.block_bytes, num_bytes // num_blocks, watermarks


def allocated_bytes(worker: Any) -> int:
    """The memory that the tensors of the KV cache share."""
    parts = [
        each if isinstance(each, list | tuple) else [each]
        for each in worker.worker.model_runner.kv_caches
    ]
    storages = [part.untyped_storage() for each in parts for part in each]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def names_of_groups(core: Any) -> tuple[str, ...]:
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    return tuple(type(each).__name__ for each in managers)


def compare_at_each_step(core: Any) -> dict[str, int]:
    """Counts what was compared; raises AssertionError where a view is wrong."""
    from tests.engine.test_vllm_scheduler import step

    scheduler = core.scheduler
    seen = dict.fromkeys(("running", "queuing", "preempted", "reserved"), 0)
    for number, num_tokens in enumerate(LENGTHS):
        add(core, f"r{number}", number, num_tokens, max_tokens=200)
    for number in range(MAX_STEPS):
        if not scheduler.has_requests():
            break
        if number in (2, 40):
            # Refused where the pool is full.
            columns = scheduler.groups.stage_columns(0, 1, 1, is_last=True)
            scheduler.reserve(MigrationId("m"), columns, needs_slot=False)
        if number == 60:
            scheduler.free_reservation(MigrationId("m"))
        step(core)
        view = scheduler.view(InstanceId("i0"), False)
        compare(core, view)
        seen["running"] += len(view.running)
        seen["queuing"] += len(view.queuing)
        seen["preempted"] += sum(each.num_preemptions > 0 for each in view.queuing)
        seen["reserved"] += view.reserved_tokens
    assert not scheduler.requests
    assert scheduler.view(InstanceId("i0"), False).total_tokens == free_tokens(scheduler)
    return seen


def compare(core: Any, view: InstanceView) -> None:
    scheduler = core.scheduler
    block_tokens = scheduler.groups.memory.block_tokens
    num_used = sum(each.physical_usage_tokens for each in view.running) // block_tokens
    num_used += view.reserved_tokens // block_tokens
    pool = scheduler.kv_cache_manager.block_pool
    # No two requests share a prefix.
    assert view.shared_tokens == 0
    assert num_used == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    for each in view.queuing:
        assert each.status is RequestStatus.QUEUING
        assert each.physical_usage_tokens == 0
        assert each.demand_tokens == block_tokens * blocks_to_admit(scheduler, each.num_tokens)
    for each in view.running:
        if each.demand_tokens:
            assert each.demand_tokens == block_tokens * blocks_to_admit(scheduler, each.num_tokens)


def blocks_to_admit(scheduler: Any, num_tokens: int) -> int:
    """By the test with which vLLM admits a request without hits in the prefix cache."""
    coordinator = scheduler.kv_cache_manager.coordinator
    num_blocks: int = coordinator.get_num_blocks_to_allocate(
        request_id="unknown",
        num_tokens=num_tokens,
        new_computed_blocks=tuple(() for _ in coordinator.single_type_managers),
        num_encoder_tokens=0,
        total_computed_tokens=0,
        num_local_computed_tokens=0,
        num_tokens_main_model=num_tokens,
        apply_admission_cap=True,
        prefill_end=num_tokens,
    )
    # Mamba's manager makes an entry for what it is asked.
    for manager in coordinator.single_type_managers:
        manager.req_to_blocks.pop("unknown", None)
    return num_blocks


def free_tokens(scheduler: Any) -> int:
    pool = scheduler.kv_cache_manager.block_pool
    num_free: int = pool.get_num_free_blocks() - scheduler.kv_cache_manager.watermark_blocks
    return num_free * int(scheduler.groups.memory.block_tokens)


def add(core: Any, name: str, seed: int, num_tokens: int, **settings: Any) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[3 + (7 * token + 31 * seed) % 500 for token in range(num_tokens)],
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True, **settings),
        pooling_params=None,
        arrival_time=float(seed),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    core.add_request(*core.preprocess_add_request(request))
