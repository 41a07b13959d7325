"""`core`, compiled: advances an engine by many steps in one call.

The same rules in the same arithmetic, over the tables of `arrays`: a run comes out as with
`core`, bit for bit, which the tests of the simulator check. What makes it fast besides being
compiled: a step in which everybody decodes touches no request. Their lengths grow by a counter;
how many of them need a block is counted by the offsets' remainders; who finishes next is known.

All of it is one module, and the step's duration is written out here again, because the cache of
compiled functions watches the file of a function and not those of the functions that it calls.
"""

from typing import Any

import numpy as np
from numba import njit

from sterna.engine.emulated.arrays import (
    ABSENT,
    DECODING,
    DRAINED,
    DRAINED_QUEUING,
    ENDED,
    LONGEST,
    NO_VICTIM,
    NONE,
    PREFILLING,
    QUEUING,
    SHORTEST,
    Table,
)

NEVER = 1 << 62
NUM_ENDED, NUM_STEPS = range(2)
"""Places in `totals`."""


@njit(cache=True)
def num_tokens_of(row: Any, request: Any) -> int:
    """Prompt and output so far."""
    if request.state == DECODING:
        return request.offset + row.counter
    return request.prompt_tokens + request.num_output_tokens


@njit(cache=True)
def num_computed_of(row: Any, request: Any) -> int:
    """Tokens whose KV is there."""
    if request.state == DECODING:
        return request.offset + row.counter - 1
    return request.num_computed_tokens


@njit(cache=True)
def is_computed_now(row: Any, request: Any) -> bool:
    """Whether the step under way decodes the request."""
    if row.is_stepping == 0 or row.has_decodes == 0:
        return False
    return row.has_all_decodes == 1 or request.scheduled > 0


