"""Blocks of a simulated KV cache: their contents, the free ones, and the prefix cache.

Blocks have no bytes. Instead each has a name for the KV in it, which nothing else has.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from fault_simulation.virtual.timeline import Violation
from sterna.engine.cache_changes import CacheRecorder
from sterna.types import cache_key

Content = tuple[int, str, int, int]
"""The KV in a block: the number of its group, the request or the beginning of its prompt, the
number of tokens up to the last one in the block, and the digest of the outputs among these."""


@lru_cache(maxsize=100_000)
def block_hash(origin: str, end: int, digest: int) -> int:
    """The hash of all tokens up to the last one in a block."""
    return int.from_bytes(blake2b(f"{origin} {end} {digest}".encode(), digest_size=8).digest())


def key_of(content: Content) -> int:
    """The key of a block with this content in the prefix cache."""
    number, *what = content
    return cache_key(block_hash(*what), number)


@dataclass(slots=True, eq=False)
class Block:
    """A block of memory.

    Attributes:
        content: None: nothing that any request can use.
        key: the KV that it has by the prefix cache; None: it is not in it.
    """

    number: int
    content: Content | None = None
    key: Content | None = None
    is_free: bool = True


class Pool:
    """The blocks of all groups of an engine (`kv_columns.BlockPool`).

    Free blocks are used again by turns in the order in which they were freed, and against it. Reuse
    at once shows a read of a block that was given away; late reuse leaves blocks in the prefix
    cache. A free block outside of it has lost its content at once, as it may have in an engine.

    Attributes:
        null_block: stands in columns without a block.
        cached: the prefix cache.
        entered: blocks that entered it, for a checker, which clears the list.
        recorder: gets its changes, if instances report them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.null_block = Block(0, is_free=False)
        self.cached: dict[Content, Block] = {}
        self.entered: list[Block] = []
        self.recorder: CacheRecorder | None = None
        self._free = deque(Block(number) for number in range(1, num_blocks + 1))
        self._is_last_next = False

    @property
    def num_free(self) -> int:
        """Blocks that neither a request nor a reservation holds."""
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take free blocks, which leave the prefix cache."""
        return [self._get_new_block() for _ in range(num_blocks)]

    def _get_new_block(self) -> Block:
        self._is_last_next = not self._is_last_next
        block = self._free.pop() if self._is_last_next else self._free.popleft()
        block.is_free = False
        block.content = None
        if block.key is not None:
            del self.cached[block.key]
            if self.recorder is not None:
                self.recorder.remove(key_of(block.key))
            block.key = None
        return block

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Give blocks back; null blocks are left out.

        Raises:
            Violation: one is free already.
        """
        for block in ordered_blocks:
            if block is self.null_block:
                continue
            if block.is_free:
                raise Violation(f"block {block.number} is freed twice")
            block.is_free = True
            if block.key is None:
                block.content = None
            self._free.append(block)

    # --------------------------------------------------------------------------- prefix cache

    def enter(self, block: Block, key: Content) -> None:
        """Have the prefix cache find this KV in the block, if no other block has it."""
        if block is self.null_block or block.key is not None or key in self.cached:
            return
        block.key = key
        self.cached[key] = block
        self.entered.append(block)
        if self.recorder is not None:
            self.recorder.add(key_of(key))

    def find(self, key: Content) -> Block | None:
        """A free block that has this KV by the prefix cache.

        A block is not shared: one that a request holds is not found.
        """
        block = self.cached.get(key)
        return block if block is not None and block.is_free else None

    def take(self, block: Block) -> None:
        """Take a block that was found."""
        self._free.remove(block)
        block.is_free = False
