"""Traces and rows hold together: lengths of arrays, order, prefixes, repetition."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.rows import Rows
from sterna.workload.trace import Trace


def blocks(*prompts: list[int]) -> PrefixBlocks:
    ids = [each for prompt in prompts for each in prompt]
    return PrefixBlocks(np.array(ids, np.int64), np.cumsum([len(p) for p in prompts]))


def listed(prefix_blocks: PrefixBlocks | None) -> list[list[int]]:
    assert prefix_blocks is not None
    return [prefix_blocks.of(row).tolist() for row in range(len(prefix_blocks))]


THREE = Rows(
    input_tokens=np.array([5, 6, 7]),
    output_tokens=np.array([10, 20, 30]),
    arrival_s=np.array([100.0, 101.0, 104.0]),
    priority=np.array([0, 1, 0]),
    prefix_blocks=blocks([0, 1], [], [0, 2]),
)

TRACE = Trace("t", np.array([0.0, 1.0]), np.array([5, 6]), np.array([1, 2]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arrival_s", np.array([-0.1, 1.0]), "arrival_s of row 0 must be ascending and from 0 on"),
        ("arrival_s", np.array([1.0, 0.5]), "arrival_s of row 1 must be ascending and from 0 on"),
        ("arrival_s", np.array([0.0, np.nan]), "arrival_s of row 1 must be ascending"),
        ("input_tokens", np.array([5, 0]), "input_tokens of row 1 must be at least 1"),
        ("output_tokens", np.array([0, 1]), "output_tokens of row 0 must be at least 1"),
        ("priority", np.array([0, -1]), "priority of row 1 must be from 0"),
        ("priority", np.array([1_001, 0]), "priority of row 0 must be from 0 .normal. to 1,000"),
        ("input_tokens", np.array([5]), "input_tokens has 1 entries, not 2"),
        ("prefix_blocks", blocks([1]), "prefix_blocks has 1 entries, not 2"),
    ],
)
def test_a_trace_that_does_not_fit_together_is_refused(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(TRACE, **{field: value})


def test_a_trace_may_know_its_prefixes() -> None:
    trace = dataclasses.replace(TRACE, prefix_blocks=blocks([3], [3, 4]))
    assert listed(trace.prefix_blocks) == [[3], [3, 4]]


@pytest.mark.parametrize("end", [[1], [2, 1, 3], [1, 4], [-1, 3]])
def test_prefix_blocks_that_do_not_fit_together_are_refused(end: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="must ascend to the number of ids"):
        PrefixBlocks(np.array([1, 2, 3]), np.array(end))


@given(
    prompts=st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=8),
    picks=st.lists(st.integers(0, 100), max_size=12),
)
def test_taken_prefix_blocks_are_those_of_the_rows(
    prompts: list[list[int]], picks: list[int]
) -> None:
    rows = [pick % len(prompts) for pick in picks] if prompts else []
    taken = blocks(*prompts).take(np.array(rows, np.int64))
    assert listed(taken) == [prompts[row] for row in rows]


def test_fewer_requests_are_the_first() -> None:
    rows = THREE.repeated_to(2)
    assert rows.input_tokens.tolist() == [5, 6]
    assert rows.output_tokens.tolist() == [10, 20]
    assert rows.arrival_s is not None
    assert rows.arrival_s.tolist() == [100.0, 101.0]
    assert rows.priority is not None
    assert rows.priority.tolist() == [0, 1]
    assert listed(rows.prefix_blocks) == [[0, 1], []]


def test_more_requests_than_rows_repeat_them_one_mean_gap_later() -> None:
    """Three requests in 4 s have a mean gap of 2 s; another pass has prompts of its own."""
    rows = THREE.repeated_to(7)
    assert rows.input_tokens.tolist() == [5, 6, 7, 5, 6, 7, 5]
    assert rows.arrival_s is not None
    assert rows.arrival_s.tolist() == [100.0, 101.0, 104.0, 106.0, 107.0, 110.0, 112.0]
    assert rows.mean_rate == THREE.mean_rate == 0.5
    assert rows.priority is not None
    assert rows.priority.tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert listed(rows.prefix_blocks) == [[0, 1], [], [0, 2], [3, 4], [], [3, 5], [6, 7]]


def test_rows_without_more_columns_are_repeated_without() -> None:
    rows = Rows(np.array([5]), np.array([6])).repeated_to(3)
    assert rows.input_tokens.tolist() == [5, 5, 5]
    assert (rows.arrival_s, rows.priority, rows.prefix_blocks) == (None, None, None)


def test_rows_of_one_moment_are_repeated_at_it() -> None:
    rows = Rows(np.array([5]), np.array([6]), np.array([3.0]))
    repeated = rows.repeated_to(2)
    assert rows.mean_rate is None
    assert repeated.arrival_s is not None
    assert repeated.arrival_s.tolist() == [3.0, 3.0]


def test_requests_that_are_too_long_are_left_out() -> None:
    rows = THREE.no_longer_than(26)
    assert rows.input_tokens.tolist() == [5, 6]
    assert listed(rows.prefix_blocks) == [[0, 1], []]
    with pytest.raises(ConfigurationError, match="leaves no request: the shortest has 15 tokens"):
        THREE.no_longer_than(14)