@njit(cache=True)
def num_blocks_of(row: Any, request: Any, block_size: int) -> int:
    """Blocks that the request holds."""
    if request.state != DECODING:
        return request.num_blocks
    num_tokens = request.offset + row.counter - 1
    if is_computed_now(row, request):
        num_tokens += 1
    return -(-num_tokens // block_size)


@njit(cache=True)
def is_prefilling(row: Any, request: Any) -> bool:
    """Whether KV of more than its last token is missing."""
    if request.state != PREFILLING:
        return False
    num_tokens = request.prompt_tokens + request.num_output_tokens
    return request.num_output_tokens == 0 or request.num_computed_tokens < num_tokens - 1


# --------------------------------------------------------------------------------------- queue


@njit(cache=True)
def demand_of(request: Any, block_size: int) -> int:
    """Blocks that its tokens take."""
    return -(-(request.prompt_tokens + request.num_output_tokens) // block_size)


@njit(cache=True)
def link(rows: Table, requests: Table, settings: Table, r: int, index: int, behind: int) -> None:
    """Queue the request in front of another one, or at the end."""
    row, request = rows[r], requests[index]
    before = row.last if behind == NONE else requests[behind].before
    request.before = before
    request.behind = behind
    if before == NONE:
        row.first = index
    else:
        requests[before].behind = index
    if behind == NONE:
        row.last = index
    else:
        requests[behind].before = index
    request.state = QUEUING
    request.row = r
    row.num_queuing += 1
    row.num_preempted_queuing += 1 if request.num_preemptions > 0 else 0
    row.queued_blocks += demand_of(request, settings[0].block_size)


@njit(cache=True)
def unlink(rows: Table, requests: Table, settings: Table, r: int, index: int) -> None:
    """Take the request out of the queue."""
    row, request = rows[r], requests[index]
    if request.before == NONE:
        row.first = request.behind
    else:
        requests[request.before].behind = request.behind
    if request.behind == NONE:
        row.last = request.before
    else:
        requests[request.behind].before = request.before
    row.num_queuing -= 1
    row.num_preempted_queuing -= 1 if request.num_preemptions > 0 else 0
    row.queued_blocks -= demand_of(request, settings[0].block_size)


@njit(cache=True)
def enqueue(rows: Table, requests: Table, settings: Table, r: int, index: int) -> None:
    """Queue behind those of higher priority, the preempted and the earlier of the same."""
    newcomer = requests[index]
    behind = NONE
    before = rows[r].last
    while before != NONE:
        other = requests[before]
        if other.priority == newcomer.priority:
            comes_after = other.is_preempted == 0 and other.arrival_s > newcomer.arrival_s
        else:
            comes_after = other.priority < newcomer.priority
        if not comes_after:
            break
        behind = before
        before = other.before
    link(rows, requests, settings, r, index, behind)


@njit(cache=True)
def enqueue_in_front(rows: Table, requests: Table, settings: Table, r: int, index: int) -> None:
    """Queue in front of all requests of the same priority."""
    behind = rows[r].first
    while behind != NONE and requests[behind].priority > requests[index].priority:
        behind = requests[behind].behind
    link(rows, requests, settings, r, index, behind)


# --------------------------------------------------------------------------------------- batch


@njit(cache=True)
def join_batch(
    rows: Table, requests: Table, running: Any, counts: Any, settings: Table, r: int, index: int
) -> None:
    """Put the request into the order of those that get memory."""
    row, newcomer = rows[r], requests[index]
    place = row.num_running
    if settings[0].is_by_arrival:
        while place > 0:
            other = requests[running[r, place - 1]]
            if other.priority == newcomer.priority:
                if other.arrival_s <= newcomer.arrival_s:
                    break
            elif other.priority > newcomer.priority:
                break
            running[r, place] = running[r, place - 1]
            place -= 1
    running[r, place] = index
    row.num_running += 1
    newcomer.row = r
    counts[r, newcomer.priority] += 1


@njit(cache=True)
def leave_batch(
    rows: Table, requests: Table, running: Any, counts: Any, r: int, index: int
) -> None:
    """Take the request out of that order."""
    row = rows[r]
    place = 0
    while running[r, place] != index:
        place += 1
    for later in range(place + 1, row.num_running):
        running[r, later - 1] = running[r, later]
    row.num_running -= 1
    counts[r, requests[index].priority] -= 1


@njit(cache=True)
def begin_decoding(
    rows: Table, requests: Table, remainders: Any, settings: Table, r: int, index: int
) -> None:
    """From now on the request's length is told by the engine's counter."""
    row, request = rows[r], requests[index]
    num_tokens = request.prompt_tokens + request.num_output_tokens
    request.state = DECODING
    request.offset = num_tokens - row.counter
    request.finish_at = row.counter + request.output_tokens - request.num_output_tokens
    row.next_finish = min(row.next_finish, request.finish_at)
    row.offset_sum += request.offset
    row.num_decoding += 1
    remainders[r, request.offset % settings[0].block_size] += 1


@njit(cache=True)
def end_decoding(
    rows: Table, requests: Table, running: Any, remainders: Any, settings: Table, r: int, index: int
) -> None:
    """From now on the request's length is written in its row."""
    row, request = rows[r], requests[index]
    block_size = settings[0].block_size
    num_blocks = num_blocks_of(row, request, block_size)
    request.num_output_tokens = request.offset + row.counter - request.prompt_tokens
    request.num_computed_tokens = request.offset + row.counter - 1
    request.num_blocks = num_blocks
    request.state = ABSENT
    row.offset_sum -= request.offset
    row.num_decoding -= 1
    remainders[r, request.offset % block_size] -= 1
    if request.finish_at == row.next_finish:
        find_next_finish(rows, requests, running, r)


@njit(cache=True)
def find_next_finish(rows: Table, requests: Table, running: Any, r: int) -> None:
    """Who finishes next?"""
    row = rows[r]
    row.next_finish = NEVER
    for place in range(row.num_running):
        request = requests[running[r, place]]
        if request.state == DECODING:
            row.next_finish = min(row.next_finish, request.finish_at)


# --------------------------------------------------------------------------------------- steps


@njit(cache=True)
def preempt_last(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    r: int,
) -> int:
    """Take the memory of the last running request back."""
    row = rows[r]
    index = running[r, row.num_running - 1]
    request = requests[index]
    if request.state == DECODING:
        end_decoding(rows, requests, running, remainders, settings, r, index)
    else:
        row.num_prefilling -= 1
    row.num_running -= 1
    counts[r, request.priority] -= 1
    row.free_blocks += request.num_blocks
    row.used_blocks -= request.num_blocks
    request.num_blocks = 0
    request.num_computed_tokens = 0
    request.scheduled = 0
    request.num_preemptions += 1
    request.is_preempted = 1
    row.num_preemptions += 1
    enqueue_in_front(rows, requests, settings, r, index)
    return index


@njit(cache=True)
def schedule_each(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    preempted: Any,
    num_preempted: int,
    r: int,
    budget: int,
) -> tuple[int, int]:
    """Let running requests compute on, one by one; returns what is left of the budget, and how
    many are preempted by now."""
    row, rule = rows[r], settings[0]
    for place in range(row.num_running):
        requests[running[r, place]].scheduled = 0
    row.has_decodes = 0
    row.has_all_decodes = 0
    place = 0
    while place < row.num_running and budget > 0:
        index = running[r, place]
        request = requests[index]
        num_computed = num_computed_of(row, request)
        num_tokens = min(num_tokens_of(row, request) - num_computed, budget)
        num_held = -(-num_computed // rule.block_size)
        num_new = -(-(num_computed + num_tokens) // rule.block_size) - num_held
        while row.free_blocks < max(num_new, rule.min_free_blocks):
            victim = preempt_last(rows, requests, running, remainders, counts, settings, r)
            preempted[num_preempted] = victim
            num_preempted += 1
            if victim == index:
                return budget, num_preempted
        row.free_blocks -= num_new
        row.used_blocks += num_new
        request.scheduled = num_tokens
        if request.state == DECODING:
            row.has_decodes = 1
        else:
            request.num_blocks += num_new
        budget -= num_tokens
        place += 1
    return budget, num_preempted


@njit(cache=True)
def schedule_decodes(rows: Table, remainders: Any, settings: Table, r: int, budget: int) -> bool:
    """Let all running requests decode, if they all do and there is memory for all."""
    row, rule = rows[r], settings[0]
    if row.num_prefilling > 0 or row.num_decoding > budget:
        return False
    # A request needs a block when its tokens but the last fill theirs.
    num_new = remainders[r, (1 - row.counter) % rule.block_size]
    if row.free_blocks < num_new + rule.min_free_blocks:
        return False
    row.free_blocks -= num_new
    row.used_blocks += num_new
    row.has_decodes = 1 if row.num_decoding > 0 else 0
    row.has_all_decodes = 1
    return True


@njit(cache=True)
def admit(
    rows: Table,
    requests: Table,
    running: Any,
    counts: Any,
    settings: Table,
    r: int,
    budget: int,
    now_s: float,
) -> int:
    """Admit requests in the queue's order; returns how many tokens the step computes of them."""
    row, rule = rows[r], settings[0]
    num_scheduled = 0
    is_first = True
    while row.first != NONE:
        if row.num_running + row.num_drained + row.num_held_slots >= rule.max_num_seqs:
            break
        index = row.first
        head = requests[index]
        num_tokens = head.prompt_tokens + head.num_output_tokens
        watermark = rule.watermark_blocks
        if rule.is_chunked:
            if budget <= 0:
                break
            if row.num_running == 0:
                watermark = 0
        elif not is_first and num_tokens > budget:
            break
        if demand_of(head, rule.block_size) + watermark > row.free_blocks:
            break
        if rule.is_chunked:
            num_tokens = min(num_tokens, budget)
        unlink(rows, requests, settings, r, index)
        head.is_preempted = 0
        head.state = PREFILLING
        head.num_computed_tokens = 0
        head.num_blocks = -(-num_tokens // rule.block_size)
        head.scheduled = num_tokens
        if np.isnan(head.first_scheduled_s):
            head.first_scheduled_s = now_s
        row.free_blocks -= head.num_blocks
        row.used_blocks += head.num_blocks
        row.num_prefilling += 1
        join_batch(rows, requests, running, counts, settings, r, index)
        budget -= num_tokens
        num_scheduled += num_tokens
        is_first = False
    return num_scheduled


@njit(cache=True)
def schedule(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    preempted: Any,
    num_preempted: int,
    r: int,
    now_s: float,
) -> tuple[bool, int]:
    """Fill the next step; returns whether it holds anything, and how many are preempted."""
    row, rule = rows[r], settings[0]
    row.has_decodes = 0
    row.has_all_decodes = 0
    if not rule.is_chunked:
        budget = rule.max_num_batched_tokens
        if admit(rows, requests, running, counts, settings, r, budget, now_s) > 0:
            return True, num_preempted
        budget = row.num_running
    else:
        budget = rule.max_num_batched_tokens
    if schedule_decodes(rows, remainders, settings, r, budget):
        left = budget - row.num_decoding
        num_lost = 0
    else:
        left, num_all = schedule_each(
            rows,
            requests,
            running,
            remainders,
            counts,
            settings,
            preempted,
            num_preempted,
            r,
            budget,
        )
        num_lost = num_all - num_preempted
        num_preempted = num_all
    if rule.is_chunked and num_lost == 0:
        left -= admit(rows, requests, running, counts, settings, r, left, now_s)
    return left < budget, num_preempted


@njit(cache=True)
def duration_of(rows: Table, requests: Table, running: Any, settings: Table, r: int) -> float:
    """How long the step takes; see `step_time.step_duration_s`."""
    row, rule = rows[r], settings[0]
    num_prompt_tokens = num_pairs = num_decodes = num_context_tokens = 0
    if row.has_all_decodes:
        num_decodes = row.num_decoding
        num_context_tokens = row.offset_sum + row.counter * row.num_decoding
    if row.num_prefilling > 0 or not row.has_all_decodes:
        for place in range(row.num_running):
            request = requests[running[r, place]]
            if request.state == DECODING:
                if row.has_decodes and not row.has_all_decodes and request.scheduled > 0:
                    num_decodes += 1
                    num_context_tokens += request.offset + row.counter
            elif request.scheduled > 0:
                num_tokens, num_before = request.scheduled, request.num_computed_tokens
                if is_prefilling(row, request):
                    num_prompt_tokens += num_tokens
                    num_pairs += num_tokens * num_tokens + 2 * num_tokens * num_before
                else:
                    num_decodes += 1
                    num_context_tokens += num_before + num_tokens
    prompts_s = rule.prefill_token_s * num_prompt_tokens + rule.prefill_pair_s * num_pairs
    if num_decodes == 0:
        return max(rule.prefill_min_s, rule.prefill_s + prompts_s)
    batch_s = rule.decode_s + rule.decode_request_s * num_decodes
    return batch_s + rule.decode_token_s * num_context_tokens + prompts_s


@njit(cache=True)
def begin_step(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    begun: Table,
    reported: Table,
    report_counts: Any,
    preempted: Any,
    totals: Any,
    r: int,
    now_s: float,
) -> bool:
    """Begin the next step, if there is anything to compute."""
    row = rows[r]
    row.is_held = 0
    row.has_changed = 1
    is_any, num_preempted = schedule(
        rows, requests, running, remainders, counts, settings, preempted, 0, r, now_s
    )
    if not is_any and num_preempted > 0:
        is_any, num_preempted = schedule(
            rows,
            requests,
            running,
            remainders,
            counts,
            settings,
            preempted,
            num_preempted,
            r,
            now_s,
        )
    end_s = now_s
    if is_any:
        end_s = now_s + duration_of(rows, requests, running, settings, r)
    for place in range(num_preempted):
        request = requests[preempted[place]]
        if np.isnan(request.preempted_s):
            request.preempted_s = end_s
    if not is_any:
        row.has_decodes = 0
        take_report(rows, requests, running, counts, settings, reported, report_counts[1], r)
        return False
    row.is_stepping = 1
    row.step_end_s = end_s
    totals[NUM_STEPS] += 1
    if not settings[0].is_live:
        take_report(rows, requests, running, counts, settings, begun, report_counts[0], r)
    return True


@njit(cache=True)
def note_token(requests: Table, index: int, now_s: float) -> None:
    """A prefill has brought a token."""
    request = requests[index]
    request.num_output_tokens += 1
    if np.isnan(request.first_token_s):
        request.first_token_s = now_s
    if not np.isnan(request.preempted_s):
        request.loss_s += now_s - request.preempted_s
        request.preempted_s = np.nan


@njit(cache=True)
def end_step(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    begun: Table,
    reported: Table,
    report_counts: Any,
    totals: Any,
    r: int,
) -> None:
    """The step under way ends."""
    row = rows[r]
    now_s = row.step_end_s
    if row.has_decodes:
        row.counter += 1
        if not row.has_all_decodes:
            hold_back(rows, requests, running, remainders, settings, r)
    row.is_stepping = 0
    is_any_over = row.has_decodes == 1 and row.counter >= row.next_finish
    if row.num_prefilling > 0 and end_prefills(
        rows, requests, running, remainders, settings, r, now_s
    ):
        is_any_over = True
    if is_any_over:
        remove_finished(rows, requests, running, remainders, counts, settings, totals, r, now_s)
    row.has_decodes = 0
    if not settings[0].is_live:
        reported[r] = begun[r]
        report_counts[1, r] = report_counts[0, r]
    row.has_changed = 1


@njit(cache=True)
def hold_back(
    rows: Table, requests: Table, running: Any, remainders: Any, settings: Table, r: int
) -> None:
    """The counter has grown for decoding requests, too, that the step left out."""
    row = rows[r]
    block_size = settings[0].block_size
    for place in range(row.num_running):
        request = requests[running[r, place]]
        if request.state == DECODING and request.scheduled == 0:
            remainders[r, request.offset % block_size] -= 1
            request.offset -= 1
            request.finish_at += 1
            row.offset_sum -= 1
            remainders[r, request.offset % block_size] += 1
    find_next_finish(rows, requests, running, r)


@njit(cache=True)
def end_prefills(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    settings: Table,
    r: int,
    now_s: float,
) -> bool:
    """Prompts have been computed, or chunks of them; returns whether a request is over."""
    row = rows[r]
    is_any_over = False
    for place in range(row.num_running):
        index = running[r, place]
        request = requests[index]
        if request.state != PREFILLING or request.scheduled == 0:
            continue
        request.num_computed_tokens += request.scheduled
        request.scheduled = 0
        num_tokens = request.prompt_tokens + request.num_output_tokens
        if request.num_computed_tokens == num_tokens:
            note_token(requests, index, now_s)
            row.num_prefilling -= 1
            begin_decoding(rows, requests, remainders, settings, r, index)
            if request.num_output_tokens == request.output_tokens:
                is_any_over = True
    return is_any_over


@njit(cache=True)
def remove_finished(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    totals: Any,
    r: int,
    now_s: float,
) -> None:
    """Free the requests that have produced their last token."""
    row = rows[r]
    num_kept = 0
    next_finish = NEVER
    for place in range(row.num_running):
        index = running[r, place]
        request = requests[index]
        if request.state != DECODING or request.finish_at > row.counter:
            running[r, num_kept] = index
            num_kept += 1
            if request.state == DECODING:
                next_finish = min(next_finish, request.finish_at)
            continue
        # Of its memory, the part that `num_blocks_of` counts between two steps.
        num_blocks = num_blocks_of(row, request, settings[0].block_size)
        request.num_output_tokens = request.output_tokens
        row.offset_sum -= request.offset
        row.num_decoding -= 1
        remainders[r, request.offset % settings[0].block_size] -= 1
        row.free_blocks += num_blocks
        row.used_blocks -= num_blocks
        request.state = ENDED
        request.num_blocks = 0
        request.end_s = now_s
        counts[r, request.priority] -= 1
        totals[NUM_ENDED] += 1
    row.num_running = num_kept
    row.next_finish = next_finish


# ------------------------------------------------------------------------------------- reports


@njit(cache=True)
def take_report(
    rows: Table,
    requests: Table,
    running: Any,
    counts: Any,
    settings: Table,
    reports: Table,
    report_counts: Any,
    r: int,
) -> None:
    """Write down the sums of the engine's state."""
    row, report, rule = rows[r], reports[r], settings[0]
    report.used_blocks = row.used_blocks
    report.reserved_blocks = row.reserved_blocks
    report.num_running = row.num_running + row.num_drained
    report.num_queuing = row.num_queuing
    report.num_preempted_queuing = row.num_preempted_queuing
    report.head_blocks = 0
    if row.first != NONE:
        report.head_blocks = demand_of(requests[row.first], rule.block_size)
    report.queued_blocks = row.queued_blocks
    report.num_preemptions = row.num_preemptions
    report.last_dispatch = row.last_dispatch
    report.move_blocks = NONE
    if rule.victim != NO_VICTIM:
        index = find_victim(rows, requests, running, settings, r)
        if index != NONE:
            report.move_blocks = num_blocks_of(row, requests[index], rule.block_size)
    for priority in range(counts.shape[1]):
        report_counts[r, priority] = counts[r, priority]


@njit(cache=True)
def find_victim(rows: Table, requests: Table, running: Any, settings: Table, r: int) -> int:
    """The running request that would move first; `policy.selection` decides, this foretells."""
    row, rule = rows[r], settings[0]
    found, found_priority, found_rank = NONE, 0, 0
    for place in range(row.num_running):
        index = running[r, place]
        request = requests[index]
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
def collect_changed(
    rows: Table,
    requests: Table,
    running: Any,
    counts: Any,
    settings: Table,
    reported: Table,
    report_counts: Any,
    changed: Any,
) -> int:
    """List the engines that may have something to report; returns how many."""
    num_changed = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        if row.exists == 0 or row.has_changed == 0:
            continue
        row.has_changed = 0
        if settings[0].is_live:
            take_report(rows, requests, running, counts, settings, reported, report_counts[1], r)
        changed[num_changed] = r
        num_changed += 1
    return num_changed


# ------------------------------------------------------------------------------------ advances


@njit(cache=True)
def advance_row(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    begun: Table,
    reported: Table,
    report_counts: Any,
    preempted: Any,
    totals: Any,
    r: int,
    until_s: float,
) -> None:
    """Let all steps of the engine pass that end by then, up to one after which it is held."""
    row = rows[r]
    while row.is_stepping == 1 and row.step_end_s <= until_s:
        end_step(
            rows,
            requests,
            running,
            remainders,
            counts,
            settings,
            begun,
            reported,
            report_counts,
            totals,
            r,
        )
        if row.is_held:
            break
        begin_step(
            rows,
            requests,
            running,
            remainders,
            counts,
            settings,
            begun,
            reported,
            report_counts,
            preempted,
            totals,
            r,
            row.step_end_s,
        )


@njit(cache=True)
def advance(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    begun: Table,
    reported: Table,
    report_counts: Any,
    preempted: Any,
    totals: Any,
    until_s: float,
) -> None:
    """Let all steps of all engines pass that end by then."""
    for r in range(rows.shape[0]):
        if rows[r].exists:
            advance_row(
                rows,
                requests,
                running,
                remainders,
                counts,
                settings,
                begun,
                reported,
                report_counts,
                preempted,
                totals,
                r,
                until_s,
            )


# ----------------------------------------------------------------------------------- migration


@njit(cache=True)
def drain(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    r: int,
    index: int,
) -> None:
    """Take the request out of the batch or the queue; it keeps its memory."""
    row, request = rows[r], requests[index]
    if request.state == QUEUING:
        unlink(rows, requests, settings, r, index)
        request.state = DRAINED_QUEUING
        return
    leave_batch(rows, requests, running, counts, r, index)
    if request.state == DECODING:
        end_decoding(rows, requests, running, remainders, settings, r, index)
    else:
        row.num_prefilling -= 1
    # To everybody else it is still here, and one of the running requests.
    counts[r, request.priority] += 1
    request.state = DRAINED
    row.num_drained += 1


@njit(cache=True)
def resume(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    r: int,
    index: int,
) -> None:
    """Put the drained request back."""
    row, request = rows[r], requests[index]
    if request.state == DRAINED_QUEUING:
        enqueue_in_front(rows, requests, settings, r, index)
        return
    row.num_drained -= 1
    counts[r, request.priority] -= 1
    join_batch(rows, requests, running, counts, settings, r, index)
    begin_decoding(rows, requests, remainders, settings, r, index)


@njit(cache=True)
def adopt(
    rows: Table,
    requests: Table,
    running: Any,
    remainders: Any,
    counts: Any,
    settings: Table,
    r: int,
    index: int,
    num_blocks: int,
) -> None:
    """Take a migrated request in, whose blocks have left the reservation for it."""
    row, request = rows[r], requests[index]
    request.num_blocks = num_blocks
    if num_blocks > 0:
        row.used_blocks += num_blocks
        join_batch(rows, requests, running, counts, settings, r, index)
        begin_decoding(rows, requests, remainders, settings, r, index)
        return
    request.num_computed_tokens = 0
    if request.num_output_tokens > 0:
        request.is_preempted = 1
        enqueue_in_front(rows, requests, settings, r, index)
    else:
        enqueue(rows, requests, settings, r, index)
