"""KV cache groups: what a stage copies and what is adopted, over vLLM's own managers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from sterna.engine.kv_columns import STATE_COLUMN
from sterna.engine.kv_memory import KvGroup
from sterna.engine.vllm.kv_groups import KvGroups, kv_cache_groups_tp_replicas
from sterna.types import RequestId

NUM_BLOCKS = 400
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
R = RequestId("r")


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(block_size: int, size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS)


def chunk(block_size: int, size: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=size, **HEADS)


def state(block_size: int, mode: str = "none") -> MambaSpec:
    return MambaSpec(
        block_size=block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def groups_of(*specs: KVCacheSpec, max_in_flight_tokens: int = 64) -> tuple[KvGroups, Any]:
    """The groups, and vLLM's coordinator."""
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{number}"], each) for number, each in enumerate(specs)
        ],
    )
    return groups_with(config, max_in_flight_tokens)


def groups_with(config: KVCacheConfig, max_in_flight_tokens: int = 64) -> tuple[KvGroups, Any]:
    block_sizes = [each.kv_cache_spec.block_size for each in config.kv_cache_groups]
    coordinator = get_kv_cache_coordinator(
        config,
        max_model_len=1024,
        max_in_flight_tokens=max_in_flight_tokens,
        use_eagle=False,
        enable_caching=False,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*block_sizes),
        hash_block_size=math.gcd(*block_sizes),
    )
    return KvGroups(coordinator, config), coordinator


def latent(block_size: int) -> MLAAttentionSpec:
    """The same on all ranks."""
    return MLAAttentionSpec(block_size=block_size, max_tp_shards=1, **HEADS)


NUM_RANKS = 4


def shards_of(*groups: dict[str, KVCacheSpec], has_drafter: bool = False) -> tuple[int, ...]:
    """For each group of layers, how many ranks hold the same, by the scheduler's configuration as
    vLLM makes it from the workers'."""
    workers = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(16, layers)) for layers in groups
        ],
    )
    workers.kv_tp_replicas = kv_cache_groups_tp_replicas(workers.kv_cache_groups, NUM_RANKS)
    found, _ = groups_with(generate_scheduler_kv_cache_config([workers]))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=NUM_RANKS),
        speculative_config=SimpleNamespace() if has_drafter else None,
    )
    return found.shards_of(config).of_groups


def test_latent_layers_are_the_same_on_all_ranks_and_others_are_split() -> None:
    assert shards_of({"a": latent(16), "b": latent(16)}) == (4,)
    assert shards_of({"a": full(16), "b": full(16)}) == (1,)
    assert shards_of({"a": latent(16)}, {"b": full(16)}) == (4, 1)


def test_a_drafters_split_layers_beside_latent_ones_are_split() -> None:
    """vLLM's scheduler knows such a group by its first layer alone."""
    mixed = {"target": latent(16), "draft": full(16)}
    assert shards_of(mixed, has_drafter=True) == (1,)
    assert shards_of(mixed) == (1,)
    assert shards_of(mixed, {"other": latent(16)}, has_drafter=True) == (1, 1)
    assert shards_of({"target": latent(16), "draft": latent(16)}, has_drafter=True) == (4,)


def test_a_unit_is_a_whole_number_of_blocks_in_every_positional_group() -> None:
    groups, _ = groups_of(window(16, 64), full(48), state(1024))
    assert groups.unit_tokens == 48
    assert [groups.num_units(each) for each in (0, 1, 48, 49)] == [0, 1, 1, 2]


def test_bytes_are_those_of_a_unit_and_of_the_states() -> None:
    """By hand: a token has 2 x 8 values of 4 bytes in a layer, and a state 4 values."""
    groups, _ = groups_of(window(16, 64), full(48), state(1024), state(1024))
    assert groups.unit_bytes == (48 + 48) * 2 * 8 * 4
    assert groups.state_bytes == 2 * 4 * 4


def test_without_positional_groups_there_is_one_unit() -> None:
    groups, _ = groups_of(state(1024))
    assert groups.unit_tokens == 1024


def test_memory_is_counted_in_blocks_of_full_attention() -> None:
    groups, _ = groups_of(window(16, 64), full(32), chunk(16, 64), state(1024))
    assert groups.memory.block_tokens == 32
    # 63 tokens of a window, or 64 of a chunk, and 64 of a step; a window may begin inside a block.
    assert groups.memory.groups == (
        KvGroup(16, 9),
        KvGroup(32),
        KvGroup(16, 8),
        KvGroup(1024),
    )


def test_a_recurrent_state_with_snapshots_is_admitted_with_one_block() -> None:
    groups, _ = groups_of(state(64, "align"), full(64))
    assert groups.memory.groups == (KvGroup(64, 1), KvGroup(64))


def test_a_stage_leaves_out_what_windows_have_left_behind() -> None:
    """Of 200 tokens a window of 64 looks at those from 137 on, a chunk of 64 at those from 192."""
    groups, _ = groups_of(window(16, 64), chunk(16, 64), full(16))
    assert groups.stage_columns(0, 12, 200, is_last=False) == (
        range(8, 12),
        range(12, 12),
        range(12),
    )
    assert groups.stage_columns(12, 2, 210, is_last=True) == (
        range(12, 14),
        range(12, 14),
        range(12, 14),
    )


