"""Tables of the compiled functions.

Each instance has a row of `ENGINE`, each request of the trace a row of `REQUEST`.
"""

from typing import Any, NamedTuple

import numpy as np

from sterna.types import MAX_LARGE_PROMPTS, OUTPUT_LENGTHS

Table = Any
"""A structured array; its fields are known to numpy and numba, not to the type checker."""

ABSENT, QUEUING, DECODING, PREFILLING, DRAINED, DRAINED_QUEUING, ENDED = range(7)
"""States of a request. A drained one keeps its memory, if it has any."""

NONE = -1
"""No request, in links between requests."""

NEVER = 1 << 62

BEGUN, REPORTED, LISTED = range(3)
"""Reports of an engine: of its step's beginning, the current one, and the last one listed."""

(
    USED_BLOCKS,
    RESERVED_BLOCKS,
    PREFILL_BLOCKS,
    NUM_RUNNING,
    NUM_QUEUING,
    NUM_PREEMPTED_QUEUING,
    HEAD_BLOCKS,
    QUEUED_BLOCKS,
    MOVE_BLOCKS,
    MOVE_PRIORITY,
    BALANCE_BLOCKS,
    NUM_PREEMPTIONS,
    LAST_DISPATCH,
    UNCOMPUTED_TOKENS,
    UNCOMPUTED_PAIRS,
    NUM_HELD_SLOTS,
    LARGE_PROMPTS,
) = range(17)
BY_PRIORITY = LARGE_PROMPTS + MAX_LARGE_PROMPTS
"""Indices in a report: the sums from which a load report is made, then the places in the trace of
running requests with large prompts, NONE for those that are missing, then, from the last index on,
the running requests of each priority. PREFILL_BLOCKS are blocks that prompts in chunks still need.
MOVE_BLOCKS and MOVE_PRIORITY belong to the running request that would move first, BALANCE_BLOCKS to
that which would move for balance alone; NONE when none can move."""

NUM_ENDED, NUM_STEPS, NUM_TURNS, FIRST_TURN = range(4)
"""Indices in `Tables.notes`."""

NUM_LISTED = 10
"""Numbers of a request in `reports.list_requests`."""

NUM_LENGTHS = len(OUTPUT_LENGTHS)
"""The last ones in a row of `Tables.counts`."""

NO_VICTIM, SHORTEST, LONGEST, LAST_STARTED, FREEING, FOR_BALANCE = range(6)
"""Rules for the request that a report names as the next to move."""

REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),
        ("first_scheduled_s", np.float64),
        ("first_token_s", np.float64),
        ("end_s", np.float64),
        ("loss_s", np.float64),
        ("preempted_s", np.float64),
        # Duration of the decode steps that computed it, without those since it last began to
        # decode.
        ("execution_ns", np.int64),
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),
        ("priority", np.int64),
        ("num_preemptions", np.int64),
        ("state", np.int64),
        ("row", np.int64),
        # Valid unless it decodes.
        ("num_output_tokens", np.int64),
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        # Valid while it decodes: tokens = offset + counter, the counter at its end, and the
        # engine's execution time at its beginning.
        ("offset", np.int64),
        ("finish_at", np.int64),
        ("execution_mark_ns", np.int64),
        # Output tokens that it had when it came from another engine.
        ("num_earlier_tokens", np.int64),
        # Tokens that the step under way computes of it; for a decoding request only set in steps
        # that leave out some requests.
        ("scheduled", np.int64),
        ("is_preempted", np.int64),
        ("before", np.int64),
        ("behind", np.int64),
        # Its first block hash and the number of them; how many of its blocks can be found; the
        # tokens that it found when it was admitted first.
        ("first_hash", np.int64),
        ("num_hashes", np.int64),
        ("num_cached", np.int64),
        ("found_tokens", np.int64),
        # Those that it found when it was admitted last; 0 where it came from another engine.
        ("shared_tokens", np.int64),
        # While it queues: the tokens that the prefix cache did not have when it began to.
        ("uncomputed_tokens", np.int64),
        # Whether its session goes on behind it.
        ("has_next", np.int64),
    ],
    align=True,
)
"""Times are NaN until they are known."""

