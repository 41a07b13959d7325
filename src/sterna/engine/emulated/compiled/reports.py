"""Reports of the engines: sums of their state, changes, and lists of requests."""

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
    BALANCE_BLOCKS,
    BY_PRIORITY,
    DECODING,
    DRAINED_QUEUING,
    FOR_BALANCE,
    FREEING,
    HEAD_BLOCKS,
    LARGE_PROMPTS,
    LAST_DISPATCH,
    LISTED,
    LONGEST,
    MOVE_BLOCKS,
    MOVE_PRIORITY,
    NEVER,
    NO_VICTIM,
    NONE,
    NUM_HELD_SLOTS,
    NUM_LENGTHS,
    NUM_PREEMPTED_QUEUING,
    NUM_PREEMPTIONS,
    NUM_QUEUING,
    NUM_RUNNING,
    PREFILL_BLOCKS,
    PREFILLING,
    QUEUED_BLOCKS,
    QUEUING,
    REPORTED,
    RESERVED_BLOCKS,
    SHORTEST,
    UNCOMPUTED_PAIRS,
    UNCOMPUTED_TOKENS,
    USED_BLOCKS,
    Tables,
)


@njit
def take_report(tables: Tables, which: int, r: int) -> None:
    """Store the sums of the engine's state."""
    row, report, rule = tables.rows[r], tables.reports[which, r], tables.settings[0]
    # Blocks that several requests hold count once.
    report[USED_BLOCKS] = rule.num_blocks - row.free_blocks - row.reserved_blocks
    report[RESERVED_BLOCKS] = row.reserved_blocks
    num_prefill_blocks, num_prefill_tokens, num_prefill_pairs = left_to_prefill(tables, r)
    report[PREFILL_BLOCKS] = num_prefill_blocks
    report[UNCOMPUTED_TOKENS] = row.queued_uncomputed_tokens + num_prefill_tokens
    report[UNCOMPUTED_PAIRS] = row.queued_uncomputed_pairs + num_prefill_pairs
    report[NUM_HELD_SLOTS] = row.num_held_slots
    report[NUM_RUNNING] = row.num_running + row.num_drained
    report[NUM_QUEUING] = row.num_queuing
    report[NUM_PREEMPTED_QUEUING] = row.num_preempted_queuing
    report[HEAD_BLOCKS] = 0
    if row.first != NONE:
        report[HEAD_BLOCKS] = demand_of(tables.requests[row.first], rule.block_size)
    report[QUEUED_BLOCKS] = row.queued_blocks
    report[NUM_PREEMPTIONS] = row.num_preemptions
    report[LAST_DISPATCH] = row.last_dispatch
    report[MOVE_BLOCKS] = report[MOVE_PRIORITY] = NONE
    report[BALANCE_BLOCKS] = NONE
    if rule.victim != NO_VICTIM:
        index = find_victim(tables, r, rule.victim)
        if index != NONE:
            report[MOVE_BLOCKS] = num_blocks_of(row, tables.requests[index], rule.block_size)
            report[MOVE_PRIORITY] = tables.requests[index].priority
        if rule.balances:
            index = find_victim(tables, r, FOR_BALANCE)
            if index != NONE:
                report[BALANCE_BLOCKS] = num_blocks_of(row, tables.requests[index], rule.block_size)
    for priority in range(tables.counts.shape[1] - NUM_LENGTHS):
        report[BY_PRIORITY + priority] = tables.counts[r, priority]
    list_large_prompts(tables, report, r)


@njit
def list_large_prompts(tables: Tables, report: Any, r: int) -> None:
    """Store the newest of the running requests whose prompts are large and computed."""
    row, place, end = tables.rows[r], LARGE_PROMPTS, BY_PRIORITY
    report[place:end] = NONE
    if tables.settings[0].large_tokens == NEVER:
        return
    for running in range(row.num_running - 1, -1, -1):
        index = tables.running[r, running]
        request = tables.requests[index]
        is_large = request.prompt_tokens > tables.settings[0].large_tokens
        if is_large and not is_prefilling(row, request):
            report[place] = index
            place += 1
            if place == end:
                break


@njit
def left_to_prefill(tables: Tables, r: int) -> tuple[int, int, int]:
    """Blocks that requests in the batch still need for their whole prompts, and the tokens and
    pairs of attending tokens of these that are not computed."""
    row, block_size = tables.rows[r], tables.settings[0].block_size
    num_blocks = num_tokens = num_pairs = 0
    if row.num_prefilling > 0:
        for place in range(row.num_running):
            request = tables.requests[tables.running[r, place]]
            if is_prefilling(row, request):
                num_blocks += max(0, demand_of(request, block_size) - request.num_blocks)
                num_whole, num_computed = num_tokens_of(row, request), request.num_computed_tokens
                num_tokens += num_whole - num_computed
                num_pairs += num_whole * num_whole - num_computed * num_computed
    return num_blocks, num_tokens, num_pairs


@njit
def has_room(tables: Tables, r: int, num_blocks: int, growth_steps: float) -> bool:
    """Whether there is memory for a request of this demand beside all that run or queue and what
    they may need further in as many steps, and a place in the batch."""
    row, rule = tables.rows[r], tables.settings[0]
    num_requests = row.num_running + row.num_drained + row.num_queuing
    if num_requests + row.num_held_slots >= rule.max_num_seqs:
        return False
    spare_blocks = max(rule.watermark_blocks, rule.min_free_blocks)
    room_blocks = row.free_blocks - spare_blocks - row.queued_blocks - num_blocks
    growth_tokens = growth_steps * num_requests
    if room_blocks * rule.block_size < growth_tokens:
        return False
    num_prefill_blocks, _, _ = left_to_prefill(tables, r)
    return (room_blocks - num_prefill_blocks) * rule.block_size >= growth_tokens


