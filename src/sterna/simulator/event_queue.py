"""The events to come, in the order in which they happen. Pure."""

import heapq
from collections.abc import Callable
from enum import IntEnum


class Rank(IntEnum):
    """What comes first at one and the same moment."""

    STEP_END = 0
    """Engines are between two steps before anything else looks at them."""
    MESSAGE = 1
    ARRIVAL = 2
    ROUND = 3
    SAMPLE = 4


Action = Callable[[float], None]
"""What happens; it is given the time."""


class EventQueue:
    """A heap ordered by time, then rank, then place, then order of entry.

    The place tells engines apart: steps that end together end in the order of their instances,
    whoever noticed first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int, Action]] = []
        self._num_entered = 0

    @property
    def next(self) -> tuple[float, int] | None:
        """Time and rank of the next event, or None."""
        return self._heap[0][:2] if self._heap else None

    def push(self, time_s: float, rank: Rank, action: Action, place: int = 0) -> None:
        """Let `action` happen at that time."""
        self._num_entered += 1
        heapq.heappush(self._heap, (time_s, rank, place, self._num_entered, action))

    def pop(self) -> tuple[float, Action]:
        """Take the next event out."""
        time_s, _, _, _, action = heapq.heappop(self._heap)
        return time_s, action
