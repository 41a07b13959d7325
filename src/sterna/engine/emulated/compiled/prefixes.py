"""The prefix cache of an engine: the same as `engine.emulated.prefix_cache`, in tables.

Output blocks of a decoding request are put into the cache when it leaves the batch, by `remember`,
not one by one: no other request looks for them before.

Callers ask first whether there is a prefix cache: a call takes as long as many steps.
"""

from typing import Any

from numba import njit

from sterna.engine.emulated.compiled.pointers import contents_of
from sterna.engine.emulated.compiled.tables import NONE, PREFILLING, Contents, Tables


@njit
def bucket_of(contents: Contents, block_hash: int) -> int:
    """The bucket in which the hash is found."""
    return block_hash & (contents.buckets.shape[1] - 1)


@njit
def look_up(contents: Contents, r: int, block_hash: int) -> int:
    """The block with this content, or NONE."""
    found: int = contents.buckets[r, bucket_of(contents, block_hash)]
    while found != NONE and contents.cached[r, found].block_hash != block_hash:
        found = contents.cached[r, found].next
    return found


@njit
def find(tables: Tables, r: int, index: int) -> tuple[int, int]:
    """Find the blocks of the longest prefix of a request without memory, and note them as those
    that it would hold; returns their number, and how many of them are idle."""
    rule, request = tables.settings[0], tables.requests[index]
    contents = contents_of(tables)
    num_tokens = request.prompt_tokens + request.num_output_tokens
    max_blocks = min((num_tokens - 1) // rule.block_size, request.num_hashes)
    num_idle = 0
    for place in range(request.first_hash, request.first_hash + max_blocks):
        found = look_up(contents, r, contents.hashes[place])
        if found == NONE:
            return place - request.first_hash, num_idle
        contents.held[place] = found
        if contents.cached[r, found].num_users == 0:
            num_idle += 1
    return max_blocks, num_idle


@njit
def num_found(tables: Tables, r: int, index: int) -> int:
    """The number of blocks of the request's prompt, without that of its last token, that are here.
    The request itself may be anywhere: `find` would note other blocks than it holds."""
    rule, request = tables.settings[0], tables.requests[index]
    contents = contents_of(tables)
    max_blocks = min((request.prompt_tokens - 1) // rule.block_size, request.num_hashes)
    for place in range(max_blocks):
        if look_up(contents, r, contents.hashes[request.first_hash + place]) == NONE:
            return place
    return max_blocks


@njit
def num_common(tables: Tables, index: int, other: int) -> int:
    """How many blocks of the request's prompt, without that of its last token, are those of the
    other request's tokens."""
    block_size = tables.settings[0].block_size
    mine, its = tables.requests[index], tables.requests[other]
    hashes = contents_of(tables).hashes
    its_tokens = its.prompt_tokens + its.num_output_tokens
    low = 0
    high = min(
        min((mine.prompt_tokens - 1) // block_size, mine.num_hashes),
        min(its_tokens // block_size, its.num_hashes),
    )
    while low < high:
        middle = (low + high) // 2
        if hashes[mine.first_hash + middle] == hashes[its.first_hash + middle]:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def list_coming(tables: Tables, index: int, listed: Any) -> None:
    """List for each engine the tokens that the request would not have to compute there; see
    `EmulatedCore.coming_tokens`."""
    for r in range(tables.rows.shape[0]):
        row = tables.rows[r]
        if row.exists == 0:
            continue
        num_blocks = num_found(tables, r, index)
        other = row.first
        while other != NONE:
            num_blocks = max(num_blocks, num_common(tables, index, other))
            other = tables.requests[other].behind
        if row.num_prefilling > 0:
            for place in range(row.num_running):
                other = tables.running[r, place]
                if tables.requests[other].state == PREFILLING:
                    num_blocks = max(num_blocks, num_common(tables, index, other))
        listed[r] = num_blocks * tables.settings[0].block_size


@njit
def use(tables: Tables, r: int, index: int, num_blocks: int) -> None:
    """Have the request hold the blocks that `find` noted."""
    request = tables.requests[index]
    contents = contents_of(tables)
    for place in range(request.first_hash, request.first_hash + num_blocks):
        use_block(tables, r, contents.held[place])
    request.num_cached = num_blocks


@njit
def use_block(tables: Tables, r: int, number: int) -> None:
    """Have one more request hold the block."""
    row, block = tables.rows[r], contents_of(tables).cached[r, number]
    if block.num_users == 0:
        unlink_idle(tables, r, number)
        row.free_blocks -= 1
    block.num_users += 1


@njit
def keep_prefix(tables: Tables, r: int, index: int, first_block: int, listed: Any) -> int:
    """Hold the blocks of the request's prompt that are here, from this one on, and list them;
    returns their number. The request itself may be anywhere."""
    contents, request = contents_of(tables), tables.requests[index]
    num_listed = 0
    for place in range((request.prompt_tokens - 1) // tables.settings[0].block_size):
        number = look_up(contents, r, contents.hashes[request.first_hash + place])
        if number == NONE:
            break
        if place >= first_block:
            listed[num_listed] = number
            num_listed += 1
    for place in range(num_listed):
        use_block(tables, r, listed[place])
    return num_listed


@njit
def adopt_prefix(
    tables: Tables, r: int, index: int, first_block: int, num_blocks: int, listed: Any
) -> None:
    """Enter blocks with these contents of the request's prompt as idle ones. The request itself may
    be anywhere."""
    first = tables.requests[index].first_hash + first_block
    for place in range(num_blocks):
        listed[place] = enter(tables, r, contents_of(tables).hashes[first + place])
    leave(tables, r, listed[:num_blocks])


@njit
def unlink_idle(tables: Tables, r: int, number: int) -> None:
    """Take the block out of the list of idle ones."""
    contents = contents_of(tables)
    row, block = tables.rows[r], contents.cached[r, number]
    if block.before == NONE:
        row.first_idle = block.behind
    else:
        contents.cached[r, block.before].behind = block.behind
    if block.behind == NONE:
        row.last_idle = block.before
    else:
        contents.cached[r, block.behind].before = block.before
    row.num_idle -= 1


@njit
def remember(tables: Tables, r: int, index: int, num_full_blocks: int) -> None:
    """Have the first blocks of the request, up to this number, be found."""
    request = tables.requests[index]
    contents = contents_of(tables)
    first = request.first_hash + request.num_cached
    behind = request.first_hash + min(num_full_blocks, request.num_hashes)
    for place in range(first, behind):
        contents.held[place] = enter(tables, r, contents.hashes[place])
    request.num_cached = max(request.num_cached, behind - request.first_hash)


@njit
def enter(tables: Tables, r: int, block_hash: int) -> int:
    """Give a block that is held this content; returns the block."""
    row, contents = tables.rows[r], contents_of(tables)
    number: int = row.first_unused
    block = contents.cached[r, number]
    row.first_unused = block.behind
    block.block_hash = block_hash
    block.num_users = 1
    block.next = NONE
    # Behind all others of its bucket, so that of the same content the first one is found.
    bucket = bucket_of(contents, block_hash)
    other = contents.buckets[r, bucket]
    if other == NONE:
        contents.buckets[r, bucket] = number
        return number
    while contents.cached[r, other].next != NONE:
        other = contents.cached[r, other].next
    contents.cached[r, other].next = number
    return number


@njit
def leave(tables: Tables, r: int, held: Any) -> int:
    """Have one request less hold these blocks; returns how many of them others still hold."""
    row = tables.rows[r]
    contents = contents_of(tables)
    num_others = 0
    for place in range(len(held) - 1, -1, -1):
        number = held[place]
        block = contents.cached[r, number]
        block.num_users -= 1
        if block.num_users > 0:
            num_others += 1
            continue
        block.before = row.last_idle
        block.behind = NONE
        if row.last_idle == NONE:
            row.first_idle = number
        else:
            contents.cached[r, row.last_idle].behind = number
        row.last_idle = number
        row.num_idle += 1
    return num_others


@njit
def free(tables: Tables, r: int, index: int, num_blocks: int) -> None:
    """Free the blocks that the request holds."""
    row, request = tables.rows[r], tables.requests[index]
    row.free_blocks += num_blocks
    if request.num_cached > 0:
        first = request.first_hash
        held = contents_of(tables).held[first : first + request.num_cached]
        row.free_blocks -= leave(tables, r, held)
    row.used_blocks -= num_blocks
    request.num_cached = 0


@njit
def forget(tables: Tables, r: int) -> None:
    """Forget contents as long as there are more of them in free blocks than free blocks, those that
    were not used for longest first. Needed after free blocks were taken."""
    row = tables.rows[r]
    contents = contents_of(tables)
    while row.num_idle > row.free_blocks:
        number = row.first_idle
        unlink_idle(tables, r, number)
        block = contents.cached[r, number]
        bucket = bucket_of(contents, block.block_hash)
        other = contents.buckets[r, bucket]
        if other == number:
            contents.buckets[r, bucket] = block.next
        else:
            while contents.cached[r, other].next != number:
                other = contents.cached[r, other].next
            contents.cached[r, other].next = block.next
        block.behind = row.first_unused
        row.first_unused = number
