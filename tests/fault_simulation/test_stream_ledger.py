"""Losses of resumable streams in the ledger of the simulator under faults."""

from collections import Counter

import pytest

from fault_simulation.oracle.stream_ledger import Excuse, Loss, StreamLedger
from fault_simulation.oracle.token_oracle import Ask
from fault_simulation.virtual.timeline import Violation
from sterna.types import FrontendId, Priority, RequestId

R0 = RequestId("r0")


def ledger_of(num_events: int, counts: Counter[str]) -> StreamLedger:
    """One of a stream whose client has got as many events."""
    ledger = StreamLedger(counts)
    ask = Ask(R0, FrontendId(0), 8, 16, 0.0, Priority(0), salt=1)
    ledger.begin(ask, lambda: None)
    ledger.streams[R0].num_events = num_events
    return ledger


def test_a_stream_is_not_lost_without_an_excuse_for_the_events_of_its_client() -> None:
    ledger = ledger_of(2, Counter())
    ledger.on_loss(R0, Loss(None, Excuse.UNSAID))
    with pytest.raises(Violation, match="r0 is unknown, and its client has 2 events"):
        ledger.on_unknown(R0, 0.0)


def test_a_successor_that_dies_with_nothing_recorded_leaves_the_excuse_of_the_first_loss() -> None:
    """Seed 205207: the buddy was silent, so that events went out without it; it took over from what
    it had, none of them, and died."""
    counts: Counter[str] = Counter()
    ledger = ledger_of(2, counts)
    ledger.on_loss(R0, Loss(0, Excuse.SILENT))
    ledger.on_loss(R0, Loss(None, Excuse.UNSAID))
    ledger.on_unknown(R0, 0.0)
    assert counts["stream lost: the buddy was silent"] == 1
