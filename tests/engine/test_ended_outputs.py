"""Counts of the outputs that have ended on an engine."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.engine.ended_outputs import EndedOutputs
from sterna.types import MAX_ENDED, OUTPUT_LENGTHS


def counted(*lengths: int) -> dict[int, int]:
    """How many outputs are counted from each length on."""
    ended = EndedOutputs()
    for each in lengths:
        ended.add(each)
    counts = zip(OUTPUT_LENGTHS, ended.counts, strict=True)
    return {length: count for length, count in counts if count}


def test_outputs_are_counted_from_one_length_to_below_the_next() -> None:
    assert counted(1, 15, 16, 31, 95, 96, 127, 128) == {0: 2, 16: 2, 64: 1, 96: 2, 128: 1}


def test_the_longest_ones_have_no_end() -> None:
    assert counted(98_303, 98_304, 5_000_000) == {65_536: 1, 98_304: 2}


def test_a_request_that_ended_without_a_token_has_no_output() -> None:
    assert counted(0, 0) == {}


def test_another_workload_shows_after_some_thousand_outputs() -> None:
    assert counted(*[20] * MAX_ENDED) == {16: MAX_ENDED // 2}
    half = MAX_ENDED // 2
    assert counted(*[20] * MAX_ENDED, *[500] * half) == {16: half // 2, 384: half // 2}


@given(st.lists(st.integers(1, 200_000), max_size=50))
def test_each_output_is_counted_once(lengths: list[int]) -> None:
    assert sum(counted(*lengths).values()) == len(lengths)
