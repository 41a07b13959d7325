"""Queue of future events, in the order in which they happen. Pure."""

import heapq
from collections.abc import Callable
from enum import IntEnum


class Rank(IntEnum):
    """Order of events of the same time."""

    STEP_END = 0
    """First, so that all other events find the engines between two steps."""
    MESSAGE = 1
    ROOM = 2
    ARRIVAL = 3
    ROUND = 4
    SAMPLE = 5


Action = Callable[[float], None]
"""Function of an event, called with the time."""


class EventQueue:
    """A heap ordered by time, then rank, then place, then order of entry.

    The place is the row of an engine: steps that end at the same time end in the order of their
    rows, whichever was entered first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int, Action]] = []
        self._num_entered = 0

    @property
    def next(self) -> tuple[float, int] | None:
        """Time and rank of the next event, or None."""
        return self._heap[0][:2] if self._heap else None

    def push(self, time_s: float, rank: Rank, action: Action, place: int = 0) -> None:
        """Schedule `action` at this time."""
        self._num_entered += 1
        heapq.heappush(self._heap, (time_s, rank, place, self._num_entered, action))

    def pop(self) -> tuple[float, Action]:
        """Remove the next event and return it."""
        time_s, _, _, _, action = heapq.heappop(self._heap)
        return time_s, action