ENGINE = np.dtype(
    [
        ("step_end_s", np.float64),
        ("exists", np.int64),
        ("is_stepping", np.int64),
        ("is_held", np.int64),
        ("has_changed", np.int64),
        # Steps that computed decoding requests: their number, duration of the last one, total.
        ("counter", np.int64),
        ("step_ns", np.int64),
        ("execution_ns", np.int64),
        ("next_finish", np.int64),
        ("has_decodes", np.int64),
        ("has_all_decodes", np.int64),
        ("num_running", np.int64),
        ("num_decoding", np.int64),
        ("num_prefilling", np.int64),
        ("offset_sum", np.int64),
        ("num_drained", np.int64),
        ("num_held_slots", np.int64),
        ("num_queuing", np.int64),
        ("num_preempted_queuing", np.int64),
        ("first", np.int64),
        ("last", np.int64),
        ("queued_blocks", np.int64),
        ("queued_uncomputed_tokens", np.int64),
        ("queued_uncomputed_pairs", np.int64),
        ("free_blocks", np.int64),
        ("used_blocks", np.int64),
        ("reserved_blocks", np.int64),
        ("num_preemptions", np.int64),
        ("last_dispatch", np.int64),
        ("num_idle", np.int64),
        ("first_idle", np.int64),
        ("last_idle", np.int64),
        ("first_unused", np.int64),
    ],
    align=True,
)
"""`first` and `last` are the ends of the queue. `used_blocks` are those of running and drained
requests; blocks that several hold count several times. For the prefix cache: its idle blocks, and
the first row of `CACHED` that none of its blocks has."""

CACHED = np.dtype(
    [
        ("block_hash", np.int64),
        ("num_users", np.int32),
        # The idle blocks around it; `behind` also links unused rows.
        ("before", np.int32),
        ("behind", np.int32),
        # The next one of its bucket.
        ("next", np.int32),
    ],
    align=True,
)
"""A block whose content can be found."""


SETTINGS = np.dtype(
    [
        ("prefill_s", np.float64),
        ("prefill_token_s", np.float64),
        ("prefill_pair_s", np.float64),
        ("prefill_min_s", np.float64),
        ("decode_s", np.float64),
        ("decode_request_s", np.float64),
        ("decode_token_s", np.float64),
        ("num_blocks", np.int64),
        ("block_size", np.int64),
        ("watermark_blocks", np.int64),
        ("max_num_seqs", np.int64),
        ("max_num_batched_tokens", np.int64),
        ("is_chunked", np.int64),
        ("is_by_arrival", np.int64),
        ("is_by_urgency", np.int64),
        ("min_free_blocks", np.int64),
        ("is_live", np.int64),
        ("is_by_step", np.int64),
        ("victim", np.int64),
        ("balances", np.int64),
        ("balance_after_tokens", np.int64),
        ("has_priorities", np.int64),
        # Prompts of more tokens are listed as large.
        ("large_tokens", np.int64),
        ("prefix_caching", np.int64),
        # Addresses and sizes of `Contents`.
        ("hashes_at", np.int64),
        ("held_at", np.int64),
        ("cached_at", np.int64),
        ("buckets_at", np.int64),
        ("num_hashes", np.int64),
        ("num_cached", np.int64),
        ("num_buckets", np.int64),
    ],
    align=True,
)


class Tables(NamedTuple):
    """The tables of one simulation that every step needs.

    A call of a compiled function passes each of them as several numbers, whether it needs it or
    not: one table more is felt in the time of all steps.

    Attributes:
        rows: ENGINE[num_rows].
        requests: REQUEST[n].
        running: int64[num_rows, max_num_seqs], the running requests of each engine, in the
            order in which they get memory.
        remainders: int64[num_rows, block_size], decoding requests by offset % block_size.
        counts: int64[num_rows, num_priorities + NUM_LENGTHS], running and drained requests by
            priority, then the outputs that have ended by length (`InstanceView.num_ended`).
        reports: int64[3, num_rows, BY_PRIORITY + num_priorities], the reports of each engine.
        notes: int64[3 + 3 * max_num_seqs], requests ended, steps begun, the number of requests
            that ended in a step and whose sessions go on; then these requests; then room for those
            that are preempted as a step begins.
        settings: SETTINGS[1].
    """

    rows: Table
    requests: Table
    running: Any
    remainders: Any
    counts: Any
    reports: Any
    notes: Any
    settings: Table


