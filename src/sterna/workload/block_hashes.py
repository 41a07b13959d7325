"""Hashes of the blocks of an engine's KV cache, for the requests of a trace. Pure.

A hash stands for all tokens of a request up to the end of a block, as vLLM's do. Two requests of a
trace have the same one where the same ids of prefix blocks reach that far. What is behind a
request's prefix blocks is its own: the rest of its prompt, and its output.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.workload.prefix import MOONCAKE_BLOCK_TOKENS, PrefixBlocks
from sterna.workload.trace import Trace

Hashes = NDArray[np.uint64]

ODD = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's increment, here to tell apart the places of ids."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockHashes:
    """The hashes of every request's full blocks, of prompt and whole output, in order.

    Attributes:
        hashes: int64[m], those of all requests, one request after the other.
        end: int64[n], the number of hashes of the requests up to and including this one.
        reusable_tokens: int64[n], what each request would find in one cache that forgets nothing
            and knows all earlier requests of the trace: whole blocks, without that of the prompt's
            last token.
    """

    hashes: NDArray[np.int64]
    end: NDArray[np.int64]
    reusable_tokens: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace, block_size: int) -> "BlockHashes":
        """The hashes of the trace's requests, in blocks of this number of tokens."""
        prefixes = trace.prefix_blocks
        if prefixes is None:
            nothing = np.zeros(0, np.int64)
            prefixes = PrefixBlocks(nothing, np.zeros(len(trace), np.int64), MOONCAKE_BLOCK_TOKENS)
        chains = _chains(prefixes)
        num_blocks = (trace.input_tokens + trace.output_tokens) // block_size
        end = np.cumsum(num_blocks)
        row = np.repeat(np.arange(len(trace)), num_blocks)
        # Of each block, the number of tokens from the request's first one to its end.
        num_tokens = (np.arange(len(row)) - (end - num_blocks)[row] + 1) * block_size
        num_ids = np.diff(prefixes.end, prepend=0)
        covered = trace.input_tokens if prefixes.num_tokens is None else prefixes.num_tokens
        num_shared_tokens = np.minimum(covered, num_ids * prefixes.block_tokens)
        # Where the ids reach that far, the chain that ends with the last of them.
        is_shared = num_tokens <= num_shared_tokens[row]
        last = (prefixes.end - num_ids)[row] + (num_tokens - 1) // prefixes.block_tokens
        own = _mixed(np.arange(len(trace), dtype=np.uint64) + np.uint64(1 << 63))
        content = own[row]
        content[is_shared] = chains[last[is_shared]]
        hashes = _mixed(content ^ _mixed(num_tokens.astype(np.uint64)))
        # A block that came before has all its predecessors before it, so that a count suffices.
        _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        is_known = row[first][which] < row
        is_known &= num_tokens < trace.input_tokens[row]
        num_known = np.bincount(row[is_known], minlength=len(trace))
        return cls(hashes.view(np.int64), end, num_known * block_size)

    def of_prompt(self, row: int, num_blocks: int) -> bytes:
        """Those of the first blocks of one request, 8 bytes each."""
        return self.of_request(row)[:num_blocks].tobytes()

    def of_request(self, row: int) -> NDArray[np.int64]:
        """The hashes of one request."""
        return self.hashes[self.end[row - 1] if row else 0 : self.end[row]]


def _chains(prefixes: PrefixBlocks) -> Hashes:
    """For each id, a hash of it and those before it in its prompt."""
    mixed = _mixed(prefixes.ids.astype(np.uint64) + ODD)
    chains = mixed.copy()
    num_ids = np.diff(prefixes.end, prepend=0)
    start = prefixes.end - num_ids
    for place in range(1, int(num_ids.max(initial=0))):
        here = start[num_ids > place] + place
        chains[here] = _mixed(chains[here - 1] * ODD + mixed[here])
    return chains


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64: a one-to-one map that changes half of the bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
