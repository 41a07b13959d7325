"""Headroom shares: the part of the headrooms that the cluster can afford. Pure.

Departure from the paper, in which a headroom does not depend on the other instances (Algorithm 1,
line 7). It is taken from the normal requests that would run there, and on few or full instances
these have nowhere to go: with two instances one high-priority request sends all of them to the
other, where they wait for memory, and slow each other, while the first is nearly empty. So a
headroom counts by a share, the same for all instances, which has two limits:

- the batches in which normal requests run grow by at most `MAX_GROWTH` in the mean. This allows
  the whole headroom of one instance among many, and two fifths of it for one of two;
- the headrooms are at most the free memory of the instances without one: normal requests that would
  have to queue there run beside high-priority ones instead.

Freeness is balanced when an instance that gives d of its memory as headroom has 1 - d of the batch
of the others. If a part p of the instances gives d, the batch of a normal request is larger in the
mean than with equal batches by

    p * (1 - p) * d^2 / (1 - p * d)^2

which is the variance of the batches over the square of their mean: it grows with the square of d,
while the gain of high-priority requests grows with d itself.
"""

from collections.abc import Iterable
from math import sqrt

import numpy as np

from sterna.policy.candidate_table import (
    HEADROOMS_TOKENS,
    IS_TERMINATING,
    NORMAL_FREE_TOKENS,
    TOTAL_TOKENS,
    CandidateTable,
    as_table,
)
from sterna.policy.virtual_usage import Candidate

MAX_GROWTH = 0.06
"""Growth of the batches in which normal requests run, while high-priority ones run elsewhere."""


def shared(candidates: Iterable[Candidate]) -> CandidateTable:
    """The instances, with the share for those that have headrooms.

    Terminating instances do not count in the share: they take no requests.
    """
    table = as_table(candidates)
    if not np.count_nonzero(table.column(HEADROOMS_TOKENS)):
        return table
    return table.with_headroom_share(_share(table))


def _share(table: CandidateTable) -> float:
    is_staying = table.column(IS_TERMINATING) == 0
    has_headroom = table.column(HEADROOMS_TOKENS) > 0
    gives, receives = is_staying & has_headroom, is_staying & ~has_headroom
    num_givers, num_staying = int(gives.sum()), int(is_staying.sum())
    if not num_givers:
        return 1.0
    headrooms_tokens = float(table.column(HEADROOMS_TOKENS)[gives].sum())
    room_tokens = float(np.maximum(0.0, table.column(NORMAL_FREE_TOKENS)[receives]).sum())
    total_tokens = float(table.column(TOTAL_TOKENS)[gives].sum())
    bearable_tokens = _bearable_part(num_givers / num_staying) * total_tokens
    return min(1.0, bearable_tokens / headrooms_tokens, room_tokens / headrooms_tokens)


def _bearable_part(giving: float) -> float:
    """The part of their memory that instances may give so that batches grow by MAX_GROWTH; above 1
    if batches would grow by less even with all of it.

    Args:
        giving: the part of the instances that give, above 0, at most 1. At 1 batches are equal; the
            share is 0 then, since no other instance has room.
    """
    growth = sqrt(MAX_GROWTH)
    return growth / (sqrt(giving * (1.0 - giving)) + giving * growth)
