"""The KV cache as raw memory, and block fusion over it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from sterna.errors import ConfigurationError
from sterna.transport.memory.chunks import Tile
from sterna.transport.memory.layout import KvCache, KvLayout
from tests.transport.planes import random_bytes


def _whole(layout: KvLayout, num_blocks: int) -> Tile:
    return Tile(0, len(layout.page_bytes), 0, num_blocks)


def _copy(source: KvLayout, destination: KvLayout, from_ids: list[int], to_ids: list[int]) -> None:
    """Gathers from one cache and scatters into the other in a single chunk."""
    buffer = torch.empty(len(from_ids) * source.block_bytes, dtype=torch.uint8)
    source.gather(_whole(source, len(from_ids)), torch.tensor(from_ids), buffer)
    destination.scatter(_whole(destination, len(to_ids)), torch.tensor(to_ids), buffer)


# A busy machine may take its time over an example.
_patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def strided_caches(draw: st.DrawFn) -> dict[str, int]:
    """A cache with layers or blocks outside and gaps of any size between all pages."""
    num_layers, num_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    page = draw(st.integers(1, 48))
    inner = page + draw(st.integers(0, 20))
    if draw(st.booleans()):
        block_stride = inner
        layer_stride = inner * (num_blocks - 1) + page + draw(st.integers(0, 20))
    else:
        layer_stride = inner
        block_stride = inner * (num_layers - 1) + page + draw(st.integers(0, 20))
    return {
        "offset": draw(st.integers(0, 40)),
        "num_layers": num_layers,
        "layer_stride": layer_stride,
        "num_blocks": num_blocks,
        "block_stride": block_stride,
        "page_bytes": page,
    }


def _num_bytes(cache: dict[str, int]) -> int:
    return (
        cache["offset"]
        + cache["layer_stride"] * (cache["num_layers"] - 1)
        + cache["block_stride"] * (cache["num_blocks"] - 1)
        + cache["page_bytes"]
    )


def _page(memory: np.ndarray, cache: dict[str, int], layer: int, block: int) -> np.ndarray:
    start = cache["offset"] + layer * cache["layer_stride"] + block * cache["block_stride"]
    return memory[start : start + cache["page_bytes"]]


@st.composite
def tiles(draw: st.DrawFn, cache: dict[str, int], num_ids: int) -> Tile:
    """A chunk of a transfer of so many blocks."""
    first_layer = draw(st.integers(0, cache["num_layers"] - 1))
    num_layers = draw(st.integers(1, cache["num_layers"] - first_layer))
    first_block = draw(st.integers(0, num_ids - 1))
    num_blocks = draw(st.integers(1, num_ids - first_block))
    return Tile(first_layer, num_layers, first_block, num_blocks)


def _pages_of(tile: Tile, ids: list[int]) -> list[tuple[int, int]]:
    """Layer and block of each page of the chunk, in its order."""
    return [
        (layer, block)
        for layer in range(tile.first_layer, tile.first_layer + tile.num_layers)
        for block in ids[tile.first_block : tile.first_block + tile.num_blocks]
    ]


@_patiently
@given(strided_caches(), st.data())
def test_gather_reads_exactly_the_pages_that_a_naive_copy_reads(
    cache: dict[str, int], data: st.DataObject
) -> None:
    storage = random_bytes(_num_bytes(cache) + data.draw(st.integers(0, 9)), seed=1)
    layout = KvLayout.from_strided(storage, **cache)
    ids = data.draw(st.lists(st.integers(0, cache["num_blocks"] - 1), min_size=1, max_size=9))
    tile = data.draw(tiles(cache, len(ids)))
    buffer = torch.empty(tile.num_bytes([layout.page_bytes]), dtype=torch.uint8)

    layout.gather(tile, torch.tensor(ids), buffer)

    memory = storage.numpy().view(np.uint8)
    pages = [_page(memory, cache, layer, block) for layer, block in _pages_of(tile, ids)]
    assert np.array_equal(buffer.numpy(), np.concatenate(pages))


@_patiently
@given(strided_caches(), st.data())
def test_scatter_writes_exactly_the_pages_that_a_naive_copy_writes(
    cache: dict[str, int], data: st.DataObject
) -> None:
    storage = random_bytes(_num_bytes(cache) + data.draw(st.integers(0, 9)), seed=2)
    expected = storage.numpy().view(np.uint8).copy()
    layout = KvLayout.from_strided(storage, **cache)
    ids = data.draw(st.permutations(range(cache["num_blocks"])))
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    tile = data.draw(tiles(cache, len(ids)))
    fused = random_bytes(tile.num_bytes([layout.page_bytes]), seed=3).view(torch.uint8)

    layout.scatter(tile, torch.tensor(ids), fused)

    pages = iter(fused.numpy().reshape(-1, cache["page_bytes"]))
    for layer, block in _pages_of(tile, ids):
        _page(expected, cache, layer, block)[:] = next(pages)
    assert np.array_equal(storage.numpy().view(np.uint8), expected)


@pytest.mark.parametrize("page", [48, 24, 20, 18, 17])
def test_bytes_survive_whatever_word_they_are_moved_as(page: int) -> None:
    """All values of 16 bits among them, hence also every kind of NaN of every float type."""
    pattern = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    num_blocks = pattern.numel() // page
    source_bytes = pattern[: num_blocks * page].clone()
    destination_bytes = torch.zeros_like(source_bytes)
    source, destination = (
        KvLayout.from_strided(storage, 0, 1, 0, num_blocks, page, page)
        for storage in (source_bytes, destination_bytes)
    )
    ids = list(range(num_blocks))
    _copy(source, destination, ids, ids)
    assert torch.equal(source_bytes, destination_bytes)


def test_caches_with_different_strides_exchange_blocks() -> None:
    """Layers outside and no gaps here; blocks outside, gaps and an offset there."""
    layers, blocks, page = 3, 4, 32
    here = random_bytes(layers * blocks * page, seed=4)
    there = torch.zeros(2000, dtype=torch.int8)
    source = KvLayout.from_strided(here, 0, layers, blocks * page, blocks, page, page)
    destination = KvLayout.from_strided(there, 104, layers, 40, blocks, 400, page)

    _copy(source, destination, [3, 0], [1, 2])

    pages_here = here.view(layers, blocks, page)
    for layer in range(layers):
        for from_block, to_block in ((3, 1), (0, 2)):
            start = 104 + layer * 40 + to_block * 400
            assert torch.equal(there[start : start + page], pages_here[layer, from_block])


class IndexingOperations(TorchFunctionMode):
    """Notes the names of those that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "index" in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def test_the_pages_of_a_chunk_are_moved_by_one_indexing_operation() -> None:
    """Section 5, Block fusion: the blocks are fused "to avoid the overhead of sending these
    blocks using many small messages"."""
    layout = KvLayout.from_strided(torch.zeros(6 * 5 * 16, dtype=torch.int8), 0, 6, 80, 5, 16, 16)
    buffer = torch.empty(6 * 3 * 16, dtype=torch.uint8)
    with IndexingOperations() as operations:
        layout.gather(Tile(0, 6, 0, 3), torch.tensor([4, 1, 2]), buffer)
        layout.scatter(Tile(0, 6, 0, 3), torch.tensor([0, 3, 2]), buffer)
    assert operations.names == ["index_select", "index_copy_"]


