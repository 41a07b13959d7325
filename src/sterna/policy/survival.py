"""Survival curve of outputs: how long requests are likely to go on, by those that have ended. Pure.

An engine counts the outputs that have ended on it by their lengths (`InstanceView.num_ended`). Of
those that were longer than what a request has generated, some were longer by a number of steps than
that: their share is the chance that it will still run after these steps. Until outputs have ended,
and beyond the longest of them, requests are expected to go on.
"""

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from sterna.types import OUTPUT_LENGTHS, InstanceView, RequestView

NUM_EXPECTED = 8.0
"""Outputs that count as longer than all that have ended: with few, chance decides less."""


class Survival:
    """The outputs that have ended, from the shortest to the longest.

    Args:
        num_ended: as in `InstanceView`.
    """

    def __init__(self, num_ended: tuple[int, ...]) -> None:
        self._num_ended = num_ended
        # Of each length, the outputs at least as long.
        self._num_from = list(accumulate(reversed(num_ended)))[::-1]

    def share(self, num_output_tokens: int, num_steps: int) -> float:
        """The chance that a request with as many output tokens runs for more than these further
        steps."""
        num_left = NUM_EXPECTED + self._num_longer(num_output_tokens + num_steps)
        return num_left / (NUM_EXPECTED + self._num_longer(num_output_tokens))

    def _num_longer(self, num_tokens: int) -> float:
        """The outputs that had more tokens; those between two lengths are taken for evenly
        spread."""
        place = bisect_right(OUTPUT_LENGTHS, num_tokens) - 1
        if place >= len(self._num_ended):
            return 0.0
        if place + 1 == len(OUTPUT_LENGTHS):
            return float(self._num_from[place])
        first, end = OUTPUT_LENGTHS[place], OUTPUT_LENGTHS[place + 1]
        passed = self._num_ended[place] * (num_tokens - first) / (end - first)
        return self._num_from[place] - passed


@lru_cache(maxsize=64)
def survival_of(num_ended: tuple[int, ...]) -> Survival:
    """The curve of these outputs; an engine has the same ones for many steps."""
    return Survival(num_ended)


def coming_tokens(
    requests: Iterable[RequestView], instance: InstanceView, num_steps: int
) -> list[float]:
    """The memory that each of the instance's requests is expected to use in some decode steps:
    what it will have if it still runs, times the chance of that."""
    survival = survival_of(instance.num_ended)
    return [
        survival.share(each.num_output_tokens, num_steps) * (each.num_tokens + num_steps)
        for each in requests
    ]
