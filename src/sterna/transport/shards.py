"""Shards of a KV cache: ranks that hold the same blocks, and the way of a copy to all of them.

With tensor parallelism, each rank has the KV cache of its share of the heads, but a latent cache is
the same on all ranks. Such blocks cross to the other instance once, to the first rank that holds
them (their *lead*); the destination's leads forward them to the other ranks.
"""

from dataclasses import dataclass

from sterna.transport.data_plane import BlockIds, Hop


@dataclass(frozen=True, slots=True)
class Shards:
    """Which ranks hold the same; equal on both instances of a migration.

    Attributes:
        num_ranks: of one instance.
        of_groups: for each KV cache group, the number of consecutive ranks that hold the same.
    """

    num_ranks: int
    of_groups: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: the ranks are not a multiple of those that hold the same.
        """
        if any(each < 1 or self.num_ranks % each for each in self.of_groups):
            raise ValueError(f"{self.num_ranks} ranks cannot hold the same by {self.of_groups}")

    @property
    def leads(self) -> list[int]:
        """The ranks to which the source sends."""
        return [rank for rank in range(self.num_ranks) if rank in self._leads_of(rank)]

    @property
    def hops(self) -> list[Hop]:
        """All hops; each begins when its lead has what the source sends."""
        return [
            Hop(lead, rank)
            for rank in range(self.num_ranks)
            for lead in sorted(self._leads_of(rank) - {rank})
        ]

    def part(self, block_ids: BlockIds, lead: int, rank: int) -> list[list[int]]:
        """Return the blocks that the rank has through this lead, by group.

        Where both are the same rank, these are the blocks that the source sends to it.
        """
        return [
            list(ids) if _lead(rank, num_alike) == lead else []
            for ids, num_alike in zip(block_ids, self.of_groups, strict=True)
        ]

    def _leads_of(self, rank: int) -> set[int]:
        return {_lead(rank, num_alike) for num_alike in self.of_groups}


def _lead(rank: int, num_alike: int) -> int:
    return rank - rank % num_alike