def test_a_cache_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        storage = torch.zeros(64, dtype=torch.int8)
    layout = KvLayout.from_strided(storage, 0, 1, 0, 4, 16, 16)
    fused = random_bytes(16, seed=9).view(torch.uint8)
    layout.scatter(_whole(layout, 1), torch.tensor([2]), fused)
    assert torch.equal(storage[32:48].view(torch.uint8), fused)


def test_of_a_buffer_that_is_larger_only_the_part_of_the_chunk_is_used() -> None:
    """A staging buffer holds the largest chunk."""
    source, destination = random_bytes(64, seed=11), torch.zeros(64, dtype=torch.int8)
    buffer = torch.full((50,), 7, dtype=torch.uint8)
    here, there = (
        KvLayout.from_strided(each, 0, 1, 0, 4, 16, 16) for each in (source, destination)
    )
    here.gather(_whole(here, 2), torch.tensor([3, 0]), buffer)
    assert buffer[32:].tolist() == [7] * 18
    there.scatter(_whole(there, 2), torch.tensor([1, 2]), buffer)
    assert torch.equal(destination[16:48], torch.cat([source[48:], source[:16]]))
    assert not destination[:16].any()
    assert not destination[48:].any()


def test_a_part_of_a_storage_of_larger_elements_is_addressed_in_bytes() -> None:
    storage = random_bytes(128, seed=12).view(torch.float16)
    layout = KvLayout.from_strided(storage[16:], 0, 1, 0, 6, 16, 16)
    buffer = torch.empty(16, dtype=torch.uint8)
    layout.gather(_whole(layout, 1), torch.tensor([5]), buffer)
    assert torch.equal(buffer, storage.view(torch.uint8)[112:])


@pytest.mark.parametrize(
    ("offset", "message"), [(-16, "take bytes -16 to 16"), (16, "take bytes 16 to 48 of a tensor")]
)
def test_pages_beside_their_part_of_a_storage_are_rejected(offset: int, message: str) -> None:
    """Also where the storage goes on."""
    part = torch.zeros(96, dtype=torch.int8)[32:64]
    KvLayout.from_strided(part, 0, 1, 0, 2, 16, 16)
    with pytest.raises(ConfigurationError, match=message):
        KvLayout.from_strided(part, offset, 1, 0, 2, 16, 16)


