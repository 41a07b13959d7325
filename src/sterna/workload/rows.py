"""Rows of a trace file, from which a workload makes a trace. Pure."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.turns import Turns


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Arrays with one entry for each request, in the file's order; None for a missing column.

    Attributes:
        input_tokens: int64[n], at least 1.
        output_tokens: int64[n], at least 1.
        arrival_s: float64[n], ascending, from any time on.
        priority: int64[n], at least 0 (normal).
        prefix_blocks: the blocks of every prompt.
        turns: which requests follow answers to others.
    """

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64] | None = None
    priority: NDArray[np.int64] | None = None
    prefix_blocks: PrefixBlocks | None = None
    turns: Turns | None = None

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def mean_rate(self) -> float | None:
        """Requests a second as recorded; None without arrivals, or if all came at once."""
        if self.arrival_s is None or len(self) < 2 or self.arrival_s[-1] <= self.arrival_s[0]:
            return None
        return float((len(self) - 1) / (self.arrival_s[-1] - self.arrival_s[0]))

    def no_longer_than(self, max_total_tokens: int) -> "Rows":
        """The requests whose input and output have at most this number of tokens together; a
        session ends before the first one that is longer.

        Raises:
            ConfigurationError: there is no such request.
        """
        total_tokens = self.input_tokens + self.output_tokens
        is_short = total_tokens <= max_total_tokens
        if self.turns is not None:
            for row in np.flatnonzero(~self.turns.is_first).tolist():
                is_short[row] &= is_short[self.turns.previous[row]]
        rows = np.flatnonzero(is_short)
        if not len(rows):
            raise ConfigurationError(
                f"max_total_tokens {max_total_tokens} leaves no request: the shortest has "
                f"{total_tokens.min()} tokens (by default it is what one instance holds)"
            )
        return self.taken(rows)

    def repeated_to(self, num_requests: int) -> "Rows":
        """The first requests up to this number; if there are fewer, all of them repeatedly.

        Recorded arrivals of a pass begin one mean gap after the last of the pass before. The
        prompts of each pass are different ones of the same lengths: they share prefix blocks only
        within their pass.
        """
        passes, rows = np.divmod(np.arange(num_requests, dtype=np.int64), len(self))
        taken = self.taken(rows)
        arrival_s, prefix_blocks = taken.arrival_s, taken.prefix_blocks
        if self.arrival_s is not None and arrival_s is not None:
            mean_gap_s = 1.0 / self.mean_rate if self.mean_rate else 0.0
            arrival_s = arrival_s + passes * (self.arrival_s[-1] - self.arrival_s[0] + mean_gap_s)
        if self.prefix_blocks is not None and prefix_blocks is not None:
            num_ids = int(self.prefix_blocks.ids.max(initial=-1)) + 1
            passes_of_ids = np.repeat(passes, np.diff(prefix_blocks.end, prepend=0))
            ids = prefix_blocks.ids + passes_of_ids * num_ids
            prefix_blocks = replace(prefix_blocks, ids=ids)
        return replace(taken, arrival_s=arrival_s, prefix_blocks=prefix_blocks)

    def divided(self, divisor: int) -> "Rows":
        """The requests with all numbers of tokens divided by the divisor, rounded down, for engines
        with little memory; what a turn adds to its session has at least one token.

        Raises:
            ConfigurationError: the blocks of prompts cannot be divided.
        """
        num_before = np.zeros(len(self), np.int64)
        if self.turns is not None:
            later = np.flatnonzero(~self.turns.is_first)
            previous = self.turns.previous[later]
            num_before[later] = self.input_tokens[previous] + self.output_tokens[previous]
        output_tokens = np.maximum(1, self.output_tokens // divisor)
        input_tokens = np.maximum(1, (self.input_tokens - num_before) // divisor)
        if self.turns is not None:
            for row in np.flatnonzero(~self.turns.is_first).tolist():
                before = self.turns.previous[row]
                input_tokens[row] += input_tokens[before] + output_tokens[before]
        prefix_blocks = self.prefix_blocks
        if prefix_blocks is not None:
            block_tokens, rest = divmod(prefix_blocks.block_tokens, divisor)
            if rest:
                raise ConfigurationError(
                    f"lengths can be divided by divisors of the {prefix_blocks.block_tokens} "
                    f"tokens of a prefix block, not by {divisor}"
                )
            num_tokens = prefix_blocks.num_tokens
            if num_tokens is not None:
                has_next = num_tokens > self.input_tokens
                num_tokens = input_tokens + np.where(has_next, output_tokens, 0)
            prefix_blocks = replace(prefix_blocks, block_tokens=block_tokens, num_tokens=num_tokens)
        return replace(
            self,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_blocks=prefix_blocks,
        )

    def taken(self, rows: NDArray[np.int64]) -> "Rows":
        """These requests, in this order; a row may occur several times."""
        return Rows(
            self.input_tokens[rows],
            self.output_tokens[rows],
            None if self.arrival_s is None else self.arrival_s[rows],
            None if self.priority is None else self.priority[rows],
            None if self.prefix_blocks is None else self.prefix_blocks.take(rows),
            None if self.turns is None else self.turns.take(rows),
        )
