"""Outcomes of a drain: a request leaves its engine, or may not, as `Drain` says."""

from dataclasses import replace

import pytest

from sterna.engine.drains import DrainOutcome, Left, Outgrown, Stays, drain_outcome, refused
from sterna.migration.messages import Drain, DrainRefused, Mode, Reason, RequestPosition
from sterna.types import MigrationId, RequestId

DRAIN = Drain(MigrationId("m"), RequestId("r"), Mode.LIVE, 1, first_block=4, max_blocks=2)
FITTING = RequestPosition(is_queuing=False, num_full_blocks=5, num_blocks=6, num_preemptions=1)
LONGER = replace(FITTING, num_blocks=7)


@pytest.mark.parametrize(
    ("progress", "mode", "outcome"),
    [
        (FITTING, Mode.LIVE, Left(6, was_queuing=False)),
        (None, Mode.LIVE, Stays(Reason.REQUEST_UNKNOWN)),
        (replace(FITTING, num_preemptions=2), Mode.LIVE, Stays(Reason.REQUEST_PREEMPTED)),
        (replace(FITTING, is_immovable=True), Mode.LIVE, Stays(Reason.REQUEST_IMMOVABLE)),
        (LONGER, Mode.LIVE, Outgrown()),
        (LONGER, Mode.STOP_AND_COPY, Outgrown()),
        (LONGER, Mode.RECOMPUTE, Left(7, was_queuing=False)),
        (replace(LONGER, is_queuing=True), Mode.LIVE, Left(7, was_queuing=True)),
    ],
)
def test_a_request_leaves_when_it_is_as_it_was_and_fits_the_last_stage(
    progress: RequestPosition | None, mode: Mode, outcome: DrainOutcome
) -> None:
    """Of a request that queues, or is computed again, no block is copied."""
    assert drain_outcome(progress, replace(DRAIN, mode=mode)) == outcome


def test_a_migration_is_told_why_a_request_stays() -> None:
    assert refused(Stays(Reason.REQUEST_PREEMPTED)) == DrainRefused(Reason.REQUEST_PREEMPTED)
    assert refused(Outgrown()) == DrainRefused(None)