def test_a_part_of_a_storage_is_addressed_from_its_own_start() -> None:
    storage = random_bytes(100, seed=10)
    layout = KvLayout.from_strided(storage[30:], 2, 1, 0, 2, 16, 16)
    buffer = torch.empty(16, dtype=torch.uint8)
    layout.gather(_whole(layout, 1), torch.tensor([1]), buffer)
    assert torch.equal(buffer, storage[48:64].view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_stride": 63}, "overlap: 2 layers 63 bytes apart"),
        ({"block_stride": 15}, "overlap"),
        ({"offset": 1}, "take bytes 1 to 129 of a tensor that has 128"),
        ({"offset": -1}, "take bytes -1 to 127"),
        ({"num_blocks": 5, "layer_stride": 80}, "take bytes 0 to 160"),
        ({"num_layers": 0}, "num_layers of the KV cache must be positive, not 0"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"page_bytes": 0}, "page_bytes"),
    ],
)
def test_a_cache_that_cannot_be_is_rejected_with_the_reason(
    change: dict[str, int], message: str
) -> None:
    cache = {
        "offset": 0,
        "num_layers": 2,
        "layer_stride": 64,
        "num_blocks": 4,
        "block_stride": 16,
        "page_bytes": 16,
    }
    storage = torch.zeros(128, dtype=torch.int8)
    KvLayout.from_strided(storage, **cache)
    with pytest.raises(ConfigurationError, match=message):
        KvLayout.from_strided(storage, **(cache | change))


def test_a_storage_with_holes_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="contiguous"):
        KvLayout.from_strided(torch.zeros(128, dtype=torch.int8)[::2], 0, 1, 0, 4, 16, 16)


def test_a_group_may_have_pages_of_several_sizes() -> None:
    """Two layers of 16 bytes a page and one of 6, as where an indexer has a cache of its own."""
    storage = random_bytes(2 * 4 * 16 + 4 * 6, seed=13)
    large = KvLayout.from_strided(storage, 0, 2, 64, 4, 16, 16)
    small = KvLayout.from_strided(storage, 128, 1, 0, 4, 6, 6)
    layout = KvLayout.joined([large, small])
    assert layout.page_bytes == (16, 16, 6)
    buffer = torch.zeros(2 * layout.block_bytes, dtype=torch.uint8)
    layout.gather(_whole(layout, 2), torch.tensor([3, 1]), buffer)
    layers = storage[:128].view(torch.uint8).view(2, 4, 16)
    pages = storage[128:].view(torch.uint8).view(4, 6)
    expected = [*layers[0, [3, 1]], *layers[1, [3, 1]], *pages[[3, 1]]]
    assert torch.equal(buffer, torch.cat(expected))
    layout.scatter(_whole(layout, 2), torch.tensor([0, 2]), buffer)
    assert torch.equal(layers[:, [0, 2]], layers[:, [3, 1]])
    assert torch.equal(pages[[0, 2]], pages[[3, 1]])


def test_of_pages_of_several_sizes_a_chunk_takes_the_layers_that_it_names() -> None:
    storage = random_bytes(2 * 4 * 16 + 4 * 6, seed=14)
    layouts = [
        KvLayout.from_strided(storage, 0, 2, 64, 4, 16, 16),
        KvLayout.from_strided(storage, 128, 1, 0, 4, 6, 6),
    ]
    layout = KvLayout.joined(layouts)
    buffer = torch.zeros(22, dtype=torch.uint8)
    layout.gather(Tile(1, 2, 0, 1), torch.tensor([2]), buffer)
    bytes_ = storage.view(torch.uint8)
    assert torch.equal(buffer, torch.cat([bytes_[96:112], bytes_[140:146]]))


def test_groups_lay_the_same_bytes_out_anew() -> None:
    """Eight blocks of 32 bytes: two layers of 16 for one group, one of 32 for the other."""
    storage = random_bytes(256, seed=15)
    windowed = KvLayout.from_strided(storage, 0, 2, 16, 8, 32, 16)
    full = KvLayout.from_strided(storage, 0, 1, 0, 8, 32, 32)
    cache = KvCache([windowed, full])
    assert (cache.page_bytes, cache.block_bytes) == (((16, 16), (32,)), (32, 32))
    buffer = torch.zeros(64, dtype=torch.uint8)
    cache.gather(Tile(0, 2, 0, 2, group=0), torch.tensor([5, 1]), buffer)
    blocks = storage.view(torch.uint8).view(8, 2, 16)
    assert torch.equal(buffer.view(2, 2, 16), blocks[[5, 1]].transpose(0, 1))
    cache.gather(Tile(0, 1, 0, 2, group=1), torch.tensor([5, 1]), buffer)
    assert torch.equal(buffer.view(2, 2, 16), blocks[[5, 1]])
