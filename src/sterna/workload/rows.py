"""Rows of a trace file, from which a workload makes a trace. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.prefix import PrefixBlocks


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Arrays with one entry for each request, in the file's order; None for a missing column.

    Attributes:
        input_tokens: int64[n], at least 1.
        output_tokens: int64[n], at least 1.
        arrival_s: float64[n], ascending, from any time on.
        priority: int64[n], at least 0 (normal).
        prefix_blocks: the blocks of every prompt.
    """

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64] | None = None
    priority: NDArray[np.int64] | None = None
    prefix_blocks: PrefixBlocks | None = None

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def mean_rate(self) -> float | None:
        """Requests a second as recorded; None without arrivals, or if all came at once."""
        if self.arrival_s is None or len(self) < 2 or self.arrival_s[-1] <= self.arrival_s[0]:
            return None
        return float((len(self) - 1) / (self.arrival_s[-1] - self.arrival_s[0]))

    def no_longer_than(self, max_total_tokens: int) -> "Rows":
        """The requests whose input and output have at most this number of tokens together.

        Raises:
            ConfigurationError: there is no such request.
        """
        total_tokens = self.input_tokens + self.output_tokens
        rows = np.flatnonzero(total_tokens <= max_total_tokens)
        if not len(rows):
            raise ConfigurationError(
                f"max_total_tokens {max_total_tokens} leaves no request: the shortest has "
                f"{total_tokens.min()} tokens (by default it is what one instance holds)"
            )
        return self._taken(rows)

    def repeated_to(self, num_requests: int) -> "Rows":
        """The first requests up to this number; if there are fewer, all of them repeatedly.

        Recorded arrivals of a pass begin one mean gap after the last of the pass before. The
        prompts of each pass are different ones of the same lengths: they share prefix blocks only
        within their pass.
        """
        passes, rows = np.divmod(np.arange(num_requests, dtype=np.int64), len(self))
        taken = self._taken(rows)
        arrival_s, prefix_blocks = taken.arrival_s, taken.prefix_blocks
        if self.arrival_s is not None and arrival_s is not None:
            mean_gap_s = 1.0 / self.mean_rate if self.mean_rate else 0.0
            arrival_s = arrival_s + passes * (self.arrival_s[-1] - self.arrival_s[0] + mean_gap_s)
        if self.prefix_blocks is not None and prefix_blocks is not None:
            num_ids = int(self.prefix_blocks.ids.max(initial=-1)) + 1
            passes_of_ids = np.repeat(passes, np.diff(prefix_blocks.end, prepend=0))
            ids = prefix_blocks.ids + passes_of_ids * num_ids
            prefix_blocks = PrefixBlocks(ids, prefix_blocks.end, prefix_blocks.block_tokens)
        return Rows(
            taken.input_tokens, taken.output_tokens, arrival_s, taken.priority, prefix_blocks
        )

    def _taken(self, rows: NDArray[np.int64]) -> "Rows":
        return Rows(
            self.input_tokens[rows],
            self.output_tokens[rows],
            None if self.arrival_s is None else self.arrival_s[rows],
            None if self.priority is None else self.priority[rows],
            None if self.prefix_blocks is None else self.prefix_blocks.take(rows),
        )