class Contents(NamedTuple):
    """The tables of prefix caches, found by their addresses in the settings.

    Attributes:
        hashes: int64[m], the block hashes of all requests.
        held: int32[m], for the same blocks the rows of `CACHED` that the requests hold.
        cached: CACHED[num_rows, num_blocks], the contents of each engine's blocks.
        buckets: int32[num_rows, power of 2], the first row of `CACHED` in each bucket, which has
            the hashes with the same last bits.
    """

    hashes: Any
    held: Any
    cached: Table
    buckets: Any


def make_tables(requests: Table, settings: Table, num_rows: int) -> Tables:
    """Tables for `num_rows` engines, none of which exists yet."""
    block_size, max_num_seqs = int(settings[0]["block_size"]), int(settings[0]["max_num_seqs"])
    num_priorities = int(requests["priority"].max(initial=0)) + 1
    return Tables(
        rows=np.zeros(num_rows, ENGINE),
        requests=requests,
        running=np.zeros((num_rows, max_num_seqs), np.int64),
        remainders=np.zeros((num_rows, block_size), np.int64),
        counts=np.zeros((num_rows, num_priorities + NUM_LENGTHS), np.int64),
        reports=np.zeros((3, num_rows, BY_PRIORITY + num_priorities), np.int64),
        notes=np.zeros(FIRST_TURN + 3 * max_num_seqs, np.int64),
        settings=settings,
    )


def make_contents(tables: Tables, hashes: Any) -> Contents:
    """Contents of the engines of these tables, in whose settings they are found from now on.

    Args:
        hashes: int64[m], the block hashes of all requests; without any, there is no prefix cache.
    """
    settings, num_rows = tables.settings[0], len(tables.rows)
    num_cached = int(settings["num_blocks"]) if len(hashes) else 1
    contents = Contents(
        hashes=hashes,
        held=np.zeros(len(hashes), np.int32),
        cached=np.zeros((num_rows, num_cached), CACHED),
        buckets=np.zeros((num_rows, 1 << num_cached.bit_length()), np.int32),
    )
    _place(contents, settings)
    return contents


def _place(contents: Contents, settings: Any) -> None:
    for name, table in contents._asdict().items():
        settings[f"{name}_at"] = table.ctypes.data
    settings["num_hashes"] = len(contents.hashes)
    settings["num_cached"] = contents.cached.shape[1]
    settings["num_buckets"] = contents.buckets.shape[1]


def with_more_rows(tables: Tables, contents: Contents, num_rows: int) -> tuple[Tables, Contents]:
    """The same tables with room for more engines."""
    more = make_tables(tables.requests, tables.settings, num_rows)
    more_contents = make_contents(more, contents.hashes)._replace(held=contents.held)
    _place(more_contents, more.settings[0])
    num_old = len(tables.rows)
    for name in ("rows", "running", "remainders", "counts"):
        getattr(more, name)[:num_old] = getattr(tables, name)
    for name in ("cached", "buckets"):
        getattr(more_contents, name)[:num_old] = getattr(contents, name)
    more.reports[:, :num_old] = tables.reports
    return more._replace(notes=tables.notes), more_contents


def begin_row(tables: Tables, contents: Contents, r: int) -> None:
    """Make the row that of a new engine, whose blocks are all free."""
    row = np.zeros((), ENGINE)
    row["exists"] = 1
    row["first"] = row["last"] = NONE
    row["next_finish"] = NEVER
    row["free_blocks"] = tables.settings[0]["num_blocks"]
    row["first_idle"] = row["last_idle"] = NONE
    tables.rows[r] = row
    tables.counts[r] = 0
    contents.buckets[r] = NONE
    # Each unused row leads to the next one. There are as many as blocks, so that none lacks.
    contents.cached[r]["behind"] = np.arange(1, contents.cached.shape[1] + 1)