@njit
def list_changed(tables: Tables, listed: Any) -> int:
    """List the reports that changed since they were last listed; returns their number.

    A row of the list: the engine, then its report.
    """
    num_listed = 0
    for r in range(tables.rows.shape[0]):
        row = tables.rows[r]
        if row.exists == 0 or row.has_changed == 0:
            continue
        row.has_changed = 0
        if tables.settings[0].is_live:
            take_report(tables, REPORTED, r)
        has_changed = False
        for place in range(tables.reports.shape[2]):
            if tables.reports[LISTED, r, place] != tables.reports[REPORTED, r, place]:
                has_changed = True
                break
        if has_changed:
            listed[num_listed, 0] = r
            for place in range(tables.reports.shape[2]):
                tables.reports[LISTED, r, place] = tables.reports[REPORTED, r, place]
                listed[num_listed, 1 + place] = tables.reports[REPORTED, r, place]
            num_listed += 1
    return num_listed


@njit
def find_victim(tables: Tables, r: int, victim: int) -> int:
    """The running request that would move first by this rule, as a prediction of
    `policy.selection`."""
    row, rule = tables.rows[r], tables.settings[0]
    found, found_priority, found_rank = NONE, 0, 0
    for place in range(row.num_running):
        index = tables.running[r, place]
        request = tables.requests[index]
        if is_prefilling(row, request):
            continue
        priority = request.priority if rule.has_priorities else 0
        rank = -place
        if victim == SHORTEST:
            rank = num_tokens_of(row, request)
        elif victim == LONGEST:
            rank = -num_tokens_of(row, request)
        elif victim == FREEING:
            num_tokens = num_tokens_of(row, request)
            num_own_tokens = max(1, num_tokens - request.shared_tokens)
            rank = ((num_tokens << 10) // num_own_tokens << 32) + num_tokens
        elif victim == FOR_BALANCE:
            rank = request.prompt_tokens - num_tokens_of(row, request)
            if -rank - request.num_earlier_tokens < rule.balance_after_tokens:
                continue
        is_better = found == NONE or priority < found_priority
        if not is_better and priority == found_priority:
            is_better = rank < found_rank or (rank == found_rank and index < found)
        if is_better:
            found, found_priority, found_rank = index, priority, rank
    return found


@njit
def list_requests(tables: Tables, r: int, listed: Any) -> int:
    """List the running requests in order, then the queuing ones; returns the number of running.

    A row of the list: place in the trace, prompt and output so far, prompt, blocks held, priority,
    preemptions, whether it is prefilling, tokens to compute, output tokens that it came with, and
    tokens that it found. The list has room for all.
    """
    row = tables.rows[r]
    for place in range(row.num_running):
        list_request(tables, r, tables.running[r, place], listed[place])
    index = row.first
    for place in range(row.num_running, row.num_running + row.num_queuing):
        list_request(tables, r, index, listed[place])
        index = tables.requests[index].behind
    return row.num_running


@njit
def list_request(tables: Tables, r: int, index: int, listed: Any) -> None:
    """Write a row of the list of requests."""
    row, request = tables.rows[r], tables.requests[index]
    listed[0] = index
    listed[1] = num_tokens_of(row, request)
    listed[2] = request.prompt_tokens
    listed[3] = num_blocks_of(row, request, tables.settings[0].block_size)
    listed[4] = request.priority
    listed[5] = request.num_preemptions
    listed[6] = is_prefilling(row, request)
    listed[7] = 0
    if request.state == QUEUING:
        listed[7] = request.uncomputed_tokens
    elif listed[6]:
        listed[7] = listed[1] - request.num_computed_tokens
    listed[8] = request.num_earlier_tokens
    listed[9] = request.shared_tokens


@njit
def sample_memory(tables: Tables, listed: Any) -> tuple[int, int, int, int, int, int]:
    """Sample the memory. Lists the demands, in blocks, of the requests at the heads of their queues
    that do not fit there; returns their number, the free blocks of all engines, with and without
    their watermarks, the latter also of the engine with most, the blocks in use on the engine that
    uses most, and the number of engines."""
    rule = tables.settings[0]
    num_blocking = num_free_blocks = num_room_blocks = num_room_most = 0
    num_used_most = num_engines = 0
    for r in range(tables.rows.shape[0]):
        row = tables.rows[r]
        if row.exists == 0:
            continue
        num_engines += 1
        room_blocks = max(0, row.free_blocks - rule.watermark_blocks)
        num_free_blocks += row.free_blocks
        num_room_blocks += room_blocks
        num_room_most = max(num_room_most, room_blocks)
        num_used_most = max(num_used_most, rule.num_blocks - row.free_blocks)
        if row.first == NONE:
            continue
        num_blocks = demand_of(tables.requests[row.first], rule.block_size)
        if num_blocks > room_blocks:
            listed[num_blocking] = num_blocks
            num_blocking += 1
    return (
        num_blocking,
        num_free_blocks,
        num_room_blocks,
        num_room_most,
        num_used_most,
        num_engines,
    )


@njit
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
