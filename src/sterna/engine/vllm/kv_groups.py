"""KV cache groups of a vLLM engine: the blocks that requests need, hold, and take along.

`engine.kv_columns` has the columns of a migration; here they are found for vLLM's managers. All
methods run on the engine's thread.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
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

from sterna.engine.cache_changes import CacheChanges, CacheRecorder
from sterna.engine.drains import position_of_prefix
from sterna.engine.kv_columns import Columns, Held, KvColumns
from sterna.engine.kv_memory import KvGroup, KvMemory
from sterna.errors import UNREADABLE
from sterna.migration.messages import KeepPrefix, RequestPosition
from sterna.transport.shards import Shards
from sterna.types import CacheGroup, CacheLayout, RequestId, cache_key, unpacked

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
        replicas = [
            kv_cache_groups_tp_replicas([group], num_ranks)
            for group in self._config.kv_cache_groups
        ]
        if len(replicas) == 1 or vllm_config.speculative_config is not None:
            # The scheduler knows a group by its first layer, and a drafter's layers in the same
            # group may be split among the ranks. vLLM's own number is from all layers. Where
            # another group has lowered it, ranks send what one could have sent for all.
            replicas = [math.gcd(each, self._config.kv_tp_replicas) for each in replicas]
        return Shards(num_ranks, tuple(replicas))

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


class _RecordedBlocks(BlockHashToBlockMap):
    """The blocks that vLLM's prefix cache finds, by hash and group; tells what it gets and loses.

    A hash may have several blocks; it is lost with the last one.
    """

    def __init__(self, recorder: CacheRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        # vLLM's keys by those that are reported.
        self._keys: dict[int, Any] = {}

    def insert(self, key: Any, block: KVCacheBlock) -> None:
        super().insert(key, block)
        self._keys[_cache_key(key)] = key
        self._recorder.add(_cache_key(key))

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        popped = super().pop(key, block_id)
        if popped is not None and self.get_one_block(key) is None:
            self._keys.pop(_cache_key(key), None)
            self._recorder.remove(_cache_key(key))
        return popped

    def find(self, reported_key: int) -> KVCacheBlock | None:
        """The block that was reported under this key, if it is still here."""
        key = self._keys.get(reported_key)
        return None if key is None else self.get_one_block(key)


class CacheReports:
    """Tells what an engine's prefix cache, which is still empty, gets and loses from now on.

    Args:
        moves: whether the engine copies prefixes to others.

    Attributes:
        layout: how to look prompts up in it.
    """

    def __init__(self, coordinator: KVCacheCoordinator, *, moves: bool = False) -> None:
        self._pool = coordinator.block_pool
        self._recorder = CacheRecorder()
        self.layout = _cache_layout(coordinator, moves)
        self._follow()

    def _follow(self) -> None:
        self._blocks = _RecordedBlocks(self._recorder)
        self._pool.cached_block_hash_to_block = self._blocks

    def on_reset(self) -> None:
        """The cache was to be emptied, which vLLM does by putting another in its place."""
        if self._pool.cached_block_hash_to_block is not self._blocks:
            self._recorder.clear()
            self._follow()

    def take_changes(self) -> CacheChanges | None:
        """Return the changes since the last call, or None without any."""
        return self._recorder.take()

    def find(self, reported_key: int) -> KVCacheBlock | None:
        """The block that was reported under this key, if it is still here."""
        return self._blocks.find(reported_key)


class _PrefixState(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a prefix's blocks.

    Attributes:
        first_token: the first token of the first block.
        keys: vLLM's keys of the blocks, in order.
        weight_updates: that of the engine where they are from.
    """

    first_token: int
    keys: list[bytes]
    weight_updates: str


@dataclass(frozen=True, slots=True)
class _KeptPrefix:
    blocks: list[KVCacheBlock]
    first_token: int
    num_idle_blocks: int


