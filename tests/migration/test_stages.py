"""Stages of a migration: the blocks that the next one takes."""

from dataclasses import replace

import pytest

from sterna.migration.messages import Mode, Reason, RequestPosition
from sterna.migration.stages import Stage, plan_stage
from tests.migration.machines import CONFIG, progress


def planned(
    at: RequestPosition, first_block: int = 0, number: int = 0, mode: Mode = Mode.LIVE
) -> Stage | Reason:
    return plan_stage(Stage(number, first_block), at, mode, CONFIG)


def test_a_stage_takes_the_full_blocks_that_are_not_in_place() -> None:
    """Section 4.2: "copy the KV cache blocks of completed iterations": a full block changes no
    more."""
    assert planned(progress(9)) == Stage(0, 0, 8, False)
    assert planned(progress(14), first_block=8, number=1) == Stage(1, 8, 5, False)


@pytest.mark.parametrize(("num_blocks", "is_last"), [(11, False), (10, True), (9, True)])
def test_a_stage_is_the_last_one_when_few_blocks_remain(num_blocks: int, is_last: bool) -> None:
    stage = planned(progress(num_blocks), first_block=8, number=1)
    num_remaining = num_blocks - 8
    spare = Stage(1, 8, num_remaining + 1, True)
    assert stage == (spare if is_last else Stage(1, 8, num_remaining - 1, False))


@pytest.mark.parametrize(
    ("block_bytes", "state_bytes", "is_last"),
    [(500, 0, True), (501, 0, False), (400, 200, True), (400, 201, False)],
)
def test_a_last_stage_of_many_bytes_waits_for_the_full_blocks(
    block_bytes: int, state_bytes: int, is_last: bool
) -> None:
    """Two blocks are few, but those of a model with recurrent layers may hold much."""
    config = replace(CONFIG, last_stage_max_bytes=1000)
    at = replace(progress(10), block_bytes=block_bytes, state_bytes=state_bytes)
    spare, full = Stage(1, 8, 3, True), Stage(1, 8, 1, False)
    assert plan_stage(Stage(1, 8), at, Mode.LIVE, config) == (spare if is_last else full)
    # With no full block left there is nothing to wait for.
    assert plan_stage(Stage(2, 9), at, Mode.LIVE, config) == Stage(2, 9, 2, True)


def test_a_request_whose_blocks_are_all_being_written_is_drained_for_them() -> None:
    """As in its first prefill: a stage before the last one would copy nothing."""
    assert planned(RequestPosition(False, 0, 5, 0)) == Stage(0, 0, 6, True)
    assert planned(RequestPosition(False, 1, 5, 0)) == Stage(0, 0, 1, False)


def test_a_queuing_request_is_drained_without_a_copy() -> None:
    """It has no KV cache."""
    assert planned(progress(20, is_queuing=True)) == Stage(0, 0, 0, True)


def test_a_request_that_moves_without_its_kv_cache_is_drained_without_a_copy() -> None:
    assert planned(progress(20), mode=Mode.RECOMPUTE) == Stage(0, 0, 0, True)


def test_stop_and_copy_has_a_single_stage_with_all_blocks() -> None:
    """Section 6.2, the blocking baseline: the request is drained before the first block."""
    assert planned(progress(20), mode=Mode.STOP_AND_COPY) == Stage(0, 0, 21, True)


def test_the_next_stage_begins_behind_the_blocks_that_were_copied() -> None:
    """These may be fewer than planned."""
    assert Stage(1, 8, 5, False).next_unplanned(3) == Stage(2, 11)


@pytest.mark.parametrize("number", [6, 7, 8])
def test_a_stage_behind_which_there_may_be_no_other_must_be_the_last(number: int) -> None:
    assert CONFIG.max_stages == 8
    too_many = Reason.TOO_MANY_STAGES
    assert planned(progress(20), number=number) == (
        Stage(6, 0, 19, False) if number == 6 else too_many
    )
    assert planned(progress(2), number=number) == (
        Stage(number, 0, 3, True) if number < 8 else too_many
    )
