"""Columns of KV cache groups that a migration copies, reserves and adopts. Pure.

A group's block table has a column for each of its blocks of tokens. Columns that a window has left
behind, or that lie between two recurrent states, hold the pool's null block, which takes no
memory.

What a stage copies follows from the request's length when the stage was planned: both sides find
the same columns. A *unit* is what the migration protocol counts as a block: the least number of
tokens that is a whole number of blocks in every positional group. The blocks of **positional**
groups do not change once they are full, and travel in stages; the **state** of a recurrent layer
changes at every step, and travels whole with the last one.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

Block = TypeVar("Block")
Item = TypeVar("Item")

STATE_COLUMN = -1
"""Stands for the column of the running state in a state group."""

Columns = tuple[range, ...]
"""Columns of each group, in order."""

Held = list[dict[int, Block]]
"""The reserved block of each column, for each group."""


class ColumnGroup(Protocol):
    """A KV cache group, as far as its columns are concerned."""

    @property
    def block_size(self) -> int:
        """Tokens of a column."""

    @property
    def has_state(self) -> bool:
        """Whether it has a recurrent state in place of blocks of tokens."""

    @property
    def clears_new_blocks(self) -> bool:
        """Whether the engine clears new blocks before the step that first writes to them."""

    def num_skipped_tokens(self, num_valid_tokens: int) -> int:
        """The first tokens that a request of this length no longer looks at."""


class BlockPool(Protocol[Block]):
    """The blocks of all groups of an engine."""

    @property
    def null_block(self) -> Block:
        """Stands in columns without a block."""

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take free blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Give blocks back; the first ones are used again first."""


class KvColumns(Generic[Block]):
    """The groups of one engine, and reservations of blocks for their columns.

    Args:
        groups: in the order of the engine's.
        pool: the blocks of all groups.
        stateful_unit_tokens: tokens of a unit where every group has a state.

    Attributes:
        unit_tokens: tokens of a unit.
    """

    def __init__(
        self, groups: Sequence[ColumnGroup], pool: BlockPool[Block], stateful_unit_tokens: int
    ) -> None:
        self._groups = groups
        self._pool = pool
        positional = [each.block_size for each in groups if not each.has_state]
        self._has_positional = len(positional) > 0
        self._has_state = len(positional) < len(groups)
        self.unit_tokens = math.lcm(*positional or [stateful_unit_tokens])

    # ------------------------------------------------------------------------------- stages

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
            if group.has_state
            else range(
                max(begin, group.num_skipped_tokens(num_valid_tokens)) // group.block_size,
                -(-end // group.block_size),
            )
            for group in self._groups
        )

    def blocks_of(
        self, tables: Sequence[Sequence[Item]], columns: Columns, num_valid_tokens: int
    ) -> list[list[Item]]:
        """The blocks at these columns, which are fewer where the request is shorter.

        Args:
            tables: the request's blocks, or their ids, in each group, column by column.
            num_valid_tokens: tokens of the request with valid KV.
        """
        found: list[list[Item]] = []
        for group, table, wanted in zip(self._groups, tables, columns, strict=True):
            if group.has_state:
                column = _state_column(group, num_valid_tokens)
                found.append([table[column] for _ in wanted])
            else:
                end = min(wanted.stop, -(-num_valid_tokens // group.block_size))
                found.append(list(table[wanted.start : max(wanted.start, end)]))
        return found

    # -------------------------------------------------------------------------- reservations

    def new_reservation(self) -> Held[Block]:
        """A reservation without blocks."""
        return [{} for _ in self._groups]

    def num_missing(self, held: Held[Block], columns: Columns) -> int:
        """The blocks that a reservation lacks for these columns."""
        return sum(map(len, _missing(held, columns)))

    def extend(self, held: Held[Block], columns: Columns) -> None:
        """Take blocks of the pool for the columns that the reservation lacks."""
        for blocks, missing in zip(held, _missing(held, columns), strict=True):
            blocks.update(zip(missing, self._pool.get_new_blocks(len(missing)), strict=True))

    def blocks_at(self, held: Held[Block], columns: Columns) -> list[list[Block]]:
        """The reserved blocks at these columns."""
        return [
            [blocks[column] for column in wanted]
            for blocks, wanted in zip(held, columns, strict=True)
        ]

    def free(self, held: Held[Block]) -> None:
        """Give the reserved blocks back to the pool, those of later tokens first."""
        for blocks in held:
            self._pool.free_blocks([blocks[column] for column in sorted(blocks, reverse=True)])

    def has_all(self, held: Held[Block], num_valid_tokens: int) -> bool:
        """Whether the reservation has all blocks that a request of this length looks at."""
        return all(
            column in blocks
            for group, blocks in zip(self._groups, held, strict=True)
            for column in _live_columns(group, num_valid_tokens)
        )

    def take_tables(
        self, held: Held[Block], num_valid_tokens: int, num_tokens: int
    ) -> list[list[Block]]:
        """Take out of the reservation the block tables of a request with valid KV in its blocks.

        Only blocks that it still looks at enter its tables. Those that its windows have left
        behind since they were copied, and those beyond its tokens, stay in the reservation, to be
        freed.

        Args:
            num_tokens: all tokens of the request. The block of the token after the valid ones is
                taken too where it is reserved, and the engine need not clear it.

        Raises:
            KeyError: the reservation has not all of these blocks (`has_all`).
        """
        tables: list[list[Block]] = []
        for group, blocks in zip(self._groups, held, strict=True):
            length, kept = self._kept(group, blocks, num_valid_tokens, num_tokens)
            table = [self._pool.null_block] * length
            for column, place in kept.items():
                table[column] = blocks.pop(place)
            tables.append(table)
        return tables

    def _kept(
        self, group: ColumnGroup, blocks: dict[int, Block], num_valid_tokens: int, num_tokens: int
    ) -> tuple[int, dict[int, int]]:
        """The length of the table, and the reserved column whose block enters each of its columns;
        the others are null."""
        if group.has_state:
            column = _state_column(group, num_valid_tokens)
            return column + 1, {column: STATE_COLUMN}
        live = _live_columns(group, num_valid_tokens)
        length = live.stop
        if length * group.block_size < num_tokens and length in blocks:
            length += not group.clears_new_blocks
        return length, {column: column for column in range(live.start, length)}


def _missing(held: Held[Block], columns: Columns) -> list[list[int]]:
    """The columns of each group that a reservation lacks."""
    return [
        [column for column in wanted if column not in blocks]
        for blocks, wanted in zip(held, columns, strict=True)
    ]


def _state_columns(is_copied: bool) -> range:
    return range(STATE_COLUMN, STATE_COLUMN + int(is_copied))


def _state_column(group: ColumnGroup, num_valid_tokens: int) -> int:
    """The column of the running state."""
    return max(0, num_valid_tokens - 1) // group.block_size


def _live_columns(group: ColumnGroup, num_valid_tokens: int) -> range:
    """The columns that a request with this number of valid tokens still looks at."""
    if group.has_state:
        return _state_columns(True)
    return range(
        group.num_skipped_tokens(num_valid_tokens) // group.block_size,
        -(-num_valid_tokens // group.block_size),
    )
