"""The KV cache of a simulated engine: block tables of requests in each group, and their contents.

The columns of a migration are found by production code (`engine.kv_columns`), over a pool and
groups that are simulated as vLLM has them: tables grow with each step, windows leave columns
behind, which is found out at the next step, and a full block enters the prefix cache.

A request that looks at anything but its own KV computes wrong KV, and a wrong token.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from fault_simulation.engine.block_pool import Block, Content, Pool, block_hash, key_of
from fault_simulation.engine.engine_kinds import EngineKind, SimulatedGroup
from fault_simulation.oracle.ledger import request_of
from fault_simulation.oracle.token_oracle import EMPTY, Ask, Stream
from sterna.engine.kv_columns import Held, KvColumns
from sterna.types import CacheLayout, RequestId, cache_key, packed

NUM_BEGINNINGS = 3
"""Of prompts; each request has one of them."""

BEGINNING_TOKENS = 16
"""Length of a beginning, in longer prompts."""

Tables = list[list[Block]]
"""Blocks of each group, column by column."""


def beginning_of(origin: str, prompt_tokens: int) -> tuple[str, int]:
    """The beginning of a request's prompt, and the number of tokens that others with this beginning
    have as well."""
    beginning = f"prompt {crc32(origin.encode()) % NUM_BEGINNINGS}"
    return beginning, min(BEGINNING_TOKENS, prompt_tokens)


def prompt_hashes(ask: Ask, layout: CacheLayout) -> bytes:
    """The hashes of a prompt's blocks, as front ends send them."""
    origin = request_of(ask.request_id)
    beginning, num_common = beginning_of(origin, ask.prompt_tokens)
    ends = range(layout.hash_tokens, ask.prompt_tokens + 1, layout.hash_tokens)
    hashes = (block_hash(beginning if end <= num_common else origin, end, EMPTY) for end in ends)
    return packed(hashes)


@dataclass(slots=True)
class Rows:
    """The tables of a request, and the KV that must be in them.

    Attributes:
        origin: the request. Its attempts have equal KV for equal tokens.
        beginning: of its prompt.
        num_common: tokens that others with this beginning have as well.
        num_behind: columns of each group that windows have left behind.
        full: the KV of the full columns of each group, as far as it was asked for.
    """

    stream: Stream
    origin: str
    tables: Tables
    beginning: str = field(init=False)
    num_common: int = field(init=False)
    num_behind: list[int] = field(init=False)
    full: list[list[Content]] = field(init=False)

    def __post_init__(self) -> None:
        prompt_tokens = self.stream.ask.prompt_tokens
        self.beginning, self.num_common = beginning_of(self.origin, prompt_tokens)
        self.num_behind = [0 for _ in self.tables]
        self.full = [[] for _ in self.tables]

    def content(self, number: int, end: int) -> Content:
        """The KV in the block of this group whose last valid token is the one before `end`."""
        digests = self.stream.digests
        origin = self.beginning if end <= self.num_common else self.origin
        return number, origin, end, digests[max(0, end - self.stream.ask.prompt_tokens)]


