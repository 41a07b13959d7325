"""Scheduling of the next step: running requests, admissions, preemptions."""

import numpy as np
from numba import njit

from sterna.engine.emulated.compiled.batch import end_decoding, join_batch, leave_batch
from sterna.engine.emulated.compiled.prefixes import find, forget, free, remember, use
from sterna.engine.emulated.compiled.queue import (
    demand_of,
    enqueue_in_front,
    num_computed_of,
    num_tokens_of,
    unlink,
)
from sterna.engine.emulated.compiled.tables import (
    DECODING,
    FIRST_TURN,
    NONE,
    PREFILLING,
    Tables,
)


@njit
def find_victim(tables: Tables, r: int) -> int:
    """The place in the batch of the request that is preempted first."""
    row = tables.rows[r]
    if tables.settings[0].is_by_urgency == 0:
        return row.num_running - 1
    victim = 0
    for place in range(1, row.num_running):
        last = tables.requests[tables.running[r, victim]]
        other = tables.requests[tables.running[r, place]]
        if other.priority == last.priority:
            comes_after = other.arrival_s > last.arrival_s
        else:
            comes_after = other.priority < last.priority
        if comes_after:
            victim = place
    return victim


@njit
def preempt(tables: Tables, r: int, place: int) -> int:
    """Preempt the running request at this place of the batch; returns the number of its tokens that
    the step would have computed."""
    row, rule = tables.rows[r], tables.settings[0]
    index = tables.running[r, place]
    request = tables.requests[index]
    num_scheduled = request.scheduled
    if request.state == DECODING:
        end_decoding(tables, r, index)
        # The block that the step has just given it.
        num_tokens = request.num_computed_tokens + num_scheduled
        request.num_blocks = -(-num_tokens // rule.block_size)
        if rule.prefix_caching:
            remember(tables, r, index, num_tokens // rule.block_size)
    else:
        row.num_prefilling -= 1
    leave_batch(tables, r, index)
    free(tables, r, index, request.num_blocks)
    request.num_blocks = 0
    request.num_computed_tokens = 0
    request.scheduled = 0
    request.num_preemptions += 1
    request.is_preempted = 1
    row.num_preemptions += 1
    enqueue_in_front(tables, r, index)
    return num_scheduled


@njit
def schedule_each(tables: Tables, num_preempted: int, r: int, budget: int) -> tuple[int, int]:
    """Schedule the running requests one by one; returns the remaining budget, and the number of
    requests preempted so far."""
    row, rule = tables.rows[r], tables.settings[0]
    for place in range(row.num_running):
        tables.requests[tables.running[r, place]].scheduled = 0
    row.has_decodes = 0
    row.has_all_decodes = 0
    place = 0
    while place < row.num_running and budget > 0:
        index = tables.running[r, place]
        request = tables.requests[index]
        num_computed = num_computed_of(row, request)
        num_tokens = min(num_tokens_of(row, request) - num_computed, budget)
        num_held = -(-num_computed // rule.block_size)
        num_new = -(-(num_computed + num_tokens) // rule.block_size) - num_held
        while row.free_blocks < max(num_new, rule.min_free_blocks):
            victim = find_victim(tables, r)
            tables.notes[FIRST_TURN + rule.max_num_seqs + num_preempted] = tables.running[r, victim]
            num_preempted += 1
            num_scheduled = preempt(tables, r, victim)
            if victim == place:
                return budget, num_preempted
            if victim < place:
                place -= 1
                budget += num_scheduled
        row.free_blocks -= num_new
        if row.num_idle > row.free_blocks:
            forget(tables, r)
        row.used_blocks += num_new
        request.scheduled = num_tokens
        if request.state == DECODING:
            row.has_decodes = 1
        else:
            request.num_blocks += num_new
            if rule.prefix_caching:
                remember(tables, r, index, (num_computed + num_tokens) // rule.block_size)
        budget -= num_tokens
        place += 1
    return budget, num_preempted


@njit
def schedule_decodes(tables: Tables, r: int, budget: int) -> bool:
    """Schedule all running requests at once, if all decode and there is memory for all."""
    row, rule = tables.rows[r], tables.settings[0]
    if row.num_prefilling > 0 or row.num_decoding > budget:
        return False
    # A request needs a new block when all tokens except its last fill its blocks.
    num_new = tables.remainders[r, (1 - row.counter) % rule.block_size]
    if row.free_blocks < num_new + rule.min_free_blocks:
        return False
    row.free_blocks -= num_new
    if row.num_idle > row.free_blocks:
        forget(tables, r)
    row.used_blocks += num_new
    row.has_decodes = 1 if row.num_decoding > 0 else 0
    row.has_all_decodes = 1
    return True


@njit
def admit(tables: Tables, r: int, budget: int, now_s: float) -> int:
    """Admit requests in the queue's order; returns the number of their scheduled tokens."""
    row, rule = tables.rows[r], tables.settings[0]
    num_scheduled = 0
    is_first = True
    while row.first != NONE:
        if row.num_running + row.num_drained + row.num_held_slots >= rule.max_num_seqs:
            break
        index = row.first
        head = tables.requests[index]
        num_tokens = head.prompt_tokens + head.num_output_tokens
        watermark = rule.watermark_blocks
        if rule.is_chunked:
            if budget <= 0:
                break
            if row.num_running == 0:
                watermark = 0
        elif not is_first and num_tokens > budget:
            break
        num_found = num_idle = 0
        if rule.prefix_caching:
            num_found, num_idle = find(tables, r, index)
        num_needed = demand_of(head, rule.block_size) - num_found + num_idle
        if num_needed + watermark > row.free_blocks:
            break
        unlink(tables, r, index)
        if num_found > 0:
            use(tables, r, index, num_found)
        head.is_preempted = 0
        head.state = PREFILLING
        head.num_computed_tokens = head.shared_tokens = num_found * rule.block_size
        num_tokens -= head.num_computed_tokens
        if rule.is_chunked:
            num_tokens = min(num_tokens, budget)
        num_computed = head.num_computed_tokens + num_tokens
        head.num_blocks = -(-num_computed // rule.block_size)
        head.scheduled = num_tokens
        if np.isnan(head.first_scheduled_s):
            head.first_scheduled_s = now_s
            head.found_tokens = head.num_computed_tokens
        row.free_blocks -= head.num_blocks - num_found
        row.used_blocks += head.num_blocks
        if rule.prefix_caching:
            forget(tables, r)
            remember(tables, r, index, num_computed // rule.block_size)
        row.num_prefilling += 1
        join_batch(tables, r, index)
        budget -= num_tokens
        num_scheduled += num_tokens
        is_first = False
    return num_scheduled


@njit
def schedule(tables: Tables, num_preempted: int, r: int, now_s: float) -> tuple[bool, int]:
    """Fill the next step; returns whether it computes anything, and the number of preemptions."""
    row, rule = tables.rows[r], tables.settings[0]
    row.has_decodes = 0
    row.has_all_decodes = 0
    if not rule.is_chunked:
        budget = rule.max_num_batched_tokens
        if admit(tables, r, budget, now_s) > 0:
            return True, num_preempted
        budget = row.num_running
    else:
        budget = rule.max_num_batched_tokens
    if schedule_decodes(tables, r, budget):
        left = budget - row.num_decoding
        num_lost = 0
    else:
        left, num_all = schedule_each(tables, num_preempted, r, budget)
        num_lost = num_all - num_preempted
        num_preempted = num_all
    if rule.is_chunked and num_lost == 0:
        left -= admit(tables, r, left, now_s)
    return left < budget, num_preempted
