"""Shared prefixes of prompts: blocks by id. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block in the traces of Mooncake."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlocks:
    """The blocks of every request's prompt, in order.

    Prompts that begin with the same ids have the same tokens there. Behind its last block, a prompt
    has tokens of its own.

    Attributes:
        ids: int64[m], the ids of all requests, one request after the other.
        end: int64[n], the number of ids of the requests up to and including this one.
        block_tokens: the tokens of a block; only the last one of a prompt may be cut.
        num_tokens: int64[n], the tokens of each request, from the first one on, that its blocks
            cover at most: of the prompt and, where a later request goes on behind it, of the
            answer. None: the prompt.
    """

    ids: NDArray[np.int64]
    end: NDArray[np.int64]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    num_tokens: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        starts_at_0 = (np.diff(self.end, prepend=0) >= 0).all()
        if not starts_at_0 or len(self.ids) != (self.end[-1] if len(self.end) else 0):
            raise ConfigurationError("prefix blocks: the ends must ascend to the number of ids")

    def __len__(self) -> int:
        return len(self.end)

    def of(self, row: int) -> NDArray[np.int64]:
        """The ids of one request's blocks."""
        return self.ids[self.end[row - 1] if row else 0 : self.end[row]]

    def take(self, rows: NDArray[np.int64]) -> "PrefixBlocks":
        """The blocks of these requests, in this order; a row may occur several times."""
        ids = [self.of(row) for row in rows.tolist()]
        end = np.cumsum([len(each) for each in ids], dtype=np.int64)
        num_tokens = None if self.num_tokens is None else self.num_tokens[rows]
        taken = np.concatenate([*ids, np.zeros(0, np.int64)])
        return PrefixBlocks(taken, end, self.block_tokens, num_tokens)
