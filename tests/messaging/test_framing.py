"""What is cut into parts is whole again on the other side."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.messaging.framing import PART_BYTES, cut, join

SIZES = st.one_of(
    st.integers(0, 10),
    st.integers(1, 4).flatmap(
        lambda parts: st.integers(parts * (PART_BYTES - 1) - 2, parts * (PART_BYTES - 1) + 2)
    ),
)


@given(st.lists(SIZES, min_size=1, max_size=5))
def test_frames_are_whole_again_and_in_as_few_parts_as_may_be(sizes: list[int]) -> None:
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]
    parts = cut(frames)
    assert join(parts) == frames
    assert max(map(len, parts)) <= PART_BYTES
    assert len(parts) == sum(max(1, math.ceil(size / (PART_BYTES - 1))) for size in sizes)


@pytest.mark.parametrize("parts", [[], [b""], [b"\0a", b"\1b"], [b"\2a"], [b"\2a", b"\0b"]])
def test_parts_that_are_none_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match="part"):
        join(parts)
