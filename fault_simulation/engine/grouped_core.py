"""The emulated engine's core over the blocks of a `KvCache`, which have contents.

Production code decides: the core counts blocks, as in `engine.emulated.core`. Here each one that it
counts is a block of the cache, in all groups of a request.
"""

from collections.abc import Sequence
from dataclasses import replace

from fault_simulation.engine.block_pool import Block, Content
from fault_simulation.engine.kv_cache import KvCache
from fault_simulation.virtual.settings import STEP_TIME
from sterna.engine.drains import position_of_prefix
from sterna.engine.emulated.core import EmulatedCore, KeptPrefix
from sterna.engine.emulated.requests import EmulatedRequest, RequestState
from sterna.engine.emulated.steps import Step, Token
from sterna.engine.kv_columns import Columns, Held
from sterna.migration.messages import Reason, RequestPosition
from sterna.types import MigrationId, RequestId


class GroupedCore(EmulatedCore):
    """One engine.

    Attributes:
        prefixes: the blocks of those that move from here.
    """

    def __init__(self, cache: KvCache) -> None:
        super().__init__(cache.kind.config, STEP_TIME)
        self._cache = cache
        self._held: dict[MigrationId, Held[Block]] = {}
        self.prefixes: dict[RequestId, list[Block]] = {}

    # -------------------------------------------------------------------------------- position

    def progress(self, request_id: RequestId) -> RequestPosition | None:
        """As the core of an engine with one group, in units."""
        if (prefix := self.prefixes.get(request_id)) is not None:
            return position_of_prefix(len(prefix), self._config.block_size)
        position = super().progress(request_id)
        if position is None:
            return None
        num_valid_tokens = self._requests[request_id].num_computed_tokens
        return replace(
            position,
            num_full_blocks=self._cache.num_full_units(num_valid_tokens),
            num_blocks=self._cache.num_units(num_valid_tokens),
            num_valid_tokens=num_valid_tokens,
        )

    # ----------------------------------------------------------------------------------- steps

    def begin_step(self) -> Step:
        """Decide what the next step computes."""
        if self._cache.kind.has_prompts_first:
            self._running.sort(key=lambda each: not each.is_prefilling)
        return super().begin_step()

    def end_step(self) -> tuple[Token, ...]:
        """End the step under way, with the KV of its tokens in their blocks."""
        for request, num_tokens in self._scheduled:
            self._cache.compute(request.request_id, request.num_computed_tokens, num_tokens)
        return super().end_step()

    def _num_needed(self, num_tokens: int) -> int:
        return self._cache.kind.memory.num_blocks(num_tokens)

    def _num_new_blocks(self, request: EmulatedRequest, num_tokens: int) -> int:
        return self._cache.num_new(request.request_id, request.num_computed_tokens + num_tokens)

    def _has_room(self, request: EmulatedRequest, num_tokens: int) -> bool:
        # As vLLM does: also where the request gets no room.
        num_freed = self._cache.leave_behind(request.request_id, request.num_computed_tokens)
        self._hold(request, -num_freed)
        return super()._has_room(request, num_tokens)

    def _reuse(self, head: EmulatedRequest) -> None:
        head.num_computed_tokens, num_blocks = self._cache.reuse(head.request_id, head.num_tokens)
        self._hold(head, num_blocks)

    def _compute(self, request: EmulatedRequest, num_tokens: int) -> None:
        super()._compute(request, num_tokens)
        self._cache.allocate(request.request_id, request.num_computed_tokens + num_tokens)

    def _free(self, request: EmulatedRequest) -> None:
        super()._free(request)
        self._cache.release(request.request_id)

    # -------------------------------------------------------------------------------- prefixes

    def keep_prefix(
        self, prefix_id: RequestId, block_hashes: Sequence[int], first_block: int
    ) -> None:
        """As the core of an engine whose blocks are not shared: those that a request holds are not
        found."""
        if not self._cache.kind.moves_prefixes:
            return
        blocks = self._cache.find_prefix(block_hashes[first_block:])
        if blocks:
            for each in blocks:
                self._cache.pool.take(each)
            self._num_free_blocks -= len(blocks)
            self.prefixes[prefix_id] = blocks
            self._kept[prefix_id] = KeptPrefix([], len(blocks))

    def release(self, request_id: RequestId) -> None:
        """Free the drained request or the prefix."""
        blocks = self.prefixes.pop(request_id, None)
        if blocks is None:
            super().release(request_id)
            return
        del self._kept[request_id]
        self._num_free_blocks += len(blocks)
        self._cache.pool.free_blocks(reversed(blocks))

    def enter_prefix(self, migration_id: MigrationId, contents: Sequence[Content]) -> None:
        """Enter the reserved blocks into the prefix cache, with these contents, and free all."""
        held = self._held[migration_id]
        for place, content in enumerate(contents):
            self._cache.pool.enter(held[0][place], content)
        self.free_reservation(migration_id)

    # ----------------------------------------------------------------------------- destination

    def reserve_columns(
        self, migration_id: MigrationId, columns: Columns, *, needs_slot: bool
    ) -> Reason | None:
        """Extend the migration's reservation to these columns, and a batch slot if needed.

        Returns why nothing was reserved, or None.
        """
        held = self._held.get(migration_id)
        if held is None:
            held = self._cache.new_reservation()
        num_blocks = sum(map(len, held)) + self._cache.num_missing(held, columns)
        refusal = self.reserve(migration_id, num_blocks, needs_slot=needs_slot)
        if refusal is None:
            self._cache.extend(held, columns)
            self._held[migration_id] = held
        return refusal

    def blocks_at(self, migration_id: MigrationId, columns: Columns) -> list[list[Block]]:
        """The reserved blocks at these columns."""
        return self._cache.blocks_at(self._held[migration_id], columns)

    def free_reservation(self, migration_id: MigrationId) -> None:
        super().free_reservation(migration_id)
        held = self._held.pop(migration_id, None)
        if held is not None:
            self._cache.free(held)

    def can_adopt(self, migration_id: MigrationId, num_valid_tokens: int) -> bool:
        """Whether all blocks that a request of this length looks at are reserved."""
        held = self._held.get(migration_id)
        return held is not None and self._cache.has_all(held, num_valid_tokens)

    def adopt(self, migration_id: MigrationId, state: RequestState, num_blocks: int) -> None:
        """As the core of an engine with one group, in units."""
        held = self._held.pop(migration_id)
        if num_blocks == 0:
            self._cache.free(held)
            super().adopt(migration_id, state, 0)
            return
        num_tokens = state.prompt_tokens + state.num_output_tokens
        num_held = self._cache.adopt(held, state.request_id, state.num_computed_tokens, num_tokens)
        super().adopt(migration_id, state, num_held)
