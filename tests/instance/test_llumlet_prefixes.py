"""Prefixes that move alone: their blocks are kept, copied, adopted and given back, and nothing else
of a migration concerns them."""

from collections.abc import Sequence

from sterna.instance.llumlet import Llumlet, LlumletEffect, PrefixCopied
from sterna.migration.coordinator import MAX_INCOMING_PREFIXES
from sterna.migration.messages import (
    Aborted,
    Adopt,
    BlocksReserved,
    Commit,
    Committed,
    CopyBlocks,
    Drain,
    Drained,
    Ended,
    Inspect,
    Inspected,
    KeepPrefix,
    Reason,
    Release,
    RequestPosition,
    Reserve,
    ReserveBlocks,
    Reserved,
    Send,
    StageReceived,
)
from sterna.types import InstanceId, MigrationId, RequestId, prefix_id, whose_prefix
from tests.instance.llumlets import A, B, N, config, inspects, running, view

R = RequestId("r")
PREFIX = prefix_id(R)
ID = MigrationId("A-1")
POSITION = RequestPosition(False, 3, 3, 0, num_valid_tokens=48)


def messages(effects: Sequence[LlumletEffect]) -> list[object]:
    return [each.message for each in effects if isinstance(each, Send)]


def ordered(llumlet: Llumlet) -> list[LlumletEffect]:
    return llumlet.on_copy_prefix(R, B, b"hashes", 16, 0.0)


def test_the_ids_of_prefixes_are_their_own() -> None:
    assert whose_prefix(PREFIX) == R
    assert whose_prefix(R) is None


def test_a_prefix_moves_in_one_stage_without_a_batch() -> None:
    llumlet = Llumlet(A, config())
    keep, inspect = ordered(llumlet)
    assert keep == KeepPrefix(ID, PREFIX, b"hashes", 16)
    assert inspect == Inspect(ID, PREFIX)
    (reserve,) = messages(llumlet.on_outcome(ID, Inspected(POSITION, b""), 0.0))
    assert isinstance(reserve, Reserve)
    assert (reserve.is_last, reserve.num_blocks >= 3) == (True, True)
    drain = llumlet.on_message(B, Reserved(ID, N, 0, ("there",)), 0.0)
    assert [type(each) for each in drain] == [Drain]
    copied = llumlet.on_outcome(ID, Drained(3, b"state"), 0.0)
    assert [each.num_blocks for each in copied if isinstance(each, CopyBlocks)] == [3]
    ended = llumlet.on_message(B, Committed(ID, N), 0.0)
    assert Release(ID, PREFIX) in ended
    assert [each for each in ended if isinstance(each, PrefixCopied)] == []


def test_the_request_may_come_when_the_blocks_are_there() -> None:
    """The destination says so; by then it has decided to adopt them."""
    llumlet = Llumlet(B, config())
    reserve = Reserve(ID, PREFIX, 0, 0, 3, True, None, b"", 48)
    assert any(isinstance(each, ReserveBlocks) for each in llumlet.on_message(A, reserve, 0.0))
    llumlet.on_outcome(ID, BlocksReserved(0, ("here",)), 0.0)
    llumlet.on_message(A, Commit(ID, N, PREFIX, 0, 3, b"state"), 0.0)
    adopt, done = llumlet.on_outcome(ID, StageReceived(0), 0.0)
    assert adopt == Adopt(ID, PREFIX, 3, b"state")
    assert done == PrefixCopied(R, is_copied=True)


def test_what_was_kept_is_given_back_when_nothing_is_copied() -> None:
    llumlet = Llumlet(A, config())
    ordered(llumlet)
    llumlet.on_outcome(ID, Inspected(POSITION, b""), 0.0)
    effects = llumlet.on_message(B, Aborted(ID, None, Reason.NO_MEMORY), 0.0)
    release, ended, done = effects
    assert release == Release(ID, PREFIX)
    assert isinstance(ended, Ended)
    assert done == PrefixCopied(R, is_copied=False)


def test_what_is_no_longer_cached_is_not_waited_for() -> None:
    llumlet = Llumlet(A, config())
    ordered(llumlet)
    assert PrefixCopied(R, is_copied=False) in llumlet.on_outcome(ID, Inspected(None), 0.0)


def test_a_dead_destination_ends_the_wait_and_takes_nothing_back() -> None:
    llumlet = Llumlet(A, config())
    ordered(llumlet)
    llumlet.on_outcome(ID, Inspected(POSITION, b""), 0.0)
    llumlet.on_message(B, Reserved(ID, N, 0, ("there",)), 0.0)
    llumlet.on_outcome(ID, Drained(3, b"state"), 0.0)
    effects = llumlet.on_peer_dead(B, 0.0)
    assert Release(ID, PREFIX) in effects
    assert PrefixCopied(R, is_copied=False) in effects


def test_engines_that_cannot_exchange_blocks_are_not_asked() -> None:
    llumlet = Llumlet(A, config())
    llumlet.set_incompatible_instances([B])
    assert ordered(llumlet) == [PrefixCopied(R, is_copied=False)]


def test_an_order_that_comes_twice_counts_once() -> None:
    llumlet = Llumlet(A, config())
    ordered(llumlet)
    assert ordered(llumlet) == []


def test_the_end_of_one_copy_gives_back_nothing_of_the_next() -> None:
    """The engine computes a long step meanwhile: the first copy's blocks are kept only after it,
    and given back only when they have been looked at."""
    llumlet = Llumlet(A, config())
    ordered(llumlet)
    ended = llumlet.on_peer_dead(B, 0.0)
    assert ended[0] == Release(ID, PREFIX)
    keep, *_ = llumlet.on_copy_prefix(R, InstanceId("C"), b"hashes", 16, 0.0)
    assert isinstance(keep, KeepPrefix)
    assert keep.request_id != PREFIX
    assert whose_prefix(keep.request_id) == R


def test_requests_move_beside_prefixes() -> None:
    """The number of migrations at once is that of requests."""
    llumlet = Llumlet(A, config(num_concurrent_migrations=1))
    ordered(llumlet)
    assert llumlet.num_outgoing == 0
    llumlet.on_view(view(running("s")), 0.0)
    assert inspects(llumlet.on_destination(B, 0.0)) == ["s"]


def test_as_many_prefixes_come_at_once_and_a_request_beside_them() -> None:
    llumlet = Llumlet(B, config(num_concurrent_migrations=1))

    def come(number: int, request_id: RequestId) -> list[object]:
        migration_id = MigrationId(f"A-{number}")
        return messages(
            llumlet.on_message(A, Reserve(migration_id, request_id, 0, 0, 3, True, None), 0.0)
        )

    for number in range(MAX_INCOMING_PREFIXES):
        assert come(number, prefix_id(RequestId(f"r{number}"))) == []
    (refusal,) = come(99, PREFIX)
    assert isinstance(refusal, Aborted)
    assert refusal.reason is Reason.BUSY
    assert come(100, RequestId("s")) == []
    assert llumlet.num_incoming == 1
