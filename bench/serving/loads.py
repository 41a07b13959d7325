"""The loads of the benchmarks that compare servers: short requests in bursts, or in steps.

Lengths are log-uniform, so that most requests are short and some are several times as long. They
suit the small model on a machine with few cores.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.types import HIGH
from sterna.workload.arrivals import Step, curve_arrivals_s, gamma_arrivals_s, recorded_arrivals_s
from sterna.workload.class_mix import mix_priorities
from sterna.workload.randomness import Draws
from sterna.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Lengths:
    """The shortest and the longest prompts and answers, in tokens."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


STEP_LENGTHS = Lengths((64, 512), (32, 256))
BURST_LENGTHS = Lengths((32, 256), (32, 128))
"""Shorter, for more requests: the effect of bursts on a class depends on their number."""


def bursty_trace(
    rate: float, seconds: float, *, cv: float, high_fraction: float, seed: int
) -> Trace:
    """Requests with gaps of a gamma distribution (Section 6.4), a part of them high.

    Args:
        rate: requests a second of the drawn trace: gaps are stretched to it, since the mean of few
            bursts is far from the distribution's.
        seconds: from the first request to about the last.
        cv: coefficient of variation of the gaps.
    """
    draws = np.random.RandomState(seed)
    num_requests = max(2, round(rate * seconds))
    arrival_s = recorded_arrivals_s(gamma_arrivals_s(rate, cv, num_requests, draws), rate)
    return _trace("bursts", arrival_s, BURST_LENGTHS, high_fraction, draws)


def stepped_trace(steps: Step, *, seed: int) -> Trace:
    """Poisson arrivals at the rate of each step, from the first one's begin to the last one's end.

    All steps must end.
    """
    draws = np.random.RandomState(seed)
    seconds = sum(steps.durations_s)
    # More than can arrive; the curve repeats at its end, and later arrivals are cut off.
    mean = sum(r * d for r, d in zip(steps.rates, steps.durations_s, strict=True))
    most = round(mean + 10.0 * mean**0.5 + 10.0)
    arrival_s = curve_arrivals_s(steps.curve(), most, draws)
    return _trace("steps", arrival_s[arrival_s < seconds], STEP_LENGTHS, 0.0, draws)


def burst(num_requests: int, lengths: Lengths, *, seed: int) -> Trace:
    """Requests that all arrive at once, to measure the capacity of a server."""
    return _trace("burst", np.zeros(num_requests), lengths, 0.0, np.random.RandomState(seed))


def _trace(
    name: str,
    arrival_s: NDArray[np.float64],
    lengths: Lengths,
    high_fraction: float,
    draws: Draws,
) -> Trace:
    num_requests = len(arrival_s)
    return Trace(
        name,
        arrival_s,
        _drawn(lengths.input_tokens, num_requests, draws),
        _drawn(lengths.output_tokens, num_requests, draws),
        mix_priorities({HIGH: high_fraction}, num_requests, draws),
    )


def _drawn(bounds: tuple[int, int], num_requests: int, draws: Draws) -> NDArray[np.int64]:
    shortest, longest = bounds
    shares = draws.random(num_requests)
    lengths: NDArray[np.int64] = np.round(shortest * (longest / shortest) ** shares).astype(
        np.int64
    )
    return lengths
