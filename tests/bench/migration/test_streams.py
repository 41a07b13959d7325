"""Streams of the migration benchmark: the tokens of requests that move."""

import asyncio

import msgspec
import pytest

from bench.migration.samples import Arrival
from bench.migration.streams import Stream
from sterna.types import RequestId


def stream(*arrivals: tuple[int, list[int]]) -> Stream:
    """A request to which these tokens have come, each with the index of the first of them."""
    made = Stream(RequestId("r1"), b"", 5, "i0")
    for time_s, (first_index, token_ids) in enumerate(arrivals):
        payload = msgspec.msgpack.encode([0, [["r1", token_ids]]])
        made.add(Arrival(float(time_s), "i0", first_index, len(token_ids)), payload)
    return made


def test_tokens_are_in_the_order_of_the_request() -> None:
    """The last ones of a source may come after the first ones of the destination."""
    found = stream((0, [7]), (2, [9, 10]), (1, [8]))
    assert found.token_ids() == [7, 8, 9, 10]
    assert (found.num_outputs, found.num_tokens) == (4, 9)


def test_tokens_end_before_the_first_one_that_is_missing() -> None:
    assert stream((0, [7, 8]), (3, [10])).token_ids() == [7, 8]
    assert stream((1, [8])).token_ids() == []
    assert stream().token_ids() == []


def test_a_token_that_comes_twice_counts_once_and_must_be_the_same() -> None:
    assert stream((0, [7, 8]), (1, [8, 9])).token_ids() == [7, 8, 9]
    with pytest.raises(ValueError, match="output token 1 of r1 came twice, as 8 and 9"):
        stream((0, [7, 8]), (1, [9])).token_ids()


def test_a_request_that_ends_early_is_not_waited_for() -> None:
    ended = stream((0, [7]))
    ended.finish()
    asyncio.run(ended.until_outputs(1))
    with pytest.raises(RuntimeError, match="r1 ended after 1 output tokens, before 2"):
        asyncio.run(ended.until_outputs(2))
