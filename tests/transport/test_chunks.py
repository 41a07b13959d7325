"""Cutting transfers into chunks."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.transport.memory.chunks import Tile, largest_chunk_bytes, plan_tiles


def test_a_chunk_takes_as_many_whole_blocks_as_fit() -> None:
    assert plan_tiles([[10, 10]], [5], 45) == [Tile(0, 2, 0, 2), Tile(0, 2, 2, 2), Tile(0, 2, 4, 1)]


def test_a_block_that_does_not_fit_is_cut_between_layers() -> None:
    assert plan_tiles([[10, 10, 10]], [2], 25) == [
        Tile(0, 2, 0, 1),
        Tile(2, 1, 0, 1),
        Tile(0, 2, 1, 1),
        Tile(2, 1, 1, 1),
    ]


def test_a_page_is_never_cut() -> None:
    assert plan_tiles([[30, 10, 10]], [1], 20) == [Tile(0, 1, 0, 1), Tile(1, 2, 0, 1)]


def test_a_llama_7b_block_travels_in_two_chunks_of_four_mib() -> None:
    """Section 5: "the block size of a 16-bit LLaMA-7B model is 128 KB (for key or value tensors
    of 16 tokens in each layer)"; a block is 32 layers of both."""
    assert plan_tiles([[2 * 128 << 10] * 32], [1], 4 << 20) == [
        Tile(0, 16, 0, 1),
        Tile(16, 16, 0, 1),
    ]


def test_no_blocks_are_no_chunks() -> None:
    assert plan_tiles([[10]], [0], 100) == []


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 9), st.integers(1, 400))
def test_every_page_travels_exactly_once_and_every_chunk_fits_its_slot(
    page_bytes: list[int], num_blocks: int, chunk_bytes: int
) -> None:
    tiles = plan_tiles([page_bytes], [num_blocks], chunk_bytes)
    pages = [
        (layer, block)
        for tile in tiles
        for layer in range(tile.first_layer, tile.first_layer + tile.num_layers)
        for block in range(tile.first_block, tile.first_block + tile.num_blocks)
    ]
    assert sorted(pages) == [(la, b) for la in range(len(page_bytes)) for b in range(num_blocks)]
    slot_bytes = largest_chunk_bytes([page_bytes], chunk_bytes)
    assert all(0 < tile.num_bytes([page_bytes]) <= slot_bytes for tile in tiles)
    assert sum(tile.num_bytes([page_bytes]) for tile in tiles) == num_blocks * sum(page_bytes)


def test_groups_travel_one_after_the_other() -> None:
    assert plan_tiles([[10, 10], [5]], [1, 3], 20) == [
        Tile(0, 2, 0, 1, group=0),
        Tile(0, 1, 0, 3, group=1),
    ]


def test_a_group_of_which_nothing_travels_has_no_chunk() -> None:
    assert plan_tiles([[10], [5]], [0, 1], 20) == [Tile(0, 1, 0, 1, group=1)]


def test_a_staging_buffer_holds_the_largest_page_of_any_group() -> None:
    assert largest_chunk_bytes([[10, 10], [35]], 20) == 35