def test_a_recurrent_state_travels_with_the_last_stage_only() -> None:
    groups, _ = groups_of(state(1024), full(16))
    assert [len(each) for each in groups.stage_columns(0, 3, 50, is_last=False)] == [0, 3]
    columns = groups.stage_columns(3, 2, 55, is_last=True)
    assert list(columns[0]) == [STATE_COLUMN]
    assert list(columns[1]) == [3, 4]


def test_a_last_stage_without_blocks_takes_no_state() -> None:
    """Of a request that queues, or is computed again."""
    groups, _ = groups_of(state(1024), full(16))
    assert [len(each) for each in groups.stage_columns(0, 0, 0, is_last=True)] == [0, 0]


SPECS = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([16, 32])),
        st.builds(window, st.sampled_from([8, 16]), st.integers(2, 90)),
        st.builds(chunk, st.sampled_from([8, 16]), st.sampled_from([32, 48, 64])),
        st.just(state(1024)),
    ),
    min_size=1,
    max_size=4,
)


def test_with_a_state_one_unit_is_left_for_the_last_stage() -> None:
    """Also where the request stands still at the end of a unit: the state travels with a unit."""
    groups, _ = groups_of(state(1024), full(16))
    assert [groups.num_full_units(each) for each in (0, 1, 16, 17, 64, 65)] == [0, 0, 0, 1, 3, 4]
    groups, _ = groups_of(full(16))
    assert [groups.num_full_units(each) for each in (0, 1, 16, 17, 64, 65)] == [0, 0, 1, 1, 4, 4]


def test_a_state_alone_travels_in_one_stage() -> None:
    groups, _ = groups_of(state(64, "align"))
    assert groups.num_full_units(1000) == 0


@settings(max_examples=200, deadline=None)
@given(
    SPECS,
    st.lists(st.integers(1, 90) | st.sampled_from([16, 32, 48, 64]), min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_what_is_adopted_is_what_the_source_still_looks_at(
    specs: list[KVCacheSpec], growths: list[int], late: int
) -> None:
    """Live stages of a request that goes on between them, between two engines of these groups: the
    source finds the columns that the destination has reserved, each page in the table was copied
    while it was valid, nothing else is in it, and no block is lost."""
    here, ours = groups_of(*specs)
    there, theirs = groups_of(*specs)
    num_free = theirs.block_pool.get_num_free_blocks()
    held = there.new_reservation()
    copied: dict[int, int] = {}
    num_tokens, first = 0, 0
    for growth in growths:
        num_tokens = decode(ours, num_tokens, growth)
        num_units = here.num_full_units(num_tokens) - first
        if num_units > 0:
            columns = here.stage_columns(first, num_units, num_tokens, is_last=False)
            ids = here.block_ids(R)
            there.extend(held, columns)
            # The source goes on before it gathers.
            copy(copied, here.blocks_of(ids, columns, num_tokens), there.ids_at(held, columns))
            first += num_units
    num_units = here.num_units(num_tokens) + 1 - first
    columns = here.stage_columns(first, num_units, num_tokens, is_last=True)
    there.extend(held, columns)
    num_tokens = decode(ours, num_tokens, min(late, num_units * here.unit_tokens // 2))
    if here.num_units(num_tokens) > first + num_units:
        return
    # Without units of its own, the last stage is not copied.
    if here.num_units(num_tokens) > first:
        leaving = here.blocks_of(here.block_ids(R), columns, num_tokens)
        copy(copied, leaving, there.ids_at(held, columns))
    assert there.has_all(held, num_tokens)
    request = SimpleNamespace(request_id=R, num_tokens=num_tokens + 1)
    there.adopt(held, request, num_tokens)  # type: ignore[arg-type]

    # By vLLM, what the request no longer looks at is freed before its next step.
    ours.remove_skipped_blocks(R, num_tokens)
    for mine, adopted, spec in zip(here.block_ids(R), there.block_ids(R), specs, strict=True):
        valid = -(-num_tokens // spec.block_size)
        assert [copied.get(block, 0) for block in adopted[:valid]] == mine[:valid]
    num_held = there.num_held(R)
    assert theirs.block_pool.get_num_free_blocks() == num_free - num_held
    theirs.free(R)
    assert theirs.block_pool.get_num_free_blocks() == num_free


def decode(coordinator: Any, num_tokens: int, growth: int) -> int:
    """Allocates as vLLM's scheduler does, one token a step; returns the new length."""
    for length in range(num_tokens, num_tokens + growth):
        coordinator.remove_skipped_blocks(R, length)
        coordinator.allocate_new_blocks(R, length + 1, length + 1)
    return num_tokens + growth


def copy(copied: dict[int, int], leaving: list[list[int]], reserved: list[list[int]]) -> None:
    """Notes which block of the source is in each block of the destination."""
    for sent, received in zip(leaving, reserved, strict=True):
        assert len(sent) <= len(received)
        copied.update(zip(received, sent, strict=False))
