"""Queue of an engine, and the length and memory of its requests."""

from typing import Any

from numba import njit

from sterna.engine.emulated.compiled.prefixes import find
from sterna.engine.emulated.compiled.tables import DECODING, NONE, PREFILLING, QUEUING, Tables


@njit
def num_tokens_of(row: Any, request: Any) -> int:
    """Tokens of prompt and output so far."""
    if request.state == DECODING:
        return request.offset + row.counter
    return request.prompt_tokens + request.num_output_tokens


@njit
def num_computed_of(row: Any, request: Any) -> int:
    """Tokens whose KV is computed."""
    if request.state == DECODING:
        return request.offset + row.counter - 1
    return request.num_computed_tokens


@njit
def is_computed_now(row: Any, request: Any) -> bool:
    """Whether the step under way decodes the request."""
    if row.is_stepping == 0 or row.has_decodes == 0:
        return False
    return row.has_all_decodes == 1 or request.scheduled > 0


@njit
def num_blocks_of(row: Any, request: Any, block_size: int) -> int:
    """Blocks that the request holds."""
    if request.state != DECODING:
        return request.num_blocks
    num_tokens = request.offset + row.counter - 1
    if is_computed_now(row, request):
        num_tokens += 1
    return -(-num_tokens // block_size)


@njit
def is_prefilling(row: Any, request: Any) -> bool:
    """Whether KV of more than its last token is missing."""
    if request.state != PREFILLING:
        return False
    num_tokens = request.prompt_tokens + request.num_output_tokens
    return request.num_output_tokens == 0 or request.num_computed_tokens < num_tokens - 1


@njit
def demand_of(request: Any, block_size: int) -> int:
    """Blocks for all its tokens."""
    return -(-(request.prompt_tokens + request.num_output_tokens) // block_size)


@njit
def queued_pairs_of(request: Any) -> int:
    """Pairs of attending tokens that the queuing request lacks (`types.pairs_of`)."""
    num_tokens = request.prompt_tokens + request.num_output_tokens
    return request.uncomputed_tokens * (2 * num_tokens - request.uncomputed_tokens)


@njit
def link(tables: Tables, r: int, index: int, behind: int) -> None:
    """Insert the request in front of `behind`, or at the end of the queue."""
    row, request = tables.rows[r], tables.requests[index]
    before = row.last if behind == NONE else tables.requests[behind].before
    request.before = before
    request.behind = behind
    if before == NONE:
        row.first = index
    else:
        tables.requests[before].behind = index
    if behind == NONE:
        row.last = index
    else:
        tables.requests[behind].before = index
    request.state = QUEUING
    request.row = r
    row.num_queuing += 1
    row.num_preempted_queuing += 1 if request.num_preemptions > 0 else 0
    rule = tables.settings[0]
    row.queued_blocks += demand_of(request, rule.block_size)
    request.uncomputed_tokens = request.prompt_tokens + request.num_output_tokens
    if rule.prefix_caching:
        num_found, _ = find(tables, r, index)
        request.uncomputed_tokens -= num_found * rule.block_size
    row.queued_uncomputed_tokens += request.uncomputed_tokens
    row.queued_uncomputed_pairs += queued_pairs_of(request)


@njit
def unlink(tables: Tables, r: int, index: int) -> None:
    """Take the request out of the queue."""
    row, request = tables.rows[r], tables.requests[index]
    if request.before == NONE:
        row.first = request.behind
    else:
        tables.requests[request.before].behind = request.behind
    if request.behind == NONE:
        row.last = request.before
    else:
        tables.requests[request.behind].before = request.before
    row.num_queuing -= 1
    row.num_preempted_queuing -= 1 if request.num_preemptions > 0 else 0
    row.queued_blocks -= demand_of(request, tables.settings[0].block_size)
    row.queued_uncomputed_tokens -= request.uncomputed_tokens
    row.queued_uncomputed_pairs -= queued_pairs_of(request)


@njit
def enqueue(tables: Tables, r: int, index: int) -> None:
    """Queue behind those of higher priority, the preempted and the earlier of the same; see
    `EmulatedCore._enqueue`."""
    newcomer = tables.requests[index]
    is_by_urgency = tables.settings[0].is_by_urgency == 1
    behind = NONE
    before = tables.rows[r].last
    while before != NONE:
        other = tables.requests[before]
        if other.priority == newcomer.priority:
            stays_in_front = other.is_preempted == 1 and not is_by_urgency
            comes_after = not stays_in_front and other.arrival_s > newcomer.arrival_s
        else:
            comes_after = other.priority < newcomer.priority
        if not comes_after:
            break
        behind = before
        before = other.before
    link(tables, r, index, behind)


@njit
def enqueue_in_front(tables: Tables, r: int, index: int) -> None:
    """Queue in front of all requests of the same priority; see `EmulatedCore._enqueue_in_front`."""
    if tables.settings[0].is_by_urgency:
        enqueue(tables, r, index)
        return
    behind = tables.rows[r].first
    while behind != NONE and tables.requests[behind].priority > tables.requests[index].priority:
        behind = tables.requests[behind].behind
    link(tables, r, index, behind)
