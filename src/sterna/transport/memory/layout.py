"""The KV cache as raw memory, and block fusion over it (Section 5).

vLLM scatters a sequence over small blocks in every layer: 4k pieces for 1k tokens of LLaMA-7B.
They are never sent one by one: `gather` fuses the pages of a chunk into one contiguous buffer,
`scatter` splits it into pages again. Each uses one indexing operation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from sterna.errors import ConfigurationError
from sterna.transport.memory.chunks import Tile

_WORDS = (
    # Pages are copied, never computed with, so the widest element that divides all sizes and
    # strides is the fastest.
    (16, torch.complex128),
    (8, torch.int64),
    (4, torch.int32),
    (2, torch.int16),
    (1, torch.uint8),
)


@dataclass(frozen=True, slots=True)
class _Strided:
    """Pages at constant strides in one storage; all numbers in bytes."""

    storage: torch.UntypedStorage
    offset: int
    num_layers: int
    layer_stride: int
    num_blocks: int
    block_stride: int
    page_bytes: int


class KvLayout:
    """Memory layout of a KV cache: the place of page (layer, block) for every layer and block.

    A *layer* has one page in each block: it is a model layer, or its keys or its values when the
    engine stores them apart. Layers with pages of one size at constant strides are a *run*.

    Attributes:
        page_bytes: size of a page, for every layer.
        num_blocks: blocks of the cache.
        device: the device that holds the cache.
    """

    def __init__(self, runs: Sequence[_Strided], device: torch.device) -> None:
        self.page_bytes = tuple(run.page_bytes for run in runs for _ in range(run.num_layers))
        self.num_blocks = runs[0].num_blocks
        self.device = device
        # Of a power of two: the least of all runs suits every run, and every place in a chunk.
        self._word_bytes, word = min((_widest_word(run) for run in runs), key=lambda each: each[0])
        self._strided = tuple(runs)
        # Of each run its first layer, and word[num_layers, num_blocks, page_bytes / word_bytes].
        self._runs: list[tuple[int, torch.Tensor]] = []
        first_layer = 0
        for run in runs:
            self._runs.append((first_layer, _pages(run, self._word_bytes, word, device)))
            first_layer += run.num_layers

    @classmethod
    def from_strided(
        cls,
        storage: torch.Tensor,
        offset: int,
        num_layers: int,
        layer_stride: int,
        num_blocks: int,
        block_stride: int,
        page_bytes: int,
    ) -> Self:
        """The cache in one contiguous tensor, page (layer, block) at
        `offset + layer * layer_stride + block * block_stride`, all in bytes from its start.

        Raises:
            ConfigurationError: the pages overlap or leave the tensor.
        """
        if not storage.is_contiguous():
            raise ConfigurationError("the KV cache's storage tensor must be contiguous")
        start = storage.storage_offset() * storage.element_size()
        kv = _Strided(
            storage.untyped_storage(),
            start + offset,
            num_layers,
            layer_stride,
            num_blocks,
            block_stride,
            page_bytes,
        )
        _check(kv, start, start + storage.numel() * storage.element_size())
        return cls([kv], storage.device)

    @classmethod
    def joined(cls, layouts: "Sequence[KvLayout]") -> Self:
        """The layers of all of them, one after the other, in caches of equally many blocks."""
        return cls([run for each in layouts for run in each._strided], layouts[0].device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.page_bytes)

    def gather(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Fuses the tile's pages into `buffer`.

        Args:
            block_ids: int64[num_blocks of the group in the transfer], on the cache's device.
            buffer: uint8[at least the tile's bytes], contiguous, on the cache's device.
        """
        ids = block_ids[tile.first_block : tile.first_block + tile.num_blocks]
        for pages, fused in self._parts(tile, buffer):
            torch.index_select(pages, 1, ids, out=fused)

    def scatter(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Splits `buffer` into the tile's pages; the arguments are those of `gather`."""
        ids = block_ids[tile.first_block : tile.first_block + tile.num_blocks]
        for pages, fused in self._parts(tile, buffer):
            pages.index_copy_(1, ids, fused)

    def _parts(
        self, tile: Tile, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each run, the pages of the tile's layers, of all blocks; and the part of the buffer
        that they take, in their shape."""
        begin = 0
        for first_layer, run in self._runs:
            first = max(tile.first_layer - first_layer, 0)
            pages = run[first : max(tile.first_layer + tile.num_layers - first_layer, 0)]
            if len(pages) == 0:
                continue
            shape = (pages.shape[0], tile.num_blocks, pages.shape[2])
            end = begin + math.prod(shape) * self._word_bytes
            yield pages, buffer[begin:end].view(pages.dtype).view(shape)
            begin = end


class KvCache:
    """The KV cache of one rank: the layouts of its groups, which share one pool of blocks.

    A block belongs to one group at a time, so that the same bytes have another layout in each.

    Attributes:
        groups: a layout for each KV cache group.
        page_bytes: of every layer of every group.
        block_bytes: bytes of one block over all layers of a group, for every group.
        num_blocks: blocks of the pool.
        label: the meaning of the bytes (model, dtype, order inside a page). Planes exchange blocks
            only when their labels and page sizes are equal.
        device: the device that holds the cache.
        compute_stream: on CUDA, the stream on which the engine's steps run; None means the
            current stream of the thread that calls `fence`.
    """

    def __init__(
        self,
        groups: Sequence[KvLayout],
        *,
        label: str = "",
        compute_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self.groups = tuple(groups)
        self.page_bytes = tuple(each.page_bytes for each in groups)
        self.block_bytes = tuple(each.block_bytes for each in groups)
        self.num_blocks = groups[0].num_blocks
        self.label = label
        self.device = groups[0].device
        self.compute_stream = compute_stream

    def fence(self) -> "torch.cuda.Event | None":
        """On CUDA, an event behind the steps queued so far: copies must wait for it, and threads
        that do sleep meanwhile. Else None."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(self.compute_stream or torch.cuda.current_stream(self.device))
        return event

    def gather(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Fuses the tile's pages into `buffer`; `KvLayout.gather` of its group."""
        self.groups[tile.group].gather(tile, block_ids, buffer)

    def scatter(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Splits `buffer` into the tile's pages; `KvLayout.scatter` of its group."""
        self.groups[tile.group].scatter(tile, block_ids, buffer)


def _check(kv: _Strided, start: int, end: int) -> None:
    """Pages must nest without overlap and lie in the bytes [start, end) of their storage."""
    for name, value in (
        ("num_layers", kv.num_layers),
        ("num_blocks", kv.num_blocks),
        ("page_bytes", kv.page_bytes),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} of the KV cache must be positive, not {value}")
    extent = _extent_bytes(kv)
    if extent is None:
        raise ConfigurationError(
            f"the pages of the KV cache overlap: {kv.num_layers} layers {kv.layer_stride} bytes "
            f"apart, {kv.num_blocks} blocks {kv.block_stride} bytes apart, pages of "
            f"{kv.page_bytes} bytes"
        )
    if kv.offset < start or kv.offset + extent > end:
        raise ConfigurationError(
            f"the pages of the KV cache take bytes {kv.offset - start} to "
            f"{kv.offset - start + extent} of a tensor that has {end - start}"
        )


def _extent_bytes(kv: _Strided) -> int | None:
    """Bytes from the first to the end of the last page; None when the strides do not nest."""
    extent = kv.page_bytes
    axes = [(kv.layer_stride, kv.num_layers), (kv.block_stride, kv.num_blocks)]
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < extent:
            return None
        extent += stride * (count - 1)
    return extent


def _widest_word(kv: _Strided) -> tuple[int, torch.dtype]:
    common = math.gcd(kv.storage.data_ptr(), kv.offset, kv.page_bytes)
    if kv.num_layers > 1:
        common = math.gcd(common, kv.layer_stride)
    if kv.num_blocks > 1:
        common = math.gcd(common, kv.block_stride)
    return next((size, word) for size, word in _WORDS if common % size == 0)


def _pages(kv: _Strided, word_bytes: int, word: torch.dtype, device: torch.device) -> torch.Tensor:
    # A tensor set onto the raw storage is not an inference tensor even when the engine's are, so
    # it may be written to in any thread and outside inference mode.
    return torch.empty(0, dtype=word, device=device).set_(
        kv.storage,
        kv.offset // word_bytes,
        (kv.num_layers, kv.num_blocks, kv.page_bytes // word_bytes),
        (kv.layer_stride // word_bytes, kv.block_stride // word_bytes, 1),
    )
