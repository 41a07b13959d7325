"""The tables that the compiled kernel works on. Pure.

One row of `ENGINE` an instance, one row of `REQUEST` a request of the trace. A decoding request
keeps its length as `offset`, to be added to its engine's step counter: a step of a thousand
decoding requests changes one number.
"""

from typing import Any

import numpy as np

Table = Any
"""A structured array; its fields are known to numpy and numba, not to the type checker."""

ABSENT, QUEUING, DECODING, PREFILLING, DRAINED, DRAINED_QUEUING, ENDED = range(7)
"""Where a request stands. A drained one keeps its memory, if it has any."""

NONE = -1
"""No request, in links between requests."""

REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),
        ("first_scheduled_s", np.float64),
        ("first_token_s", np.float64),
        ("end_s", np.float64),
        ("loss_s", np.float64),
        ("preempted_s", np.float64),
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
        # Valid while it decodes: tokens = offset + counter, and the counter at its end.
        ("offset", np.int64),
        ("finish_at", np.int64),
        # Tokens that the step under way computes of it; of a decoding request only in steps
        # that leave some out.
        ("scheduled", np.int64),
        ("is_preempted", np.int64),
        ("before", np.int64),
        ("behind", np.int64),
    ],
    align=True,
)

ENGINE = np.dtype(
    [
        ("step_end_s", np.float64),
        ("exists", np.int64),
        ("is_stepping", np.int64),
        ("is_held", np.int64),
        ("has_changed", np.int64),
        # Steps that computed decoding requests.
        ("counter", np.int64),
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
        ("free_blocks", np.int64),
        ("used_blocks", np.int64),
        ("reserved_blocks", np.int64),
        ("num_preemptions", np.int64),
        ("last_dispatch", np.int64),
    ],
    align=True,
)
"""`first` and `last` are the ends of the queue. `used_blocks` are those of running and drained
requests."""

REPORT = np.dtype(
    [
        ("used_blocks", np.int64),
        ("reserved_blocks", np.int64),
        ("num_running", np.int64),
        ("num_queuing", np.int64),
        ("num_preempted_queuing", np.int64),
        ("head_blocks", np.int64),
        ("queued_blocks", np.int64),
        ("move_blocks", np.int64),
        ("num_preemptions", np.int64),
        ("last_dispatch", np.int64),
    ],
    align=True,
)
"""The sums that a load report is made from. `move_blocks` is NONE when nothing can move."""

SETTINGS = np.dtype(
    [
        ("prefill_s", np.float64),
        ("prefill_token_s", np.float64),
        ("prefill_pair_s", np.float64),
        ("prefill_min_s", np.float64),
        ("decode_s", np.float64),
        ("decode_request_s", np.float64),
        ("decode_token_s", np.float64),
        ("block_size", np.int64),
        ("watermark_blocks", np.int64),
        ("max_num_seqs", np.int64),
        ("max_num_batched_tokens", np.int64),
        ("is_chunked", np.int64),
        ("is_by_arrival", np.int64),
        ("min_free_blocks", np.int64),
        ("is_live", np.int64),
        ("victim", np.int64),
        ("has_priorities", np.int64),
    ],
    align=True,
)

NO_VICTIM, SHORTEST, LONGEST, LAST_STARTED = range(4)
"""Which request a report names as the next to move."""