class KvCache(KvColumns[Block]):
    """The KV cache of one engine.

    Args:
        streams: the requests of the engine.

    Attributes:
        pool: the blocks of all groups.
    """

    def __init__(self, kind: EngineKind, streams: Mapping[RequestId, Stream]) -> None:
        self.kind = kind
        self.pool = Pool(kind.num_blocks)
        super().__init__(kind.groups, self.pool, kind.config.block_size)
        self._streams = streams
        self._rows: dict[RequestId, Rows] = {}
        self._numbered = tuple(enumerate(kind.groups))
        self._moving = tuple(each for each in self._numbered if not each[1].keeps_all)
        self._reused_tokens = math.lcm(*(each.block_size for each in kind.groups))

    @property
    def num_blocks(self) -> int:
        """Its blocks, in all groups together."""
        return self.kind.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that neither a request nor a reservation holds."""
        return self.pool.num_free

    def tables(self, request_id: RequestId) -> Tables:
        """The tables of the request as they are now."""
        rows = self._rows.get(request_id)
        return [[] for _ in self.kind.groups] if rows is None else [[*each] for each in rows.tables]

    # --------------------------------------------------------------------------------- blocks

    def num_new(self, request_id: RequestId, num_tokens: int) -> int:
        """The blocks that the request lacks in order to have this length."""
        rows = self._rows.get(request_id)
        return self._num_new(self._new_rows(request_id) if rows is None else rows, num_tokens)

    def _num_new(self, rows: Rows, num_tokens: int) -> int:
        num_new = 0
        for number, group in self._numbered:
            missing = -(-num_tokens // group.block_size) - len(rows.tables[number])
            if missing > 0:
                num_new += 1 if group.has_state else missing
        return num_new

    def allocate(self, request_id: RequestId, num_tokens: int) -> None:
        """Take the blocks that the request lacks in order to have this length."""
        rows = self._rows.get(request_id)
        if rows is None:
            rows = self._rows[request_id] = self._new_rows(request_id)
        for number, group in self._numbered:
            table = rows.tables[number]
            missing = -(-num_tokens // group.block_size) - len(table)
            if missing <= 0:
                continue
            if group.has_state:
                # The state moves on to a new block.
                table += [self.pool.null_block] * (missing - 1)
                missing = 1
            table += self.pool.get_new_blocks(missing)

    def leave_behind(self, request_id: RequestId, num_computed_tokens: int) -> int:
        """Free what the request no longer looks at; returns the number of blocks."""
        rows = self._rows[request_id]
        num_freed = 0
        for number, group in self._moving:
            behind = group.num_skipped_tokens(num_computed_tokens) // group.block_size
            if behind > rows.num_behind[number]:
                table = rows.tables[number]
                num_freed += self._free_columns(table, rows.num_behind[number], behind)
                rows.num_behind[number] = behind
        return num_freed

    def _free_columns(self, table: list[Block], first: int, end: int) -> int:
        null = self.pool.null_block
        gone = [each for each in reversed(table[first:end]) if each is not null]
        self.pool.free_blocks(gone)
        table[first:end] = [null] * (end - first)
        return len(gone)

    def release(self, request_id: RequestId) -> None:
        """Free all blocks of the request."""
        rows = self._rows.pop(request_id, None)
        if rows is not None:
            for table in rows.tables:
                self.pool.free_blocks(reversed(table))

    def adopt(
        self,
        held: Held[Block],
        request_id: RequestId,
        num_valid_tokens: int,
        num_tokens: int,
    ) -> int:
        """Give the reserved blocks to the request; returns the number of those that it holds.

        Args:
            num_valid_tokens: tokens whose KV is to be in the blocks.
            num_tokens: all of its tokens.
        """
        rows = self._new_rows(request_id)
        rows.tables = self.take_tables(held, num_valid_tokens, num_tokens)
        self._rows[request_id] = rows
        self.free(held)
        if self.kind.has_prefix_cache:
            for number, group in self._numbered:
                self._enter_full(rows, number, group, num_valid_tokens)
        null = self.pool.null_block
        return sum(each is not null for table in rows.tables for each in table)

    def _new_rows(self, request_id: RequestId) -> Rows:
        tables: Tables = [[] for _ in self.kind.groups]
        return Rows(self._streams[request_id], request_of(request_id), tables)

    # --------------------------------------------------------------------------- prefix cache

    def _enter_full(
        self, rows: Rows, number: int, group: SimulatedGroup, num_valid_tokens: int
    ) -> None:
        size = group.block_size
        for column in range(num_valid_tokens // size):
            # Of a state, the block at which it stands has it at the present length.
            if not group.has_state or (column + 1) * size == num_valid_tokens:
                self.pool.enter(
                    rows.tables[number][column], rows.content(number, (column + 1) * size)
                )

    def reuse(self, request_id: RequestId, num_tokens: int) -> tuple[int, int]:
        """Give a request of this length, which has no blocks, those that the prefix cache has of
        its first tokens. Its last token is computed, and the rest of it must fit as well.

        Returns:
            The number of tokens, and that of blocks.
        """
        if not self.kind.has_prefix_cache:
            return 0, 0
        rows = self._new_rows(request_id)
        unit = self._reused_tokens
        for num_reused in range((num_tokens - 1) // unit * unit, 0, -unit):
            found = self._found(rows, num_reused)
            if found is None:
                continue
            if len(found) + self._num_new(rows, num_tokens) > self.num_free:
                break
            for block in found:
                self.pool.take(block)
            self._rows[request_id] = rows
            return num_reused, len(found)
        return 0, 0

    def _found(self, rows: Rows, num_tokens: int) -> list[Block] | None:
        """Fill the tables with blocks of the prefix cache for this number of tokens; returns the
        blocks, or None: some are missing."""
        found: list[Block] = []
        for number, group in self._numbered:
            size = group.block_size
            first = group.num_skipped_tokens(num_tokens) // size
            table = [self.pool.null_block] * first
            for column in range(first, num_tokens // size):
                block = self.pool.find(rows.content(number, (column + 1) * size))
                if block is None:
                    return None
                table.append(block)
                found.append(block)
            rows.tables[number] = table
        return found

    def find_prefix(self, hashes: Iterable[int]) -> list[Block]:
        """The blocks of the prefix cache for the first ones of these hashes."""
        by_key = {key_of(content): content for content in self.pool.cached}
        found = []
        for each in hashes:
            content = by_key.get(cache_key(each, 0))
            block = None if content is None else self.pool.find(content)
            if block is None:
                break
            found.append(block)
        return found

    def keys(self) -> set[int]:
        """The keys of all blocks in the prefix cache."""
        return {key_of(each) for each in self.pool.cached}

    def new_wrong_keys(self) -> list[str]:
        """Descriptions of blocks that have entered the prefix cache since the last call, and have
        other KV than it says."""
        if not self.pool.entered:
            return []
        entered = self.pool.entered
        self.pool.entered = []
        return _wrong(entered)

    def wrong_keys(self) -> list[str]:
        """The same of all blocks in the prefix cache."""
        return _wrong(self.pool.cached.values())

    # ------------------------------------------------------------------------------- contents

    def compute(self, request_id: RequestId, num_before: int, num_tokens: int) -> None:
        """Write the KV of these tokens, after `num_before` others, as the step does that is over.

        The stream is told whether the step has looked at the request's own KV.
        """
        rows = self._rows[request_id]
        is_right = self._is_right(rows, num_before)
        rows.stream.is_wrong = not is_right
        end = num_before + num_tokens
        for number, group in self._numbered:
            size = group.block_size
            table = rows.tables[number]
            first = (end - 1 if group.has_state else num_before) // size
            for column in range(first, -(-end // size)):
                stop = end if group.has_state else min(end, (column + 1) * size)
                content = rows.content(number, stop)
                block = table[column]
                block.content = content if is_right else None
                if is_right and stop % size == 0 and self.kind.has_prefix_cache:
                    self.pool.enter(block, content)

    def _is_right(self, rows: Rows, num_tokens: int) -> bool:
        """Whether all that a request of this length looks at is its own KV."""
        if num_tokens == 0:
            return True
        for number, group in self._numbered:
            size = group.block_size
            table = rows.tables[number]
            num_full = 0 if group.has_state else num_tokens // size
            full = rows.full[number]
            while len(full) < num_full:
                full.append(rows.content(number, (len(full) + 1) * size))
            first = group.num_skipped_tokens(num_tokens) // size
            if [each.content for each in table[first:num_full]] != full[first:num_full]:
                return False
            last = (num_tokens - 1) // size
            if last >= num_full and table[last].content != rows.content(number, num_tokens):
                return False
        return True


def _wrong(blocks: Iterable[Block]) -> list[str]:
    found = []
    for block in blocks:
        if block.key is not None and block.content != block.key:
            number, origin, end, _ = block.key
            found.append(f"wrong KV in group {number} for {origin} up to token {end}")
    return found
