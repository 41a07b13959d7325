"""What a migration is told of an emulated engine, whichever driver it has."""

from dataclasses import replace

import pytest

from sterna.engine.emulated import outcomes
from sterna.engine.emulated.core import EmulatedCore
from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Drain,
    Drained,
    DrainRefused,
    Inspected,
    Mode,
    Reason,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.types import MigrationId, RequestId
from tests.engine.emulated.builders import add, engine, request, step

M, R, OTHER = MigrationId("m"), RequestId("r"), RequestId("other")
DRAIN = Drain(M, R, Mode.LIVE, 0, first_block=0, max_blocks=2)
RESERVE = ReserveBlocks(M, OTHER, 1, first_block=3, num_blocks=2, is_last=True, request=None)
ADOPT = Adopt(M, OTHER, 1, b"state")


def running() -> EmulatedCore:
    """r has 5 tokens of KV, in 2 of 10 blocks; one more stays free."""
    core = engine(max_num_seqs=2)
    add(core, request("r", 5))
    step(core)
    return core


def unasked(*_: object) -> bytes:
    raise AssertionError("nothing is to be encoded")


def test_an_inspection_brings_the_request_and_where_it_stands() -> None:
    core = running()
    inspected = outcomes.inspect(core, R, lambda request_id: request_id.encode())
    assert inspected == Inspected(core.progress(R), b"r")


def test_an_inspection_finds_a_request_gone() -> None:
    assert outcomes.inspect(running(), OTHER, unasked) == Inspected(None)


@pytest.mark.parametrize(("mode", "num_blocks"), [(Mode.LIVE, 2), (Mode.RECOMPUTE, 0)])
def test_a_drain_brings_the_state_and_its_blocks_unless_these_are_computed_again(
    mode: Mode, num_blocks: int
) -> None:
    drained = outcomes.drain(running(), replace(DRAIN, mode=mode), lambda each: each.encode())
    assert drained == Drained(num_blocks, b"r")


def test_a_refused_drain_exports_nothing() -> None:
    refused = outcomes.drain(running(), replace(DRAIN, max_blocks=1), unasked)
    assert refused == DrainRefused(None)


def test_a_reservation_reaches_to_the_end_of_the_stage_and_is_listened_for() -> None:
    core = running()
    reserved = outcomes.reserve(core, RESERVE, lambda effect: (f"at {effect.stage}",))
    assert reserved == BlocksReserved(1, ("at 1",))
    assert core.num_reserved_blocks == 5
    assert core.reserve("another", 1, needs_slot=True) is Reason.NO_SLOT


@pytest.mark.parametrize(
    ("effect", "reason"),
    [
        (replace(RESERVE, request_id=R), Reason.DUPLICATE_REQUEST),
        (replace(RESERVE, num_blocks=5), Reason.NO_MEMORY),
    ],
)
def test_a_refused_reservation_is_not_listened_for(effect: ReserveBlocks, reason: Reason) -> None:
    core = running()
    assert outcomes.reserve(core, effect, unasked) == ReserveFailed(1, reason)
    assert core.num_reservations == 0


def test_a_request_is_adopted_once() -> None:
    core = running()
    core.reserve(M, 1, needs_slot=True)
    state = request("other", 2, num_output_tokens=1, num_computed_tokens=2)
    adopted = outcomes.adopt(core, ADOPT, lambda: core.adopt(M, state, 1))
    assert adopted == Adopted()
    assert outcomes.adopt(core, ADOPT, unasked) == AdoptFailed(Reason.DUPLICATE_REQUEST)
