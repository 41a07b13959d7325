"""The running batch, and the sums by which requests decode without an update of their rows."""

from numba import njit

from sterna.engine.emulated.compiled.prefixes import remember
from sterna.engine.emulated.compiled.queue import num_blocks_of
from sterna.engine.emulated.compiled.tables import ABSENT, DECODING, NEVER, Tables


@njit
def join_batch(tables: Tables, r: int, index: int) -> None:
    """Insert the request into the batch, in the order in which requests get memory."""
    row, newcomer = tables.rows[r], tables.requests[index]
    place = row.num_running
    if tables.settings[0].is_by_arrival:
        while place > 0:
            other = tables.requests[tables.running[r, place - 1]]
            if other.priority == newcomer.priority:
                if other.arrival_s <= newcomer.arrival_s:
                    break
            elif other.priority > newcomer.priority:
                break
            tables.running[r, place] = tables.running[r, place - 1]
            place -= 1
    tables.running[r, place] = index
    row.num_running += 1
    newcomer.row = r
    tables.counts[r, newcomer.priority] += 1


@njit
def leave_batch(tables: Tables, r: int, index: int) -> None:
    """Remove the request from the batch."""
    row = tables.rows[r]
    place = 0
    while tables.running[r, place] != index:
        place += 1
    for later in range(place + 1, row.num_running):
        tables.running[r, later - 1] = tables.running[r, later]
    row.num_running -= 1
    tables.counts[r, tables.requests[index].priority] -= 1


@njit
def begin_decoding(tables: Tables, r: int, index: int) -> None:
    """From now on the request's length follows from the engine's counter."""
    row, request = tables.rows[r], tables.requests[index]
    num_tokens = request.prompt_tokens + request.num_output_tokens
    request.state = DECODING
    request.offset = num_tokens - row.counter
    request.finish_at = row.counter + request.output_tokens - request.num_output_tokens
    request.execution_mark_ns = row.execution_ns
    row.next_finish = min(row.next_finish, request.finish_at)
    row.offset_sum += request.offset
    row.num_decoding += 1
    tables.remainders[r, request.offset % tables.settings[0].block_size] += 1


@njit
def end_decoding(tables: Tables, r: int, index: int) -> None:
    """From now on the request's length is stored in its row."""
    row, request = tables.rows[r], tables.requests[index]
    block_size = tables.settings[0].block_size
    num_blocks = num_blocks_of(row, request, block_size)
    request.num_output_tokens = request.offset + row.counter - request.prompt_tokens
    request.num_computed_tokens = request.offset + row.counter - 1
    request.num_blocks = num_blocks
    if tables.settings[0].prefix_caching:
        remember(tables, r, index, request.num_computed_tokens // block_size)
    request.execution_ns += row.execution_ns - request.execution_mark_ns
    request.state = ABSENT
    row.offset_sum -= request.offset
    row.num_decoding -= 1
    tables.remainders[r, request.offset % block_size] -= 1
    if request.finish_at == row.next_finish:
        find_next_finish(tables, r)


@njit
def find_next_finish(tables: Tables, r: int) -> None:
    """Compute `next_finish`, the counter at which the next decoding request finishes."""
    row = tables.rows[r]
    row.next_finish = NEVER
    for place in range(row.num_running):
        request = tables.requests[tables.running[r, place]]
        if request.state == DECODING:
            row.next_finish = min(row.next_finish, request.finish_at)
