"""The transfers in flight, and the single way in which each of them ends."""

import queue
import select
import time
from collections.abc import Iterator

import pytest
import torch

from sterna.errors import ProtocolError, TransportError
from sterna.transport.data_plane import (
    Arrived,
    PlaneEvent,
    ReceiveFailed,
    SendFailed,
    Sent,
    Stopped,
)
from sterna.transport.ledger import Copy, Ledger, Side
from sterna.transport.wires.waiting import Waker
from sterna.types import MigrationId
from tests.transport.planes import WAIT_S, stage


class Desk:
    """A ledger, and what it tells."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[PlaneEvent] = queue.SimpleQueue()
        self.ledger = Ledger(self._events.put, timeout_s=100.0)

    def copy(self, migration: str, number: int = 0, side: Side = Side.DESTINATION) -> Copy:
        copy = Copy(
            side, stage(migration, number), (torch.tensor([1, 2]),), (10,), None, False, 0.0, None
        )
        self.ledger.add(copy)
        return copy

    @property
    def has_told(self) -> bool:
        """Whether there is an event that `told` has not returned."""
        return not self._events.empty()

    def told(self) -> list[PlaneEvent]:
        """All events until now: those before the end of an unknown migration."""
        self.ledger.stop(MigrationId("mark"))
        told: list[PlaneEvent] = []
        while (event := self._events.get(timeout=WAIT_S)) != Stopped(MigrationId("mark")):
            told.append(event)
        return told


def is_set(waker: Waker) -> bool:
    """Whether it would wake the thread that waits with it."""
    readable, _, _ = select.select([waker], [], [], 0)
    return bool(readable)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.ledger.close()
    desk.ledger.join(WAIT_S)


def test_the_first_end_wins(desk: Desk) -> None:
    copy = desk.copy("m")
    assert desk.ledger.end(copy, Arrived(copy.transfer, copy.num_blocks, 20, 0.5))
    assert not desk.ledger.end(copy, Arrived(copy.transfer, copy.num_blocks, 20, 0.6))
    desk.ledger.fail(copy, "too late")
    assert desk.told() == [Arrived(copy.transfer, copy.num_blocks, 20, 0.5)]
    assert copy.over == "it is done"


def test_each_side_has_its_own_failure(desk: Desk) -> None:
    source = desk.copy("m", side=Side.SOURCE)
    destination = desk.copy("m", side=Side.DESTINATION)
    desk.ledger.fail(source, "one")
    desk.ledger.fail(destination, "two")
    assert desk.told() == [SendFailed(stage("m"), "one"), ReceiveFailed(stage("m"), "two")]


def test_a_failure_is_told_when_the_chunk_in_progress_is_through(desk: Desk) -> None:
    copy = desk.copy("m")
    assert desk.ledger.enter(copy)
    desk.ledger.fail(copy, "the peer died")
    assert desk.told() == []
    desk.ledger.leave(copy)
    assert desk.told() == [ReceiveFailed(stage("m"), "the peer died")]


def test_an_end_between_two_chunks_is_told_at_once(desk: Desk) -> None:
    failed, stopped = desk.copy("m"), desk.copy("n")
    for copy in (failed, stopped):
        assert desk.ledger.enter(copy)
        desk.ledger.leave(copy)
    desk.ledger.fail(failed, "the peer died")
    desk.ledger.stop(MigrationId("n"))
    assert desk.told() == [ReceiveFailed(stage("m"), "the peer died"), Stopped(MigrationId("n"))]


def test_progress_grants_another_timeout(desk: Desk) -> None:
    copy = desk.copy("m")
    before_s = time.monotonic()
    desk.ledger.extend_deadline(copy)
    assert copy.deadline_s is not None
    assert before_s + 100.0 <= copy.deadline_s <= time.monotonic() + 100.0


def test_no_chunk_begins_after_the_end(desk: Desk) -> None:
    copy = desk.copy("m")
    assert desk.ledger.enter(copy)
    desk.ledger.leave(copy)
    desk.ledger.fail(copy, "over")
    assert not desk.ledger.enter(copy)


def test_stopped_waits_for_every_chunk_in_progress_of_the_migration(desk: Desk) -> None:
    entered = [desk.copy("m", 0), desk.copy("m", 0, Side.SOURCE)]
    desk.copy("m", 1)
    other = desk.copy("other")
    for copy in [*entered, other]:
        assert desk.ledger.enter(copy)
    desk.ledger.stop(MigrationId("m"))
    for copy in entered:
        assert desk.told() == []
        desk.ledger.leave(copy)
    assert desk.told() == [Stopped(MigrationId("m"))]
    assert other.over is None


def test_nothing_of_a_migration_is_told_after_stopped(desk: Desk) -> None:
    copies = [desk.copy("m", number) for number in range(3)]
    assert desk.ledger.enter(copies[0])
    desk.ledger.fail(copies[0], "the peer died")
    desk.ledger.fail(copies[1], "the peer died")
    desk.ledger.stop(MigrationId("m"))
    desk.ledger.leave(copies[0])
    desk.ledger.fail(copies[2], "the peer died")
    assert desk.told() == [
        ReceiveFailed(stage("m", 1), "the peer died"),
        Stopped(MigrationId("m")),
    ]


def test_every_stop_is_told_once(desk: Desk) -> None:
    copy = desk.copy("m")
    assert desk.ledger.enter(copy)
    desk.ledger.stop(MigrationId("m"))
    desk.ledger.stop(MigrationId("m"))
    desk.ledger.leave(copy)
    desk.ledger.stop(MigrationId("m"))
    assert desk.told() == [Stopped(MigrationId("m"))] * 3


def test_the_thread_that_works_on_a_copy_is_woken_when_it_is_over(desk: Desk) -> None:
    copy, waker = desk.copy("m"), Waker()
    copy.waker = waker
    assert not is_set(waker)
    desk.ledger.stop(MigrationId("m"))
    assert is_set(waker)
    assert copy.over == "the migration was stopped"
    waker.close()


def test_a_transfer_is_in_flight_once_on_each_side(desk: Desk) -> None:
    copy = desk.copy("m")
    desk.copy("m", side=Side.SOURCE)
    with pytest.raises(ProtocolError, match="already in flight on its destination"):
        desk.copy("m")
    desk.ledger.fail(copy, "over")
    desk.copy("m")


def test_only_an_expected_transfer_of_the_right_size_is_claimed_and_only_once(
    desk: Desk,
) -> None:
    copy, waker = desk.copy("m"), Waker()
    desk.copy("source", side=Side.SOURCE)
    claim = desk.ledger.claim
    assert claim(stage("m", 1), (2,), 20, waker) == "this transfer is not expected"
    assert claim(stage("source"), (2,), 20, waker) == "this transfer is not expected"
    mismatch = "2 blocks of 20 bytes in all are expected, not 3 of 30"
    assert claim(stage("m"), (3,), 30, waker) == mismatch
    assert claim(stage("m"), (2,), 20, waker) is copy
    assert claim(stage("m"), (2,), 20, waker) == "this transfer is being received already"
    assert desk.ledger.enter(copy)
    desk.ledger.fail(copy, "over")
    assert claim(stage("m"), (2,), 20, waker) == "this transfer is not expected"
    desk.ledger.leave(copy)
    waker.close()


def test_a_source_may_bring_fewer_blocks_than_were_expected(desk: Desk) -> None:
    """Then they go to the first ones. A last stage is reserved with room to grow."""
    copy, waker = desk.copy("m"), Waker()
    assert desk.ledger.claim(stage("m"), (1,), 10, waker) is copy
    assert copy.block_ids[0].tolist() == [1]
    assert copy.copy_bytes == 10
    waker.close()


@pytest.mark.parametrize(
    ("num_blocks", "copy_bytes"), [(2, 18), (2, 22), (1, 20), (1, 9), (3, 20), (0, 5)]
)
def test_a_source_whose_blocks_have_another_size_is_refused_and_changes_nothing(
    desk: Desk, num_blocks: int, copy_bytes: int
) -> None:
    copy, waker = desk.copy("m"), Waker()
    expected = f"2 blocks of 20 bytes in all are expected, not {num_blocks} of {copy_bytes}"
    assert desk.ledger.claim(stage("m"), (num_blocks,), copy_bytes, waker) == expected
    assert (copy.block_ids[0].tolist(), copy.copy_bytes, copy.deadline_s) == ([1, 2], 20, None)
    assert desk.ledger.claim(stage("m"), (2,), 20, waker) is copy
    waker.close()


def test_a_transfer_has_its_time_from_when_it_is_claimed(desk: Desk) -> None:
    copy, waker = desk.copy("m"), Waker()
    before_s = time.monotonic()
    desk.ledger.claim(stage("m"), (2,), 20, waker)
    assert before_s <= copy.begun_s <= time.monotonic()
    assert copy.deadline_s == copy.begun_s + 100.0
    waker.close()


def test_what_is_over_says_why(desk: Desk) -> None:
    """The other side is told."""
    source, destination = desk.copy("m", side=Side.SOURCE), desk.copy("m")
    desk.ledger.end(source, Sent(source.transfer, 20, 0.5))
    desk.ledger.fail(destination, "the peer died")
    assert (source.over, destination.over) == ("it is done", "the peer died")
    stopped = desk.copy("n")
    desk.ledger.stop(MigrationId("n"))
    assert stopped.over == "the migration was stopped"
    closed = desk.copy("o")
    desk.ledger.close()
    assert closed.over == "the data plane was closed"


def test_a_closed_ledger_tells_nothing_of_what_had_failed_before(desk: Desk) -> None:
    copy = desk.copy("m")
    desk.ledger.enter(copy)
    desk.ledger.fail(copy, "the peer died")
    desk.ledger.close()
    desk.ledger.leave(copy)
    desk.ledger.join(WAIT_S)
    assert not desk.has_told


def test_a_copy_without_a_deadline_outlives_one_that_made_no_progress() -> None:
    events: queue.SimpleQueue[PlaneEvent] = queue.SimpleQueue()
    ledger = Ledger(events.put, timeout_s=0.01)
    waiting = Copy(Side.SOURCE, stage("a"), (torch.tensor([1]),), (10,), None, True, 0.0, None)
    stalled = Copy(Side.SOURCE, stage("b"), (torch.tensor([1]),), (10,), None, True, 0.0, None)
    ledger.add(waiting)
    ledger.add(stalled)
    ledger.extend_deadline(stalled)
    assert events.get(timeout=WAIT_S) == SendFailed(stage("b"), "no progress for 0.01 s")
    assert waiting.over is None
    ledger.end(waiting, Sent(stage("a"), 10, 1.0))
    assert events.get(timeout=WAIT_S) == Sent(stage("a"), 10, 1.0)
    ledger.close()
    ledger.join(WAIT_S)


def test_a_copy_is_overdue_although_there_is_always_another_event() -> None:
    told: queue.SimpleQueue[PlaneEvent] = queue.SimpleQueue()

    def notify(event: PlaneEvent) -> None:
        if isinstance(event, Stopped):
            ledger.stop(event.migration_id)
        else:
            told.put(event)

    ledger = Ledger(notify, timeout_s=0.01)
    stalled = Copy(Side.SOURCE, stage("a"), (torch.tensor([1]),), (10,), None, True, 0.0, None)
    ledger.add(stalled)
    ledger.extend_deadline(stalled)
    ledger.stop(MigrationId("another"))
    assert told.get(timeout=WAIT_S) == SendFailed(stage("a"), "no progress for 0.01 s")
    ledger.close()
    ledger.join(WAIT_S)


def test_a_closed_ledger_is_silent_and_takes_nothing() -> None:
    events: queue.SimpleQueue[PlaneEvent] = queue.SimpleQueue()
    ledger = Ledger(events.put, timeout_s=100.0)
    copy = Copy(Side.SOURCE, stage("m"), (torch.tensor([1]),), (10,), None, True, 0.0, None)
    ledger.add(copy)
    assert ledger.enter(copy)
    ledger.stop(MigrationId("m"))
    ledger.close()
    ledger.leave(copy)
    ledger.stop(MigrationId("m"))
    ledger.join(WAIT_S)
    assert events.empty()
    with pytest.raises(TransportError, match="closed"):
        ledger.add(copy)


def test_of_each_group_a_source_may_bring_fewer_blocks(desk: Desk) -> None:
    ids = (torch.tensor([1, 2]), torch.tensor([7, 8, 9]))
    copy = Copy(Side.DESTINATION, stage("m"), ids, (10, 4), None, False, 0.0, None)
    desk.ledger.add(copy)
    waker = Waker()
    expected = "2+3 blocks of 32 bytes in all are expected, not "
    assert desk.ledger.claim(stage("m"), (3, 2), 38, waker) == expected + "3+2 of 38"
    assert desk.ledger.claim(stage("m"), (2, 1), 20, waker) == expected + "2+1 of 20"
    assert desk.ledger.claim(stage("m"), (2,), 20, waker) == expected + "2 of 20"
    assert desk.ledger.claim(stage("m"), (0, 2), 8, waker) is copy
    assert [each.tolist() for each in copy.block_ids] == [[], [7, 8]]
    assert copy.copy_bytes == 8
    waker.close()