class MovingPrefixes:
    """Prefixes that leave one engine's prefix cache for another's (`KeepPrefix`).

    Only those of engines with one KV cache group move, whose requests keep all of their blocks.
    """

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        self._pool = coordinator.block_pool
        managers = coordinator.single_type_managers
        self._block_tokens = managers[0].block_size if managers else 1
        self.can_move = len(managers) == 1 and _keeps_all(managers[0])
        self._kept: dict[RequestId, _KeptPrefix] = {}

    @property
    def are_kept(self) -> bool:
        """Whether any are leaving."""
        return bool(self._kept)

    @property
    def num_blocks(self) -> int:
        """Blocks that no request held when they were kept."""
        return sum(each.num_idle_blocks for each in self._kept.values())

    def keep(
        self, effect: KeepPrefix, reports: CacheReports, being_computed: Container[int]
    ) -> None:
        """Carry out `KeepPrefix`; prefixes can move.

        Args:
            being_computed: ids of blocks that steps in flight write to. vLLM finds them already.
        """
        hashes = unpacked(effect.block_hashes)
        hashes_a_block = self._block_tokens // self._pool.hash_block_size
        blocks: list[KVCacheBlock] = []
        for end in range(hashes_a_block, len(hashes) + 1, hashes_a_block):
            block = reports.find(cache_key(hashes[end - 1], 0))
            if block is None or block.block_id in being_computed:
                break
            blocks.append(block)
        first_block = effect.first_token // self._block_tokens
        blocks = blocks[first_block:]
        if not blocks:
            return
        num_idle = sum(each.ref_cnt == 0 for each in blocks)
        self._pool.touch(blocks)
        first_token = first_block * self._block_tokens
        self._kept[effect.request_id] = _KeptPrefix(blocks, first_token, num_idle)

    def position(self, prefix_id: RequestId) -> RequestPosition | None:
        """The position of a kept prefix."""
        kept = self._kept.get(prefix_id)
        return None if kept is None else position_of_prefix(len(kept.blocks), self._block_tokens)

    def block_ids(self, prefix_id: RequestId) -> list[list[int]]:
        """The ids of its blocks, as `KvGroups.block_ids` has those of a request."""
        return [[each.block_id for each in self._kept[prefix_id].blocks]]

    def export(self, prefix_id: RequestId, weight_updates: str) -> bytes:
        """The contents of its blocks.

        Args:
            weight_updates: that of this engine.
        """
        kept = self._kept[prefix_id]
        keys = [bytes(each.block_hash) for each in kept.blocks if each.block_hash is not None]
        return msgspec.msgpack.encode(_PrefixState(kept.first_token, keys, weight_updates))

    def release(self, prefix_id: RequestId) -> None:
        """Free the prefix, if it is kept; its blocks can still be found."""
        kept = self._kept.pop(prefix_id, None)
        if kept is not None:
            self._pool.free_blocks(reversed(kept.blocks))

    def enter(self, held: Held[KVCacheBlock], state: bytes, weight_updates: str) -> bool:
        """Have the first reserved blocks be found as what `export` returned; the reservation is
        still to be freed. Returns whether that is possible.

        Args:
            weight_updates: that of this engine.
        """
        try:
            found = msgspec.msgpack.decode(state, type=_PrefixState)
        except UNREADABLE:
            return False
        if found.weight_updates != weight_updates:
            return False
        blocks = held[0]
        if not self.can_move or any(place not in blocks for place in range(len(found.keys))):
            return False
        if self._pool.enable_caching:
            for place, key in enumerate(found.keys):
                num_tokens = found.first_token + (place + 1) * self._block_tokens
                self._pool._insert_block_hash(key, blocks[place], num_tokens=num_tokens)
        return True


def _cache_key(key: Any) -> int:
    return cache_key(short_hash(get_block_hash(key)), get_group_id(key))


def short_hash(block_hash: bytes) -> int:
    """Return 64 bits of one of vLLM's chained block hashes.

    The hash of a block of several hash units is the concatenation of theirs. Its end is the hash of
    its last unit, which stands for all tokens before.
    """
    return int.from_bytes(block_hash[-8:], "little")


def _cache_layout(coordinator: KVCacheCoordinator, moves: bool) -> CacheLayout:
    hash_tokens = coordinator.block_pool.hash_block_size
    is_fine = coordinator.enable_partial_hash_hits
    alignment_tokens = hash_tokens if is_fine else coordinator.scheduler_block_size
    groups = [
        CacheGroup(
            index,
            each.block_size,
            _num_last_blocks(each),
            _chunk_tokens(each),
            _dropped_tokens(each, alignment_tokens),
        )
        for index, each in enumerate(coordinator.single_type_managers)
        if each.kv_cache_spec.prefix_cacheable
    ]
    return CacheLayout(hash_tokens, alignment_tokens, tuple(groups), moves)


def _dropped_tokens(manager: Any, alignment_tokens: int) -> int:
    """Of what is found, the end that vLLM drops for drafts: a block, or a hash where hits end
    inside blocks. The state at a hit's end is its own; drafters have none."""
    is_dropped = manager.use_eagle and not isinstance(manager, MambaManager)
    return min(manager.block_size, alignment_tokens) if is_dropped else 0


def _num_last_blocks(manager: Any) -> int | None:
    if isinstance(manager, MambaManager):
        return 1
    if isinstance(manager, SlidingWindowManager):
        num_blocks = -(-(manager.sliding_window - 1) // manager.block_size)
        return int(num_blocks + manager.use_eagle)
    return None


def _chunk_tokens(manager: Any) -> int:
    is_chunked = isinstance(manager, ChunkedLocalAttentionManager)
    return int(manager.attention_chunk_size) if is_chunked else 0


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
