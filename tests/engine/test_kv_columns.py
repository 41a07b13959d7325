"""Columns of KV cache groups: what a stage copies, what is reserved, and what is adopted."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from sterna.engine.kv_columns import STATE_COLUMN, KvColumns


@dataclass(frozen=True)
class Group:
    """A window over blocks of four tokens; of any other size where it is asked for."""

    block_size: int = 4
    window: int = 8
    has_state: bool = False
    clears_new_blocks: bool = False

    def num_skipped_tokens(self, num_valid_tokens: int) -> int:
        return max(0, num_valid_tokens - self.window + 1)


@dataclass
class Pool:
    """Blocks are numbers."""

    null_block: int = 0
    num_taken: int = 0
    freed: list[int] = field(default_factory=list)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        first = self.num_taken + 1
        self.num_taken += num_blocks
        return [*range(first, first + num_blocks)]

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        self.freed += ordered_blocks


WINDOW, FULL = Group(), Group(window=1000)
STATE = Group(block_size=1000, has_state=True)


def columns_of(*groups: Group) -> tuple[KvColumns[int], Pool]:
    pool = Pool()
    return KvColumns(groups, pool, stateful_unit_tokens=1000), pool


def test_stages_of_both_sides_have_equal_columns_by_the_length_at_the_plan() -> None:
    columns, _ = columns_of(WINDOW, FULL)
    # Of 21 tokens the window looks at those from 14 on.
    assert columns.stage_columns(0, 5, 21, is_last=False) == (range(3, 5), range(5))


def test_a_source_that_stood_still_copies_fewer_columns_than_were_reserved() -> None:
    columns, _ = columns_of(WINDOW, FULL)
    wanted = columns.stage_columns(4, 2, 18, is_last=True)
    assert wanted == (range(4, 6), range(4, 6))
    tables = [[f"{group}{column}" for column in range(5)] for group in "wf"]
    assert columns.blocks_of(tables, wanted, 18) == [["w4"], ["f4"]]


def test_the_state_is_that_of_the_present_length() -> None:
    columns, _ = columns_of(replace(STATE, block_size=8), FULL)
    wanted = columns.stage_columns(3, 2, 15, is_last=True)
    assert [*wanted[0]] == [STATE_COLUMN]
    tables = [["null", "null", "running"], ["f0", "f1", "f2", "f3", "f4"]]
    assert columns.blocks_of(tables, wanted, 17) == [["running"], ["f3", "f4"]]


def test_a_reservation_takes_only_blocks_that_it_lacks() -> None:
    columns, pool = columns_of(FULL)
    held = columns.new_reservation()
    columns.extend(held, (range(2, 4),))
    assert columns.num_missing(held, (range(3, 6),)) == 2
    columns.extend(held, (range(3, 6),))
    assert columns.blocks_at(held, (range(2, 6),)) == [[1, 2, 3, 4]]
    columns.free(held)
    assert pool.freed == [4, 3, 2, 1]


def test_only_columns_that_the_request_looks_at_enter_its_tables() -> None:
    columns, pool = columns_of(WINDOW, FULL)
    held = columns.new_reservation()
    columns.extend(held, (range(2, 7), range(7)))
    assert columns.has_all(held, 23)
    # The window looks at tokens 16 to 22; column 6 is beyond the request's 24 tokens.
    assert columns.take_tables(held, 23, 24) == [
        [0, 0, 0, 0, 3, 4],
        [6, 7, 8, 9, 10, 11],
    ]
    columns.free(held)
    assert sorted(pool.freed) == [1, 2, 5, 12]


@pytest.mark.parametrize(("clears", "length"), [(False, 6), (True, 5)])
def test_the_block_of_the_next_token_is_taken_where_it_need_not_be_cleared(
    clears: bool, length: int
) -> None:
    columns, _ = columns_of(replace(FULL, clears_new_blocks=clears))
    held = columns.new_reservation()
    columns.extend(held, (range(7),))
    assert [len(each) for each in columns.take_tables(held, 20, 21)] == [length]


def test_a_state_stands_in_the_column_of_the_last_token() -> None:
    columns, _ = columns_of(replace(STATE, block_size=8), FULL)
    held = columns.new_reservation()
    columns.extend(held, columns.stage_columns(0, 5, 16, is_last=True))
    assert columns.take_tables(held, 17, 18)[0] == [0, 0, 1]


def test_a_request_lacks_a_block_that_was_not_reserved() -> None:
    columns, _ = columns_of(WINDOW)
    held = columns.new_reservation()
    columns.extend(held, (range(4, 6),))
    assert not columns.has_all(held, 22)
    assert columns.has_all(held, 23)
