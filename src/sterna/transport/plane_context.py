"""Context of one plane: the objects and limits that all its threads share."""

from collections.abc import Sequence
from dataclasses import dataclass

from sterna.transport.ledger import Ledger
from sterna.transport.memory.chunks import Tile, largest_chunk_bytes, plan_tiles
from sterna.transport.memory.layout import KvCache
from sterna.transport.pacer import Pacer
from sterna.transport.wires.channel import Wire


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """Attributes:
    token: the secret of this plane's endpoint.
    """

    wire: Wire
    cache: KvCache
    ledger: Ledger
    pacer: Pacer
    token: str
    chunk_bytes: int
    timeout_s: float
    idle_timeout_s: float

    @property
    def slot_bytes(self) -> int:
        """Size of a staging buffer that holds any chunk."""
        return largest_chunk_bytes(self.cache.page_bytes, self.chunk_bytes)

    def plan(self, num_blocks: Sequence[int]) -> list[Tile]:
        """The chunks of a transfer of `num_blocks` blocks of each group."""
        return plan_tiles(self.cache.page_bytes, num_blocks, self.chunk_bytes)
