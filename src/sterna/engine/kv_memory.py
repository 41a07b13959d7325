"""KV memory of a request, for an engine with one or several KV cache groups. Pure.

vLLM divides the layers of a model into groups of equal attention. A group has a block table of its
own for each request, and all groups take their blocks from one pool, in which all blocks have the
same bytes. So memory is counted in blocks; views and loads count it in tokens, by multiplying with
one `block_tokens` for all groups. A request of a model with windows takes blocks in each group, but
in a windowed one never more than the window needs; its demand may be more or less than its length.
"""

import msgspec


class KvGroup(msgspec.Struct, frozen=True, array_like=True):
    """One KV cache group.

    Attributes:
        block_size: tokens a block.
        max_blocks: the blocks that a request needs at most to be admitted; None where its whole
            length needs blocks.
        num_extra_blocks: blocks beside those for its length, such as states for drafts.
    """

    block_size: int
    max_blocks: int | None = None
    num_extra_blocks: int = 0

    def num_blocks(self, num_tokens: int) -> int:
        """The blocks that a request of this length needs in order to run."""
        needed = -(-num_tokens // self.block_size) + self.num_extra_blocks
        return needed if self.max_blocks is None else min(needed, self.max_blocks)


class KvMemory(msgspec.Struct, frozen=True, array_like=True):
    """The groups of an engine, and the tokens for which one block counts in views and loads.

    Attributes:
        block_tokens: tokens for which a block of the pool counts: the block size of the group with
            full attention, where there is one.
    """

    block_tokens: int
    groups: tuple[KvGroup, ...]

    def num_blocks(self, num_tokens: int) -> int:
        """The blocks of the pool that a request of this length needs in order to run, without
        hits in the prefix cache; 0 for a length of 0."""
        return sum(group.num_blocks(num_tokens) for group in self.groups) if num_tokens else 0

    def demand_tokens(self, num_tokens: int) -> int:
        """The demand of a request of this length (Section 4.4.2), in tokens."""
        return self.num_blocks(num_tokens) * self.block_tokens


def one_group(block_size: int) -> KvMemory:
    """The memory of an engine whose layers all have full attention."""
    return KvMemory(block_size, (KvGroup(block_size),))
