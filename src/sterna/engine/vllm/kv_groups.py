"""KV cache groups of a vLLM engine: the blocks that requests need, hold, and take along.

`engine.kv_columns` has the columns of a migration; here they are found for vLLM's managers. All
methods run on the engine's thread.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CircularBufferManager,
    FullAttentionManager,
    MambaManager,
    RSWAManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from vllm.v1.request import Request

from sterna.engine.kv_columns import Columns, Held, KvColumns
from sterna.engine.kv_memory import KvGroup, KvMemory
from sterna.transport.shards import Shards
from sterna.types import RequestId

try:
    from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas
except ImportError:
    # Up to vLLM 0.32.
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

MOVABLE = (
    FullAttentionManager,
    SlidingWindowManager,
    ChunkedLocalAttentionManager,
    MambaManager,
)
"""The managers of groups that can move, not those derived from them."""


@dataclass(frozen=True, slots=True)
class _ManagedGroup:
    """The group of a vLLM manager (`kv_columns.ColumnGroup`)."""

    manager: SingleTypeKVCacheManager

    @property
    def block_size(self) -> int:
        return self.manager.block_size

    @property
    def has_state(self) -> bool:
        return isinstance(self.manager, MambaManager)

    @property
    def clears_new_blocks(self) -> bool:
        return self.manager.records_new_block_ids

    def num_skipped_tokens(self, num_valid_tokens: int) -> int:
        return self.manager.get_num_skipped_tokens(num_valid_tokens)


class KvGroups(KvColumns[KVCacheBlock]):
    """The groups of one engine.

    Attributes:
        memory: the memory that requests need, by vLLM's own admission test.
        unit_bytes: bytes of a unit in all positional groups, on one rank.
        state_bytes: bytes of a request's states, on one rank.
    """

    def __init__(self, coordinator: KVCacheCoordinator, config: KVCacheConfig) -> None:
        self._managers = coordinator.single_type_managers
        self._config = config
        super().__init__(
            [_ManagedGroup(each) for each in self._managers],
            coordinator.block_pool,
            coordinator.scheduler_block_size,
        )
        self.memory = _memory(coordinator)
        self.unit_bytes = self.state_bytes = 0
        for manager, group in zip(self._managers, config.kv_cache_groups, strict=True):
            block_bytes = sum(spec_of(group, name).page_size_bytes for name in group.layer_names)
            if isinstance(manager, MambaManager):
                self.state_bytes += block_bytes
            else:
                self.unit_bytes += block_bytes * self.unit_tokens // manager.block_size

    def shards_of(self, vllm_config: Any) -> Shards:
        """Return which ranks of the engine hold the same blocks."""
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        return Shards(
            num_ranks,
            tuple(
                kv_cache_groups_tp_replicas([group], num_ranks)
                for group in self._config.kv_cache_groups
            ),
        )

    def num_held(self, request_id: str) -> int:
        """The blocks that the request holds in all groups together, without null blocks."""
        return sum(_num_held(each, request_id) for each in self._managers)

    def block_ids(self, request_id: RequestId) -> list[list[int]]:
        """The ids of the request's blocks in each group, column by column; 0 for null blocks."""
        return [
            [block.block_id for block in manager.req_to_blocks.get(request_id, ())]
            for manager in self._managers
        ]

    def ids_at(self, held: Held[KVCacheBlock], columns: Columns) -> list[list[int]]:
        """The ids of the reserved blocks at these columns."""
        return [[block.block_id for block in blocks] for blocks in self.blocks_at(held, columns)]

    def adopt(self, held: Held[KVCacheBlock], request: Request, num_valid_tokens: int) -> None:
        """Give the reserved blocks to the request, whose first tokens have valid KV in them.

        What it does not look at goes back to the pool: it enters neither its tables nor the prefix
        cache.
        """
        tables = self.take_tables(held, num_valid_tokens, request.num_tokens)
        for manager, table in zip(self._managers, tables, strict=True):
            manager.req_to_blocks[request.request_id] = table
            manager.num_cached_block[request.request_id] = 0
            if hasattr(manager, "_allocated_block_reqs"):
                manager._allocated_block_reqs.add(request.request_id)
        self.free(held)


def spec_of(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    """Return the spec of one layer of a KV cache group, whose layers may have several."""
    specs: dict[str, KVCacheSpec] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if specs is None else specs[layer]


def _memory(coordinator: KVCacheCoordinator) -> KvMemory:
    managers = coordinator.single_type_managers
    full = [each.block_size for each in managers if _keeps_all(each)]
    positional = [
        each.block_size for each in managers if isinstance(each.kv_cache_spec, AttentionSpec)
    ]
    block_tokens = min(full or positional or [coordinator.scheduler_block_size])
    return KvMemory(block_tokens, tuple(_group(each) for each in managers))


def _group(manager: Any) -> KvGroup:
    if isinstance(manager, MambaManager):
        num_drafts = manager.num_speculative_blocks
        if manager.mamba_cache_mode != "align":
            return KvGroup(manager.block_size, None, num_drafts)
        # It is admitted with one running state, whatever its length.
        return KvGroup(manager.block_size, 1 + num_drafts, num_drafts)
    if isinstance(manager, CircularBufferManager):
        return KvGroup(manager.block_size, 1)
    return KvGroup(manager.block_size, manager.max_admission_blocks_per_request)


def _keeps_all(manager: SingleTypeKVCacheManager) -> bool:
    """Whether a request keeps the blocks of all of its tokens."""
    return isinstance(manager, FullAttentionManager) and not isinstance(
        manager, CircularBufferManager
    )


def _num_held(manager: SingleTypeKVCacheManager, request_id: str) -> int:
    # `get`, because the mapping is a defaultdict that would keep an empty entry.
    blocks = manager.req_to_blocks.get(request_id, ())
    if isinstance(manager, (RSWAManager, MambaManager)):
        # Null blocks may stand anywhere.
        return sum(not block.is_null for block in blocks)
    if isinstance(manager, FullAttentionManager):
        return len(blocks)
    # Of a window, only the columns behind it are null: a few at the end are looked at.
    num_held = 0
    for block in reversed(blocks):
        if block.is_null:
            break
        num_held += 1
    return num_held
