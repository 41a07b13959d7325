"""Simulated KV cache groups: windows, units and memory are those of vLLM's managers."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import KVCacheSpec

from fault_simulation.engine.engine_kinds import (
    KINDS,
    WHOLE_REQUEST,
    EngineKind,
    SimulatedGroup,
)
from fault_simulation.engine.kv_cache import KvCache
from tests.engine.test_kv_groups import chunk, full, groups_of, state, window

LENGTHS = range(1, 160)
"""Tokens of a request with valid KV: all that a cluster has."""


def spec_of(group: SimulatedGroup) -> KVCacheSpec:
    if group.has_state:
        return state(group.block_size, "none" if group.block_size == WHOLE_REQUEST else "align")
    if group.window is not None:
        return window(group.block_size, group.window)
    if group.chunk is not None:
        return chunk(group.block_size, group.chunk)
    return full(group.block_size)


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.name)
def test_groups_are_as_vllm_has_them(kind: EngineKind) -> None:
    batched = kind.max_num_batched_tokens
    groups, coordinator = groups_of(*map(spec_of, kind.groups), max_in_flight_tokens=batched)
    for group, manager in zip(kind.groups, coordinator.single_type_managers, strict=True):
        skipped = [group.num_skipped_tokens(each) for each in LENGTHS]
        assert skipped == [manager.get_num_skipped_tokens(each) for each in LENGTHS]
    assert kind.memory.block_tokens == groups.memory.block_tokens
    needed = [kind.memory.num_blocks(each) for each in LENGTHS]
    assert needed == [groups.memory.num_blocks(each) for each in LENGTHS]
    assert KvCache(kind, {}).unit_tokens == groups.unit_tokens
