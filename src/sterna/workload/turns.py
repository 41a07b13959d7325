"""Turns of sessions: requests that come some time after the answer to another one. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.prefix import PrefixBlocks

NONE = -1
"""No request."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Which requests follow which, in closed loop.

    Attributes:
        previous: int64[n], the request whose answer this one follows, an earlier one; NONE for the
            first turn of a session.
        think_s: float64[n], the time from the end of that answer to this request; 0 for the first
            turn.
    """

    previous: NDArray[np.int64]
    think_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        followed = self.previous[self.previous != NONE]
        if len(self.previous) != len(self.think_s):
            raise ConfigurationError("turns: there must be as many think times as requests")
        if (self.previous < NONE).any() or (self.previous >= np.arange(len(self))).any():
            raise ConfigurationError("turns: each must follow an earlier request")
        if len(np.unique(followed)) != len(followed):
            raise ConfigurationError("turns: two follow the same request")
        if not (np.isfinite(self.think_s) & (self.think_s >= 0.0)).all():
            raise ConfigurationError("turns: think times must be numbers of seconds, at least 0")

    def __len__(self) -> int:
        return len(self.previous)

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """bool[n], whether it is the first turn of its session."""
        is_first: NDArray[np.bool_] = self.previous == NONE
        return is_first

    def next(self) -> NDArray[np.int64]:
        """int64[n], the request that follows the answer to each one, or NONE."""
        following = np.full(len(self), NONE, np.int64)
        later = np.flatnonzero(~self.is_first)
        following[self.previous[later]] = later
        return following

    def first(self) -> NDArray[np.int64]:
        """int64[n], the first turn of each request's session."""
        first = np.arange(len(self))
        for row in np.flatnonzero(~self.is_first).tolist():
            first[row] = first[self.previous[row]]
        return first

    def take(self, rows: NDArray[np.int64]) -> "Turns":
        """The turns of these requests, in this order; a row may occur several times, each time with
        the rows of its session that come with it. The first of them that is taken is a first turn.
        """
        last_place: dict[int, int] = {}
        previous = np.full(len(rows), NONE, np.int64)
        for place, row in enumerate(rows.tolist()):
            previous[place] = last_place.pop(int(self.previous[row]), NONE)
            last_place[row] = place
        return Turns(previous, np.where(previous == NONE, 0.0, self.think_s[rows]))


@dataclass(frozen=True, slots=True, eq=False)
class SessionTurns:
    """What each turn adds to its session, the turns of a session one after the other.

    The prompt of a turn has the prompts and answers of all turns before it, then its new tokens.

    Attributes:
        session: int64[n], ids of the sessions.
        new_input_tokens: int64[n], of the first turn its whole prompt.
        output_tokens: int64[n].
        think_s: float64[n], from the answer before to this turn.
        new_blocks: ids of the blocks that this turn's prompt has, and not that of the turn before;
            None if they are not known.
    """

    session: NDArray[np.int64]
    new_input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    think_s: NDArray[np.float64]
    new_blocks: PrefixBlocks | None = None

    @property
    def turns(self) -> Turns:
        """Which of the requests follow which."""
        is_first = self._is_first
        previous = np.where(is_first, NONE, np.arange(len(is_first)) - 1)
        return Turns(previous, np.where(is_first, 0.0, self.think_s))

    @property
    def input_tokens(self) -> NDArray[np.int64]:
        """int64[n], the lengths of the prompts."""
        input_tokens = self.new_input_tokens.copy()
        for row in np.flatnonzero(~self._is_first).tolist():
            input_tokens[row] += input_tokens[row - 1] + self.output_tokens[row - 1]
        return input_tokens

    @property
    def prefix_blocks(self) -> PrefixBlocks | None:
        """The blocks of all prompts, and of answers after which a session goes on: the next prompt
        has them."""
        if self.new_blocks is None:
            return None
        is_first = self._is_first
        block_tokens = self.new_blocks.block_tokens
        num_tokens = self.input_tokens
        has_next = np.append(~is_first[1:], False)
        num_tokens[has_next] += self.output_tokens[has_next]
        prompts: list[NDArray[np.int64]] = []
        known: NDArray[np.int64] = np.zeros(0, np.int64)
        for row in range(len(is_first)):
            if is_first[row]:
                known = self.new_blocks.of(row)
            if has_next[row]:
                known = np.concatenate([known, self.new_blocks.of(row + 1)])
            prompts.append(known[: -(-int(num_tokens[row]) // block_tokens)])
        end = np.cumsum([len(each) for each in prompts], dtype=np.int64)
        ids = np.concatenate([*prompts, np.zeros(0, np.int64)])
        return PrefixBlocks(ids, end, block_tokens, num_tokens)

    @property
    def _is_first(self) -> NDArray[np.bool_]:
        is_first: NDArray[np.bool_] = np.diff(self.session, prepend=NONE) != 0
        return is_first
