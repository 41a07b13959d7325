"""What the engines report."""

from typing import Any

from numba import njit

from sterna.engine.emulated.compiled.queue import (
    demand_of,
    is_prefilling,
    num_blocks_of,
    num_computed_of,
    num_tokens_of,
)
from sterna.engine.emulated.compiled.tables import (
    DECODING,
    DRAINED_QUEUING,
    LIVE,
    LONGEST,
    NO_VICTIM,
    NONE,
    PREFILLING,
    QUEUING,
    REPORTED,
    SHORTEST,
    Tables,
)


@njit(cache=True)
def take_report(tables: Tables, which: int, r: int) -> None:
    """Write down the sums of the engine's state."""
    row, report, rule = tables.rows[r], tables.reports[which, r], tables.settings[0]
    report.used_blocks = row.used_blocks
    report.reserved_blocks = row.reserved_blocks
    report.num_running = row.num_running + row.num_drained
    report.num_queuing = row.num_queuing
    report.num_preempted_queuing = row.num_preempted_queuing
    report.head_blocks = 0
    if row.first != NONE:
        report.head_blocks = demand_of(tables.requests[row.first], rule.block_size)
    report.queued_blocks = row.queued_blocks
    report.num_preemptions = row.num_preemptions
    report.last_dispatch = row.last_dispatch
    report.move_blocks = NONE
    if rule.victim != NO_VICTIM:
        index = find_victim(tables, r)
        if index != NONE:
            report.move_blocks = num_blocks_of(row, tables.requests[index], rule.block_size)
    for priority in range(tables.counts.shape[2]):
        tables.counts[which, r, priority] = tables.counts[LIVE, r, priority]


@njit(cache=True)
def find_victim(tables: Tables, r: int) -> int:
    """The running request that would move first; `policy.selection` decides, this foretells."""
    row, rule = tables.rows[r], tables.settings[0]
    found, found_priority, found_rank = NONE, 0, 0
    for place in range(row.num_running):
        index = tables.running[r, place]
        request = tables.requests[index]
        if is_prefilling(row, request):
            continue
        priority = request.priority if rule.has_priorities else 0
        rank = -place
        if rule.victim == SHORTEST:
            rank = num_tokens_of(row, request)
        elif rule.victim == LONGEST:
            rank = -num_tokens_of(row, request)
        is_better = found == NONE or priority < found_priority
        if not is_better and priority == found_priority:
            is_better = rank < found_rank or (rank == found_rank and index < found)
        if is_better:
            found, found_priority, found_rank = index, priority, rank
    return found


@njit(cache=True)
def collect_changed(tables: Tables, changed: Any) -> int:
    """List the engines that may have something to report; returns how many."""
    num_changed = 0
    for r in range(tables.rows.shape[0]):
        row = tables.rows[r]
        if row.exists == 0 or row.has_changed == 0:
            continue
        row.has_changed = 0
        if tables.settings[0].is_live:
            take_report(tables, REPORTED, r)
        changed[num_changed] = r
        num_changed += 1
    return num_changed


@njit(cache=True)
def list_running(tables: Tables, r: int, listed: Any) -> int:
    """Write down the running requests, one a row, in order; returns how many they are.

    A row is: place in the trace, tokens, blocks, whether it is prefilling.
    """
    row = tables.rows[r]
    for place in range(row.num_running):
        index = tables.running[r, place]
        request = tables.requests[index]
        listed[place, 0] = index
        listed[place, 1] = num_tokens_of(row, request)
        listed[place, 2] = num_blocks_of(row, request, tables.settings[0].block_size)
        listed[place, 3] = is_prefilling(row, request)
    return row.num_running


@njit(cache=True)
def progress_of(tables: Tables, r: int, index: int) -> tuple[bool, bool, int, int, bool]:
    """Whether the request runs or queues on the engine, whether it queues, its tokens with KV,
    its preemptions, and whether it is prefilling."""
    row, request = tables.rows[r], tables.requests[index]
    is_here = request.row == r and (
        request.state == QUEUING or request.state == DECODING or request.state == PREFILLING
    )
    return (
        is_here,
        request.state == QUEUING or request.state == DRAINED_QUEUING,
        num_computed_of(row, request),
        request.num_preemptions,
        is_prefilling(row, request),
    )
