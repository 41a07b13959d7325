"""Beginning and end of steps, and the advance of engines in virtual time."""

import numpy as np
from numba import njit

from sterna.engine.emulated.compiled.batch import begin_decoding, find_next_finish
from sterna.engine.emulated.compiled.prefixes import free, remember
from sterna.engine.emulated.compiled.queue import enqueue, is_prefilling, num_blocks_of
from sterna.engine.emulated.compiled.reports import has_room, take_report
from sterna.engine.emulated.compiled.schedule import schedule
from sterna.engine.emulated.compiled.tables import (
    BEGUN,
    DECODING,
    ENDED,
    FIRST_TURN,
    NEVER,
    NONE,
    NUM_ENDED,
    NUM_LENGTHS,
    NUM_STEPS,
    NUM_TURNS,
    PREFILLING,
    REPORTED,
    Tables,
)
from sterna.engine.emulated.durations import step_duration_s, whole_nanoseconds
from sterna.types import MAX_ENDED, OUTPUT_LENGTHS

duration_s = njit(cache=True)(step_duration_s)
nanoseconds = njit(cache=True)(whole_nanoseconds)


@njit
def duration_of(tables: Tables, r: int) -> float:
    """Duration of the step; see `durations.step_duration_s`."""
    row, rule = tables.rows[r], tables.settings[0]
    num_prompt_tokens = num_pairs = num_decodes = num_context_tokens = 0
    if row.has_all_decodes:
        num_decodes = row.num_decoding
        num_context_tokens = row.offset_sum + row.counter * row.num_decoding
    if row.num_prefilling > 0 or not row.has_all_decodes:
        for place in range(row.num_running):
            request = tables.requests[tables.running[r, place]]
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
    return duration_s(
        rule.prefill_s,
        rule.prefill_token_s,
        rule.prefill_pair_s,
        rule.prefill_min_s,
        rule.decode_s,
        rule.decode_request_s,
        rule.decode_token_s,
        num_prompt_tokens,
        num_pairs,
        num_decodes,
        num_context_tokens,
    )


@njit
def begin_step(tables: Tables, r: int, now_s: float) -> bool:
    """Begin the next step, if there is anything to compute."""
    row = tables.rows[r]
    row.is_held = 0
    row.has_changed = 1
    is_any, num_preempted = schedule(tables, 0, r, now_s)
    num_before = 0
    while not is_any and num_preempted > num_before:
        num_before = num_preempted
        is_any, num_preempted = schedule(tables, num_preempted, r, now_s)
    end_s = now_s
    if is_any:
        end_s = now_s + duration_of(tables, r)
    first = FIRST_TURN + tables.settings[0].max_num_seqs
    for place in range(first, first + num_preempted):
        request = tables.requests[tables.notes[place]]
        if np.isnan(request.preempted_s):
            request.preempted_s = end_s
    if not is_any:
        row.has_decodes = 0
        take_report(tables, REPORTED, r)
        return False
    row.is_stepping = 1
    row.step_end_s = end_s
    row.step_ns = nanoseconds(end_s - now_s)
    tables.notes[NUM_STEPS] += 1
    if not tables.settings[0].is_live:
        take_report(tables, BEGUN, r)
    if tables.settings[0].is_by_step:
        take_report(tables, REPORTED, r)
    return True


@njit
def note_token(tables: Tables, index: int, now_s: float) -> None:
    """Count the token that a prefill has produced."""
    request = tables.requests[index]
    request.num_output_tokens += 1
    if np.isnan(request.first_token_s):
        request.first_token_s = now_s
    if not np.isnan(request.preempted_s):
        request.loss_s += now_s - request.preempted_s
        request.preempted_s = np.nan


@njit
def end_step(tables: Tables, r: int) -> None:
    """End the step under way."""
    row = tables.rows[r]
    now_s = row.step_end_s
    if row.has_decodes:
        row.counter += 1
        row.execution_ns += row.step_ns
        if not row.has_all_decodes:
            hold_back(tables, r)
    row.is_stepping = 0
    is_any_over = row.has_decodes == 1 and row.counter >= row.next_finish
    if row.num_prefilling > 0 and end_prefills(tables, r, now_s):
        is_any_over = True
    if is_any_over:
        remove_finished(tables, r, now_s)
    row.has_decodes = 0
    if not tables.settings[0].is_live:
        for place in range(tables.reports.shape[2]):
            tables.reports[REPORTED, r, place] = tables.reports[BEGUN, r, place]
    row.has_changed = 1


@njit
def hold_back(tables: Tables, r: int) -> None:
    """Correct the decoding requests that the step left out: the counter has grown for them, too."""
    row = tables.rows[r]
    block_size = tables.settings[0].block_size
    for place in range(row.num_running):
        request = tables.requests[tables.running[r, place]]
        if request.state == DECODING and request.scheduled == 0:
            tables.remainders[r, request.offset % block_size] -= 1
            request.offset -= 1
            request.finish_at += 1
            request.execution_mark_ns += row.step_ns
            row.offset_sum -= 1
            tables.remainders[r, request.offset % block_size] += 1
    find_next_finish(tables, r)


