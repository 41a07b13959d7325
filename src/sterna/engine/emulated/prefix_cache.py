"""Contents of full blocks, which are found again by their hashes, as in vLLM's prefix cache. Pure.

Here are the contents; the core counts the blocks. A free block keeps its content until its memory
is needed: blocks without content are taken first, then those that were not used for longest. A
request gives its blocks back from the last one on, so that a prefix outlives what follows it.

A content may be there several times. vLLM does not merge blocks: a request computes the end of its
prompt itself even if it is cached, and two requests that are admitted from other instances bring
the same prefix twice. The first one of them is found.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sterna.engine.cache_changes import CacheRecorder


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block whose content can be found.

    Attributes:
        num_users: requests that hold it.
    """

    block_hash: int
    num_users: int = 1


class PrefixCache:
    """The contents of one engine's blocks.

    Args:
        recorder: gets all changes.
    """

    def __init__(self, recorder: CacheRecorder | None = None) -> None:
        self._recorder = recorder
        # The blocks of each content, in the order in which they got it.
        self._blocks: dict[int, list[CachedBlock]] = {}
        # Free blocks with content, the one that goes first in front.
        self._idle: OrderedDict[CachedBlock, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Free blocks with content."""
        return len(self._idle)

    def hashes(self) -> Iterable[int]:
        """The contents that can be found."""
        return self._blocks.keys()

    def find(self, block_hashes: Sequence[int], max_blocks: int) -> list[CachedBlock]:
        """The blocks of the longest prefix that is here, up to this number."""
        found = []
        for block_hash in block_hashes[:max_blocks]:
            blocks = self._blocks.get(block_hash)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def add(self, block_hash: int) -> CachedBlock:
        """Give a block that a request holds this content."""
        block = CachedBlock(block_hash)
        self._blocks.setdefault(block_hash, []).append(block)
        if self._recorder is not None:
            self._recorder.add(_unsigned(block_hash))
        return block

    def use(self, blocks: Iterable[CachedBlock]) -> int:
        """Have one more request hold these blocks; returns how many of them were free."""
        num_idle = 0
        for block in blocks:
            if block.num_users == 0:
                del self._idle[block]
                num_idle += 1
            block.num_users += 1
        return num_idle

    def leave(self, blocks: Sequence[CachedBlock]) -> int:
        """Have one request less hold these blocks; returns how many of them are free now."""
        num_idle = 0
        for block in reversed(blocks):
            block.num_users -= 1
            if block.num_users == 0:
                self._idle[block] = None
                num_idle += 1
        return num_idle

    def shrink(self, num_free_blocks: int) -> None:
        """Forget contents as long as there are more of them in free blocks than free blocks."""
        while len(self._idle) > num_free_blocks:
            block, _ = self._idle.popitem(last=False)
            blocks = self._blocks[block.block_hash]
            blocks.remove(block)
            if not blocks:
                del self._blocks[block.block_hash]
                if self._recorder is not None:
                    self._recorder.remove(_unsigned(block.block_hash))

    def clear(self) -> None:
        """Forget all contents, of which no request holds a block."""
        self._blocks.clear()
        self._idle.clear()
        if self._recorder is not None:
            self._recorder.clear()


def num_common(block_hashes: Sequence[int], others: Sequence[int]) -> int:
    """How many blocks two requests have in common. Equal hashes say that all before them are
    equal, too."""
    low, high = 0, min(len(block_hashes), len(others))
    while low < high:
        middle = (low + high) // 2
        if block_hashes[middle] == others[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def num_free(blocks: Iterable[CachedBlock]) -> int:
    """How many of the blocks no request holds."""
    return sum(block.num_users == 0 for block in blocks)


def _unsigned(block_hash: int) -> int:
    return block_hash & (1 << 64) - 1
