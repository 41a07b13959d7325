"""KV cache groups of a vLLM engine: the blocks that requests need, hold, and take along.

A group's block table has a column for each of its blocks of tokens. Columns that a window has left
behind, or that lie between two recurrent states, hold the pool's null block, which takes no
memory. All methods run on the engine's thread.

What a stage copies follows from the request's length when the stage was planned: both sides find
the same columns. A *unit* is what the migration protocol counts as a block: the least number of
tokens that is a whole number of blocks in every positional group. The blocks of **positional**
groups do not change once they are full, and travel in stages; the **state** of a recurrent layer
changes at every step, and travels whole with the last one.
"""

import math
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

from sterna.engine.kv_memory import KvGroup, KvMemory
from sterna.types import RequestId

MOVABLE = (
    FullAttentionManager,
    SlidingWindowManager,
    ChunkedLocalAttentionManager,
    MambaManager,
)
"""The managers of groups that can move, not those derived from them."""

STATE_COLUMN = -1
"""Stands for the column of the running state in a state group."""

Columns = tuple[range, ...]
"""Columns of each group, in order."""

Held = list[dict[int, KVCacheBlock]]
"""The reserved block of each column, for each group."""


class KvGroups:
    """The groups of one engine.

    Attributes:
        memory: the memory that requests need, by vLLM's own admission test.
        unit_tokens: tokens of a unit.
        unit_bytes: bytes of a unit in all positional groups, on one rank.
        state_bytes: bytes of a request's states, on one rank.
    """

    def __init__(self, coordinator: KVCacheCoordinator, config: KVCacheConfig) -> None:
        self._managers = coordinator.single_type_managers
        self._pool = coordinator.block_pool
        self.memory = _memory(coordinator)
        positional = [each.block_size for each in self._managers if not _has_state(each)]
        self._has_positional = len(positional) > 0
        self._has_state = len(positional) < len(self._managers)
        self.unit_tokens = math.lcm(*positional or [coordinator.scheduler_block_size])
        self.unit_bytes = self.state_bytes = 0
        for manager, group in zip(self._managers, config.kv_cache_groups, strict=True):
            block_bytes = sum(spec_of(group, name).page_size_bytes for name in group.layer_names)
            if _has_state(manager):
                self.state_bytes += block_bytes
            else:
                self.unit_bytes += block_bytes * self.unit_tokens // manager.block_size

    # ---------------------------------------------------------------------------- requests

    def num_held(self, request_id: str) -> int:
        """The blocks that the request holds in all groups together, without null blocks."""
        return sum(_num_held(each, request_id) for each in self._managers)

    def num_units(self, num_tokens: int) -> int:
        """The units with any of this number of tokens."""
        return -(-num_tokens // self.unit_tokens)

    def num_full_units(self, num_valid_tokens: int) -> int:
        """The units that will not change again, of a request with this number of valid tokens.

        With a state, which travels with a unit of the last stage, one unit is always left for that
        stage, also where the request stands still at the end of a unit.
        """
        if not self._has_positional:
            return 0
        return (num_valid_tokens - self._has_state) // self.unit_tokens if num_valid_tokens else 0

    def stage_columns(
        self, first_unit: int, num_units: int, num_valid_tokens: int, *, is_last: bool
    ) -> Columns:
        """The columns of each group that a stage of these units copies.

        Args:
            num_valid_tokens: tokens with valid KV when the stage was planned. Columns that are
                behind the window of a request of this length are left out.
        """
        begin, end = first_unit * self.unit_tokens, (first_unit + num_units) * self.unit_tokens
        return tuple(
            _state_columns(is_last and num_units > 0)
            if _has_state(manager)
            else range(
                max(begin, manager.get_num_skipped_tokens(num_valid_tokens)) // manager.block_size,
                -(-end // manager.block_size),
            )
            for manager in self._managers
        )

    def block_ids(self, request_id: RequestId) -> list[list[int]]:
        """The ids of the request's blocks in each group, column by column; 0 for null blocks."""
        return [
            [block.block_id for block in manager.req_to_blocks.get(request_id, ())]
            for manager in self._managers
        ]

    def blocks_of(
        self, block_ids: list[list[int]], columns: Columns, num_valid_tokens: int
    ) -> list[list[int]]:
        """The ids at these columns, which are fewer where the request is shorter.

        Args:
            block_ids: those of `block_ids`.
            num_valid_tokens: tokens of the request with valid KV.
        """
        found = []
        for manager, ids, wanted in zip(self._managers, block_ids, columns, strict=True):
            if _has_state(manager):
                column = _state_column(manager, num_valid_tokens)
                found.append([ids[column] for _ in wanted])
            else:
                end = min(wanted.stop, -(-num_valid_tokens // manager.block_size))
                found.append(ids[wanted.start : max(wanted.start, end)])
        return found

    # -------------------------------------------------------------------------- reservations

    def num_missing(self, held: Held, columns: Columns) -> int:
        """The blocks that a reservation lacks for these columns."""
        return sum(
            column not in blocks
            for blocks, wanted in zip(held, columns, strict=True)
            for column in wanted
        )

    def new_reservation(self) -> Held:
        """A reservation without blocks."""
        return [{} for _ in self._managers]

    def extend(self, held: Held, columns: Columns) -> None:
        """Take blocks of the pool for the columns that the reservation lacks."""
        for blocks, wanted in zip(held, columns, strict=True):
            missing = [column for column in wanted if column not in blocks]
            blocks.update(zip(missing, self._pool.get_new_blocks(len(missing)), strict=True))

    def ids_at(self, held: Held, columns: Columns) -> list[list[int]]:
        """The ids of the reserved blocks at these columns."""
        return [
            [blocks[column].block_id for column in wanted]
            for blocks, wanted in zip(held, columns, strict=True)
        ]

    def free(self, held: Held) -> None:
        """Give the reserved blocks back to the pool, those of later tokens first."""
        for blocks in held:
            self._pool.free_blocks([blocks[column] for column in sorted(blocks, reverse=True)])

    def has_all(self, held: Held, num_valid_tokens: int) -> bool:
        """Whether the reservation has all blocks that a request of this length looks at."""
        return all(
            column in blocks
            for manager, blocks in zip(self._managers, held, strict=True)
            for column in _live_columns(manager, num_valid_tokens)
        )

    def adopt(self, held: Held, request: Request, num_valid_tokens: int) -> None:
        """Give the reserved blocks to the request, whose first tokens have valid KV in them.

        Blocks that its windows have left behind since they were copied, and those beyond its
        tokens, go back to the pool: only what it still looks at enters its table, and the prefix
        cache.
        """
        for manager, blocks in zip(self._managers, held, strict=True):
            live = _live_columns(manager, num_valid_tokens)
            if _has_state(manager):
                length = _state_column(manager, num_valid_tokens) + 1
                kept = {length - 1: STATE_COLUMN}
            else:
                length = -(-num_valid_tokens // manager.block_size)
                # With that of the next token, where it is reserved, and vLLM need not clear it.
                if length * manager.block_size < request.num_tokens and length in blocks:
                    length += not manager.records_new_block_ids
                kept = {column: column for column in range(live.start, length)}
            table = [self._pool.null_block] * length
            for column, place in kept.items():
                table[column] = blocks.pop(place)
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


def _has_state(manager: SingleTypeKVCacheManager) -> bool:
    """Whether the group has a recurrent state in place of blocks of tokens."""
    return isinstance(manager, MambaManager)


def _state_columns(is_copied: bool) -> range:
    return range(STATE_COLUMN, STATE_COLUMN + int(is_copied))


def _state_column(manager: SingleTypeKVCacheManager, num_valid_tokens: int) -> int:
    """The column of the running state."""
    return max(0, num_valid_tokens - 1) // manager.block_size


def _live_columns(manager: SingleTypeKVCacheManager, num_valid_tokens: int) -> range:
    """The columns that a request with this number of valid tokens still looks at."""
    if _has_state(manager):
        return _state_columns(True)
    return range(
        manager.get_num_skipped_tokens(num_valid_tokens) // manager.block_size,
        -(-num_valid_tokens // manager.block_size),
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
