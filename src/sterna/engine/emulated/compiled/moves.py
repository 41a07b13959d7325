"""Effects of migrations on an engine between two steps: drain, resume, adopt."""

from numba import njit

from sterna.engine.emulated.compiled.batch import (
    begin_decoding,
    end_decoding,
    join_batch,
    leave_batch,
)
from sterna.engine.emulated.compiled.prefixes import remember
from sterna.engine.emulated.compiled.queue import enqueue, enqueue_in_front, unlink
from sterna.engine.emulated.compiled.tables import (
    DECODING,
    DRAINED,
    DRAINED_QUEUING,
    QUEUING,
    Tables,
)


@njit
def drain(tables: Tables, r: int, index: int) -> None:
    """Take the request out of the batch or the queue; it keeps its memory."""
    row, request = tables.rows[r], tables.requests[index]
    if request.state == QUEUING:
        unlink(tables, r, index)
        request.state = DRAINED_QUEUING
        return
    leave_batch(tables, r, index)
    if request.state == DECODING:
        end_decoding(tables, r, index)
    else:
        row.num_prefilling -= 1
    # Reports still count it among the running requests.
    tables.counts[r, request.priority] += 1
    request.state = DRAINED
    row.num_drained += 1


@njit
def resume(tables: Tables, r: int, index: int) -> None:
    """Put the drained request back, as `EmulatedCore.resume` does."""
    row, request = tables.rows[r], tables.requests[index]
    if request.state == DRAINED_QUEUING:
        enqueue_in_front(tables, r, index)
        return
    row.num_drained -= 1
    tables.counts[r, request.priority] -= 1
    join_batch(tables, r, index)
    begin_decoding(tables, r, index)


@njit
def adopt(tables: Tables, r: int, index: int, num_blocks: int) -> None:
    """Add a migrated request, whose blocks were taken out of its reservation."""
    row, request = tables.rows[r], tables.requests[index]
    request.num_blocks = num_blocks
    request.num_earlier_tokens = request.num_output_tokens
    # What its source still holds is known there.
    request.num_cached = 0
    request.shared_tokens = 0
    if num_blocks > 0:
        row.used_blocks += num_blocks
        rule = tables.settings[0]
        if rule.prefix_caching:
            remember(tables, r, index, request.num_computed_tokens // rule.block_size)
        join_batch(tables, r, index)
        begin_decoding(tables, r, index)
        return
    request.num_computed_tokens = 0
    if request.num_output_tokens > 0:
        request.is_preempted = 1
        enqueue_in_front(tables, r, index)
    else:
        # It may have been preempted in its prompt; here it counts as a new one.
        request.is_preempted = 0
        enqueue(tables, r, index)
