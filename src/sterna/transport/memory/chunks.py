"""Chunks of a transfer, the units of overtaking, pacing and stopping. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

PageBytes = Sequence[Sequence[int]]
"""The page size of every layer of every KV cache group."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The pages of one chunk: a run of a group's layers times a run of its blocks in the transfer.

    The chunk's bytes are `[num_layers, num_blocks, page]`, whatever the strides of the caches on
    both sides.

    Attributes:
        group: index of the KV cache group.
    """

    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int
    group: int = 0

    def num_bytes(self, page_bytes: PageBytes) -> int:
        """Bytes of the chunk, given the page size of every layer of every group."""
        end = self.first_layer + self.num_layers
        return self.num_blocks * sum(page_bytes[self.group][self.first_layer : end])


def plan_tiles(page_bytes: PageBytes, num_blocks: Sequence[int], chunk_bytes: int) -> list[Tile]:
    """The chunks of a transfer, in the order in which they are sent: group by group.

    Both sides compute the plan, so that no offset is ever read from the wire. A chunk has as
    many whole blocks as fit into `chunk_bytes`. A block that does not fit (a LLaMA-7B block of
    16 tokens has 8 MiB) is cut between its layers; a single page is never cut.

    Args:
        page_bytes: of every layer of every group.
        num_blocks: of every group, in this transfer.
    """
    return [
        replace(tile, group=group)
        for group, (pages, count) in enumerate(zip(page_bytes, num_blocks, strict=True))
        for tile in _plan_group(pages, count, chunk_bytes)
    ]


def _plan_group(page_bytes: Sequence[int], num_blocks: int, chunk_bytes: int) -> list[Tile]:
    num_layers = len(page_bytes)
    blocks_a_chunk = chunk_bytes // sum(page_bytes)
    if blocks_a_chunk >= 1:
        return [
            Tile(0, num_layers, first, min(blocks_a_chunk, num_blocks - first))
            for first in range(0, num_blocks, blocks_a_chunk)
        ]
    runs = _layer_runs(page_bytes, chunk_bytes)
    return [Tile(first, count, block, 1) for block in range(num_blocks) for first, count in runs]


def largest_chunk_bytes(page_bytes: PageBytes, chunk_bytes: int) -> int:
    """Size of a staging buffer that holds every chunk of every plan."""
    return max(chunk_bytes, *(page for pages in page_bytes for page in pages))


def _layer_runs(page_bytes: Sequence[int], chunk_bytes: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    first, run_bytes = 0, 0
    for layer, page in enumerate(page_bytes):
        if layer > first and run_bytes + page > chunk_bytes:
            runs.append((first, layer - first))
            first, run_bytes = layer, 0
        run_bytes += page
    runs.append((first, len(page_bytes) - first))
    return runs
