"""What all threads of one plane share."""

from dataclasses import dataclass

from sterna.transport.channel import Wire
from sterna.transport.chunks import Tile, largest_chunk_bytes, plan_tiles
from sterna.transport.layout import KvLayout
from sterna.transport.ledger import Ledger
from sterna.transport.pacing import Pacer


@dataclass(frozen=True, slots=True)
class PlaneParts:
    """Attributes:
    token: the secret of this plane's endpoint.
    """

    wire: Wire
    layout: KvLayout
    ledger: Ledger
    pacer: Pacer
    token: str
    chunk_bytes: int
    timeout_s: float

    @property
    def slot_bytes(self) -> int:
        """A staging buffer of so many bytes holds every chunk."""
        return largest_chunk_bytes(self.layout.page_bytes, self.chunk_bytes)

    def plan(self, num_blocks: int) -> list[Tile]:
        """The chunks of a transfer of so many blocks."""
        return plan_tiles(self.layout.page_bytes, num_blocks, self.chunk_bytes)
