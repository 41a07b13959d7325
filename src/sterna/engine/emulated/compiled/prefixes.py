"""The prefix cache of an engine: the same as `engine.emulated.prefix_cache`, in tables.

Output blocks of a decoding request are put into the cache when it leaves the batch, by `remember`,
not one by one: no other request looks for them before.
"""

from typing import Any

from numba import njit

from sterna.engine.emulated.compiled.tables import NONE, Tables


@njit
def bucket_of(tables: Tables, block_hash: int) -> int:
    """The bucket in which the hash is found."""
    return block_hash & (tables.buckets.shape[1] - 1)


@njit
def find(tables: Tables, r: int, index: int) -> tuple[int, int]:
    """Find the blocks of the longest prefix of a request without memory, and note them as those
    that it would hold; returns their number, and how many of them are idle."""
    rule, request = tables.settings[0], tables.requests[index]
    if not rule.prefix_caching:
        return 0, 0
    num_tokens = request.prompt_tokens + request.num_output_tokens
    max_blocks = min((num_tokens - 1) // rule.block_size, request.num_hashes)
    num_idle = 0
    for place in range(request.first_hash, request.first_hash + max_blocks):
        block_hash = tables.hashes[place]
        found = tables.buckets[r, bucket_of(tables, block_hash)]
        while found != NONE and tables.cached[r, found].block_hash != block_hash:
            found = tables.cached[r, found].next
        if found == NONE:
            return place - request.first_hash, num_idle
        tables.held[place] = found
        if tables.cached[r, found].num_users == 0:
            num_idle += 1
    return max_blocks, num_idle


@njit
def use(tables: Tables, r: int, index: int, num_blocks: int) -> None:
    """Have the request hold the blocks that `find` noted."""
    row, request = tables.rows[r], tables.requests[index]
    for place in range(request.first_hash, request.first_hash + num_blocks):
        number = tables.held[place]
        block = tables.cached[r, number]
        if block.num_users == 0:
            unlink_idle(tables, r, number)
            row.free_blocks -= 1
        block.num_users += 1
    request.num_cached = num_blocks


@njit
def unlink_idle(tables: Tables, r: int, number: int) -> None:
    """Take the block out of the list of idle ones."""
    row, block = tables.rows[r], tables.cached[r, number]
    if block.before == NONE:
        row.first_idle = block.behind
    else:
        tables.cached[r, block.before].behind = block.behind
    if block.behind == NONE:
        row.last_idle = block.before
    else:
        tables.cached[r, block.behind].before = block.before
    row.num_idle -= 1


@njit
def remember(tables: Tables, r: int, index: int, num_full_blocks: int) -> None:
    """Have the first blocks of the request, up to this number, be found."""
    if not tables.settings[0].prefix_caching:
        return
    row, request = tables.rows[r], tables.requests[index]
    first = request.first_hash + request.num_cached
    behind = request.first_hash + min(num_full_blocks, request.num_hashes)
    for place in range(first, behind):
        number = row.first_unused
        block = tables.cached[r, number]
        row.first_unused = block.behind
        block.block_hash = tables.hashes[place]
        block.num_users = 1
        block.next = NONE
        # Behind all others of its bucket, so that of the same content the first one is found.
        bucket = bucket_of(tables, block.block_hash)
        other = tables.buckets[r, bucket]
        if other == NONE:
            tables.buckets[r, bucket] = number
        else:
            while tables.cached[r, other].next != NONE:
                other = tables.cached[r, other].next
            tables.cached[r, other].next = number
        tables.held[place] = number
    request.num_cached = max(request.num_cached, behind - request.first_hash)


@njit
def leave(tables: Tables, r: int, held: Any) -> int:
    """Have one request less hold these blocks; returns how many of them others still hold."""
    row = tables.rows[r]
    num_others = 0
    for place in range(len(held) - 1, -1, -1):
        number = held[place]
        block = tables.cached[r, number]
        block.num_users -= 1
        if block.num_users > 0:
            num_others += 1
            continue
        block.before = row.last_idle
        block.behind = NONE
        if row.last_idle == NONE:
            row.first_idle = number
        else:
            tables.cached[r, row.last_idle].behind = number
        row.last_idle = number
        row.num_idle += 1
    return num_others


@njit
def free(tables: Tables, r: int, index: int, num_blocks: int) -> None:
    """Free the blocks that the request holds."""
    row, request = tables.rows[r], tables.requests[index]
    first = request.first_hash
    num_others = leave(tables, r, tables.held[first : first + request.num_cached])
    row.free_blocks += num_blocks - num_others
    row.used_blocks -= num_blocks
    request.num_cached = 0


@njit
def take(tables: Tables, r: int, num_blocks: int) -> None:
    """Take free blocks. Their contents are lost, those that were not used for longest first; blocks
    without content go before all others."""
    row = tables.rows[r]
    row.free_blocks -= num_blocks
    while row.num_idle > row.free_blocks:
        number = row.first_idle
        unlink_idle(tables, r, number)
        block = tables.cached[r, number]
        bucket = bucket_of(tables, block.block_hash)
        other = tables.buckets[r, bucket]
        if other == number:
            tables.buckets[r, bucket] = block.next
        else:
            while tables.cached[r, other].next != number:
                other = tables.cached[r, other].next
            tables.cached[r, other].next = block.next
        block.behind = row.first_unused
        row.first_unused = number
