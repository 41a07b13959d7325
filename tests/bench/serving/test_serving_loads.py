"""The loads of the benchmarks that compare servers are what they say."""

import numpy as np
import pytest

from bench.serving.loads import (
    BURST_LENGTHS,
    STEP_LENGTHS,
    Lengths,
    burst,
    bursty_trace,
    stepped_trace,
)
from sterna.types import HIGH
from sterna.workload.arrivals import Step


def test_bursts_have_the_rate_that_was_asked_for_and_a_tenth_is_high() -> None:
    trace = bursty_trace(2.0, 100.0, cv=4.0, high_fraction=0.1, seed=1)
    assert len(trace) == 200
    assert (len(trace) - 1) / trace.arrival_s[-1] == pytest.approx(2.0)
    assert (trace.priority == HIGH).sum() == 20
    gaps_s = np.diff(trace.arrival_s)
    assert gaps_s.std() / gaps_s.mean() > 2.0, "bursts, not independent arrivals"


def test_a_seed_gives_the_same_requests() -> None:
    first, again = (bursty_trace(1.0, 60.0, cv=4.0, high_fraction=0.1, seed=3) for _ in range(2))
    other = bursty_trace(1.0, 60.0, cv=4.0, high_fraction=0.1, seed=4)
    assert (first.arrival_s == again.arrival_s).all()
    assert (first.input_tokens == again.input_tokens).all()
    assert (first.priority == again.priority).all()
    assert (first.input_tokens != other.input_tokens).any()


@pytest.mark.parametrize("of", [BURST_LENGTHS, STEP_LENGTHS])
def test_most_requests_are_short_and_none_is_out_of_bounds(of: Lengths) -> None:
    trace = burst(2000, of, seed=1)
    assert (trace.arrival_s == 0.0).all()
    for lengths, (shortest, longest) in (
        (trace.input_tokens, of.input_tokens),
        (trace.output_tokens, of.output_tokens),
    ):
        assert shortest <= lengths.min() < 1.1 * shortest
        assert 0.9 * longest < lengths.max() <= longest
        assert np.median(lengths) < (shortest + longest) / 2


def test_steps_have_their_rates_and_end() -> None:
    trace = stepped_trace(Step((0.5, 8.0, 0.5), (100.0, 100.0, 200.0)), seed=1)
    counts, _ = np.histogram(trace.arrival_s, bins=(0.0, 100.0, 200.0, 400.0))
    for count, expected in zip(counts, (50, 800, 100), strict=True):
        # Five standard deviations of a Poisson count.
        assert abs(count - expected) < 5.0 * expected**0.5
    assert 390.0 < trace.arrival_s[-1] < 400.0
    assert (trace.priority == 0).all()