@njit
def end_prefills(tables: Tables, r: int, now_s: float) -> bool:
    """Count the computed prompts and chunks; returns whether a request has finished."""
    row = tables.rows[r]
    is_any_over = False
    for place in range(row.num_running):
        index = tables.running[r, place]
        request = tables.requests[index]
        if request.state != PREFILLING or request.scheduled == 0:
            continue
        if not is_prefilling(row, request):
            # Only its last token was missing, which counts as a decode.
            request.execution_ns += row.step_ns
        request.num_computed_tokens += request.scheduled
        request.scheduled = 0
        num_tokens = request.prompt_tokens + request.num_output_tokens
        if request.num_computed_tokens == num_tokens:
            note_token(tables, index, now_s)
            row.num_prefilling -= 1
            begin_decoding(tables, r, index)
            if request.num_output_tokens == request.output_tokens:
                is_any_over = True
    return is_any_over


@njit
def remove_finished(tables: Tables, r: int, now_s: float) -> None:
    """Free the requests that have produced their last token."""
    row, rule = tables.rows[r], tables.settings[0]
    num_kept = 0
    next_finish = NEVER
    for place in range(row.num_running):
        index = tables.running[r, place]
        request = tables.requests[index]
        if request.state != DECODING or request.finish_at > row.counter:
            tables.running[r, num_kept] = index
            num_kept += 1
            if request.state == DECODING:
                next_finish = min(next_finish, request.finish_at)
            continue
        # Its blocks as `num_blocks_of` counts them between two steps.
        num_blocks = num_blocks_of(row, request, rule.block_size)
        request.num_output_tokens = request.output_tokens
        request.execution_ns += row.execution_ns - request.execution_mark_ns
        row.offset_sum -= request.offset
        row.num_decoding -= 1
        tables.remainders[r, request.offset % rule.block_size] -= 1
        if rule.prefix_caching:
            # The KV of its last token is never computed.
            num_full_blocks = (request.offset + row.counter - 1) // rule.block_size
            remember(tables, r, index, num_full_blocks)
        free(tables, r, index, num_blocks)
        request.state = ENDED
        request.num_blocks = 0
        request.end_s = now_s
        tables.counts[r, request.priority] -= 1
        count_ended(tables, r, request.output_tokens)
        tables.notes[NUM_ENDED] += 1
        if request.has_next:
            tables.notes[FIRST_TURN + tables.notes[NUM_TURNS]] = index
            tables.notes[NUM_TURNS] += 1
    row.num_running = num_kept
    row.next_finish = next_finish


@njit
def count_ended(tables: Tables, r: int, num_tokens: int) -> None:
    """Count an output of this length as `EndedOutputs` does."""
    counts = tables.counts[r, tables.counts.shape[1] - NUM_LENGTHS :]
    place = NUM_LENGTHS - 1
    while OUTPUT_LENGTHS[place] > num_tokens:
        place -= 1
    counts[place] += 1
    if counts.sum() == MAX_ENDED:
        for place in range(NUM_LENGTHS):
            counts[place] //= 2


@njit
def advance_row(tables: Tables, r: int, until_s: float) -> None:
    """Carry out the engine's steps that end by `until_s`, up to one after which it is held."""
    row = tables.rows[r]
    while row.is_stepping == 1 and row.step_end_s <= until_s:
        end_step(tables, r)
        if row.is_held:
            break
        begin_step(tables, r, row.step_end_s)


@njit
def advance(tables: Tables, until_s: float) -> None:
    """Carry out the steps of all engines that end by `until_s`."""
    for r in range(tables.rows.shape[0]):
        if tables.rows[r].exists:
            advance_row(tables, r, until_s)


@njit
def advance_to_notice(
    tables: Tables, until_s: float, room_blocks: int, growth_steps: float
) -> tuple[int, float]:
    """Carry out the steps of all engines that end by `until_s`, in the order of their ends, up to
    the first one that ends requests whose sessions go on, or behind which its engine has room for a
    request of `room_blocks`; returns the number of these requests, and the time of the room, or -1.
    """
    room_s = -1.0
    while tables.notes[NUM_TURNS] == 0 and room_s < 0:
        first = NONE
        for r in range(tables.rows.shape[0]):
            row = tables.rows[r]
            if row.exists == 0 or row.is_stepping == 0 or row.step_end_s > until_s:
                continue
            if first == NONE or row.step_end_s < tables.rows[first].step_end_s:
                first = r
        if first == NONE:
            break
        row = tables.rows[first]
        now_s = row.step_end_s
        end_step(tables, first)
        if row.is_held == 0:
            begin_step(tables, first, now_s)
            if has_room(tables, first, room_blocks, growth_steps):
                room_s = now_s
    num_ended = tables.notes[NUM_TURNS]
    tables.notes[NUM_TURNS] = 0
    return num_ended, room_s


@njit
def add(tables: Tables, r: int, index: int, dispatch_number: int, now_s: float) -> None:
    """Queue a new request; the step under way does not change."""
    row = tables.rows[r]
    advance_row(tables, r, now_s)
    enqueue(tables, r, index)
    row.last_dispatch = dispatch_number
    row.has_changed = 1
