"""Counts of the outputs that have ended on an engine, by their lengths. Pure.

A policy may expect the requests that run to go on as these did (`policy.survival`). Lengths grow by
a half or a third from one to the next: a few numbers say enough about outputs of a hundred tokens
and of a hundred thousand, and can be in each view. The compiled engine counts by the same rule
(`compiled.stepping`).
"""

from bisect import bisect_right

from sterna.types import MAX_ENDED, OUTPUT_LENGTHS


class EndedOutputs:
    """The newest outputs: where there are `MAX_ENDED`, all counts are halved, rounded down, so that
    another workload shows after as many again."""

    def __init__(self) -> None:
        self._counts = [0] * len(OUTPUT_LENGTHS)
        self._num_ended = 0
        self._listed: tuple[int, ...] | None = None

    def add(self, num_tokens: int) -> None:
        """Count an output of this length. A request that has ended without a token has none."""
        if num_tokens == 0:
            return
        self._counts[bisect_right(OUTPUT_LENGTHS, num_tokens) - 1] += 1
        self._num_ended += 1
        self._listed = None
        if self._num_ended == MAX_ENDED:
            self._counts = [count // 2 for count in self._counts]
            self._num_ended = sum(self._counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of outputs of each length, as in `InstanceView.num_ended`. It is the same
        tuple until another one ends: views are made far more often."""
        if self._listed is None:
            self._listed = tuple(self._counts)
        return self._listed
