"""Priorities are mixed by fraction, at random, and by nothing but the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.types import HIGH, NORMAL, Priority
from sterna.workload.class_mix import mix_priorities


def test_ten_percent_are_high() -> None:
    """Section 6.4: "randomly picking 10% of the requests and assigning high scheduling and
    execution priorities"."""
    priority = mix_priorities({HIGH: 0.1}, 10_000, np.random.RandomState(0xCADE))
    assert np.bincount(priority).tolist() == [9000, 1000]
    # Picked all over the trace, by no pattern: the gaps between them vary as a geometric law's do.
    gaps = np.diff(np.flatnonzero(priority))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)
    assert priority[:5000].sum() == pytest.approx(500, abs=75)


@given(
    weights=st.dictionaries(st.integers(0, 5), st.floats(0.0, 1.0), max_size=5),
    num_requests=st.integers(1, 500),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_class_gets_its_fraction(
    weights: dict[int, float], num_requests: int, seed: int
) -> None:
    total = sum(weights.values()) + 1e-3
    fractions = {Priority(each): weight / total for each, weight in weights.items() if each}
    priority = mix_priorities(fractions, num_requests, np.random.RandomState(seed))
    for each, fraction in fractions.items():
        assert (priority == each).sum() == pytest.approx(fraction * num_requests, abs=1.0)
    left = (1.0 - sum(fractions.values())) * num_requests
    assert (priority == NORMAL).sum() == pytest.approx(left, abs=1.0)
    again = mix_priorities(fractions, num_requests, np.random.RandomState(seed))
    assert np.array_equal(priority, again)


def test_more_of_a_lower_class_leaves_the_higher_one_as_it_is() -> None:
    top = Priority(2)
    few = mix_priorities({HIGH: 0.1, top: 0.2}, 1000, np.random.RandomState(5))
    many = mix_priorities({HIGH: 0.6, top: 0.2}, 1000, np.random.RandomState(5))
    assert np.array_equal(few == top, many == top)


def test_without_fractions_all_are_normal_and_the_stream_goes_on_alike() -> None:
    with_classes, without = np.random.RandomState(1), np.random.RandomState(1)
    mix_priorities({HIGH: 0.5}, 10, with_classes)
    assert not mix_priorities({}, 10, without).any()
    assert with_classes.random() == without.random()


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({HIGH: -0.1}, "that of priority 1 must be from 0 to 1, not -0.1"),
        ({HIGH: 1.1}, "that of priority 1 must be from 0 to 1, not 1.1"),
        ({HIGH: float("nan")}, "that of priority 1 must be from 0 to 1, not nan"),
        ({Priority(-1): 0.1}, "a priority must be at least 0 (normal), not -1"),
        ({HIGH: 0.6, Priority(2): 0.6}, "the fractions add up to 1.2"),
        ({HIGH: 0.1, NORMAL: 0.8}, "the fractions add up to 0.9"),
    ],
)
def test_fractions_that_cannot_be_are_refused(
    fractions: dict[Priority, float], message: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        mix_priorities(fractions, 10, np.random.RandomState(0))
    assert message in str(error.value)


def test_the_normal_priority_may_be_named_if_all_add_up() -> None:
    fractions = {NORMAL: 0.7, HIGH: 0.2, Priority(2): 0.1}
    priority = mix_priorities(fractions, 10, np.random.RandomState(0))
    assert np.bincount(priority).tolist() == [7, 2, 1]
