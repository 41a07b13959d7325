"""The KV cache as raw memory, and block fusion over it (Section 5).

vLLM scatters a sequence over small blocks in every layer: 4k pieces for 1k tokens of LLaMA-7B.
They are never sent one by one: `gather` fuses the pages of a chunk into one contiguous buffer,
`scatter` takes them apart, each with one indexing operation for every run of layers that lies in
memory at a constant stride.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sterna.errors import ConfigurationError
from sterna.transport.memory.chunks import Tile

_WORDS = (
    # Pages are only moved, never computed with, so the widest element that divides everything
    # is the fastest one.
    (16, torch.complex128),
    (8, torch.int64),
    (4, torch.int32),
    (2, torch.int16),
    (1, torch.uint8),
)


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers at a constant stride in one storage; all numbers in bytes."""

    storage: torch.UntypedStorage
    offset: int
    num_layers: int
    layer_stride: int
    num_blocks: int
    block_stride: int
    page_bytes: int


class KvLayout:
    """Where the pages of a KV cache lie: page (layer, block) for every layer and block.

    A *layer* is whatever has one page in each block: a model layer, or its keys and its values
    apart when the engine stores them apart.

    Attributes:
        page_bytes: size of a page, for every layer.
        num_blocks: blocks of the cache.
        label: what the bytes mean (model, dtype, order inside a page). Planes exchange blocks
            only when their labels and page sizes are equal.
        device: where the cache lives.
        compute_stream: on CUDA, the stream on which the engine's steps run; None means the
            current stream of the thread that calls `fence`.
    """

    def __init__(
        self,
        runs: Sequence[_Run],
        label: str,
        device: torch.device,
        compute_stream: "torch.cuda.Stream | None",
    ) -> None:
        self.page_bytes = tuple(run.page_bytes for run in runs for _ in range(run.num_layers))
        self.num_blocks = runs[0].num_blocks
        self.label = label
        self.device = device
        self.compute_stream = compute_stream
        self._word_bytes, word = _widest_word(runs)
        # pages: word[num_layers, num_blocks, page_bytes / word_bytes], one for every run.
        self._pages = [_pages(run, self._word_bytes, word, device) for run in runs]

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
        *,
        label: str = "",
        compute_stream: "torch.cuda.Stream | None" = None,
    ) -> "KvLayout":
        """The cache in one contiguous tensor, page (layer, block) at
        `offset + layer * layer_stride + block * block_stride`, all in bytes from its start.

        Raises:
            ConfigurationError: the pages overlap or leave the tensor.
        """
        if not storage.is_contiguous():
            raise ConfigurationError("the KV cache's storage tensor must be contiguous")
        start = storage.storage_offset() * storage.element_size()
        run = _Run(
            storage.untyped_storage(),
            start + offset,
            num_layers,
            layer_stride,
            num_blocks,
            block_stride,
            page_bytes,
        )
        _check(run, start, start + storage.numel() * storage.element_size())
        return cls([run], label, storage.device, compute_stream)

    @classmethod
    def from_layer_views(
        cls,
        layers: Sequence[torch.Tensor],
        *,
        label: str = "",
        compute_stream: "torch.cuda.Stream | None" = None,
    ) -> "KvLayout":
        """The cache as one tensor a layer, `[num_blocks, page]` of any dtype, whose rows are
        contiguous. Neighbours at a constant stride in one storage are gathered together.

        Raises:
            ConfigurationError: no layers, a wrong shape, differing numbers of blocks or
                devices, overlapping pages.
        """
        if not layers:
            raise ConfigurationError("a KV cache must have at least one layer")
        runs: list[_Run] = []
        for index, view in enumerate(layers):
            run = _run_of(index, view)
            first = runs[0] if runs else run
            if run.num_blocks != first.num_blocks or view.device != layers[0].device:
                raise ConfigurationError(
                    f"layer {index} has {run.num_blocks} blocks on {view.device}, layer 0 has "
                    f"{first.num_blocks} on {layers[0].device}: they must be the same"
                )
            joined = _join(runs[-1], run) if runs else None
            if joined is None:
                runs.append(run)
            else:
                runs[-1] = joined
        for run in runs:
            _check(run, 0, run.storage.nbytes())
        return cls(runs, label, layers[0].device, compute_stream)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.page_bytes)

    def fence(self) -> "torch.cuda.Event | None":
        """On CUDA, marks the steps queued so far, which a copy must not overtake; else None."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(self.compute_stream or torch.cuda.current_stream(self.device))
        return event

    def gather(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Fuses the tile's pages into `buffer`.

        Args:
            block_ids: int64[num_blocks of the transfer], on the cache's device.
            buffer: uint8[at least the tile's bytes], contiguous, on the cache's device.
        """
        ids = block_ids[tile.first_block : tile.first_block + tile.num_blocks]
        for pages, fused in self._parts(tile, buffer):
            torch.index_select(pages, 1, ids, out=fused)

    def scatter(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Takes `buffer` apart into the tile's pages; the arguments are those of `gather`."""
        ids = block_ids[tile.first_block : tile.first_block + tile.num_blocks]
        for pages, fused in self._parts(tile, buffer):
            pages.index_copy_(1, ids, fused)

    def _parts(self, tile: Tile, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tile's pages run by run, each with its part of the buffer in the same shape."""
        parts = []
        run_start, start = 0, 0
        for pages in self._pages:
            first = max(tile.first_layer - run_start, 0)
            end = min(tile.first_layer + tile.num_layers - run_start, pages.shape[0])
            run_start += pages.shape[0]
            if first >= end:
                continue
            shape = (end - first, tile.num_blocks, pages.shape[2])
            stop = start + math.prod(shape) * self._word_bytes
            parts.append((pages[first:end], buffer[start:stop].view(pages.dtype).view(shape)))
            start = stop
        return parts


def _run_of(index: int, view: torch.Tensor) -> _Run:
    if view.dim() != 2 or view.shape[0] == 0 or view.shape[1] == 0 or view.stride(1) != 1:
        raise ConfigurationError(
            f"layer {index} must be [num_blocks, page] with contiguous pages, not of shape "
            f"{list(view.shape)} and strides {list(view.stride())}"
        )
    size = view.element_size()
    return _Run(
        view.untyped_storage(),
        view.storage_offset() * size,
        1,
        0,
        view.shape[0],
        view.stride(0) * size,
        view.shape[1] * size,
    )


def _join(run: _Run, layer: _Run) -> _Run | None:
    """The run with the layer appended, or None when it does not continue the run."""
    stride = layer.offset - run.offset - (run.num_layers - 1) * run.layer_stride
    continues = (
        layer.storage.data_ptr() == run.storage.data_ptr()
        and layer.page_bytes == run.page_bytes
        and layer.block_stride == run.block_stride
        and stride > 0
        and (run.num_layers == 1 or stride == run.layer_stride)
    )
    if not continues:
        return None
    joined = _Run(
        run.storage,
        run.offset,
        run.num_layers + 1,
        stride,
        run.num_blocks,
        run.block_stride,
        run.page_bytes,
    )
    return joined if _extent_bytes(joined) is not None else None


def _check(run: _Run, start: int, end: int) -> None:
    """Pages must nest without overlap and lie in the bytes [start, end) of their storage."""
    for name, value in (
        ("num_layers", run.num_layers),
        ("num_blocks", run.num_blocks),
        ("page_bytes", run.page_bytes),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} of the KV cache must be positive, not {value}")
    extent = _extent_bytes(run)
    if extent is None:
        raise ConfigurationError(
            f"the pages of the KV cache overlap: {run.num_layers} layers {run.layer_stride} bytes "
            f"apart, {run.num_blocks} blocks {run.block_stride} bytes apart, pages of "
            f"{run.page_bytes} bytes"
        )
    if run.offset < start or run.offset + extent > end:
        raise ConfigurationError(
            f"the pages of the KV cache take bytes {run.offset - start} to "
            f"{run.offset - start + extent} of a tensor that has {end - start}"
        )


def _extent_bytes(run: _Run) -> int | None:
    """Bytes from the first to the end of the last page; None when the strides do not nest."""
    extent = run.page_bytes
    axes = [(run.layer_stride, run.num_layers), (run.block_stride, run.num_blocks)]
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < extent:
            return None
        extent += stride * (count - 1)
    return extent


def _widest_word(runs: Sequence[_Run]) -> tuple[int, torch.dtype]:
    common = 0
    for run in runs:
        numbers = (run.storage.data_ptr(), run.offset, run.page_bytes)
        common = math.gcd(common, *numbers)
        common = math.gcd(common, run.layer_stride if run.num_layers > 1 else 0)
        common = math.gcd(common, run.block_stride if run.num_blocks > 1 else 0)
    return next((size, word) for size, word in _WORDS if common % size == 0)


def _pages(run: _Run, word_bytes: int, word: torch.dtype, device: torch.device) -> torch.Tensor:
    # A tensor set onto the raw storage is no inference tensor even when the engine's are, so it
    # may be written to in any thread and outside inference mode.
    return torch.empty(0, dtype=word, device=device).set_(
        run.storage,
        run.offset // word_bytes,
        (run.num_layers, run.num_blocks, run.page_bytes // word_bytes),
        (run.layer_stride // word_bytes, run.block_stride // word_bytes, 1),
    )
