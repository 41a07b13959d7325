"""Room: the memory that instances have for requests that wait. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sterna.policy.candidate_table import (
    NUM_REQUESTS,
    ROOM_TOKENS,
    TOTAL_TOKENS,
    CandidateTable,
    Column,
)
from sterna.types import InstanceId

NO_COLUMN: Column = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for requests on the instances that may get some.

    Attributes:
        tokens: what each of them has left.
        most_tokens: the most that one has left.
        total_tokens: that of the largest. A request that needs more would wait for ever.
    """

    candidates: CandidateTable
    tokens: Column
    most_tokens: float
    total_tokens: float

    @classmethod
    def of(
        cls,
        candidates: CandidateTable,
        growth_steps: float,
        kept_free: InstanceId | None = None,
    ) -> "Room":
        """Of those that may get requests, without the one that is kept free, and beside as many
        further tokens of each request that is there."""
        if not len(candidates):
            return NO_ROOM
        staying = candidates.staying()
        total_tokens = staying.column(TOTAL_TOKENS)
        # The largest by its place takes a third of the time of `max`.
        most_total_tokens = float(total_tokens[total_tokens.argmax()])
        if kept_free is not None:
            staying = staying.where(staying.spread({kept_free: 1.0}) == 0)
            if not len(staying):
                return cls(staying, NO_COLUMN, 0, most_total_tokens)
        tokens = staying.column(ROOM_TOKENS)
        if growth_steps:
            tokens = tokens - growth_steps * staying.column(NUM_REQUESTS)
        return cls(staying, tokens, float(tokens[tokens.argmax()]), most_total_tokens)

    def candidates_for(
        self, demand_tokens: int, shared: Mapping[InstanceId, int] = MappingProxyType({})
    ) -> CandidateTable:
        """Those that have room for a request.

        Args:
            shared: the part of its demand for which it needs no memory there.
        """
        needed_tokens = demand_tokens - self.candidates.spread(shared) if shared else demand_tokens
        return self.candidates.where(self.tokens >= needed_tokens)

    def roomiest_for(
        self, demand_tokens: int, shared: Mapping[InstanceId, int]
    ) -> InstanceId | None:
        """The one that has the most left beside what is shared there, of those that could ever hold
        a request."""
        holds = self.candidates.column(TOTAL_TOKENS) >= demand_tokens
        if not holds.any():
            return None
        tokens = self.tokens + self.candidates.spread(shared)
        row = int(np.where(holds, tokens, -np.inf).argmax())
        return self.candidates[row].instance_id


NO_ROOM = Room(CandidateTable(), NO_COLUMN, 0, 0)
