"""Request rates that change over time. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class RateCurve:
    """A rate that is constant over each of several pieces of time, one after the other.

    A curve whose last piece is finite repeats for ever.

    Attributes:
        duration_s: float64[n], duration of each piece, positive; the last may be infinite.
        rate: float64[n], requests a second during it, at least 0.

    Raises:
        ConfigurationError: a value is invalid, or the rate stays at 0 from some time on.
    """

    duration_s: NDArray[np.float64]
    rate: NDArray[np.float64]

    def __post_init__(self) -> None:
        if not len(self.duration_s) == len(self.rate) > 0:
            raise ConfigurationError("a rate curve must have a duration and a rate for each piece")
        if not ((self.duration_s > 0).all() and np.isfinite(self.duration_s[:-1]).all()):
            raise ConfigurationError("all pieces of a rate curve must have a positive duration")
        if not (np.isfinite(self.rate).all() and (self.rate >= 0).all()):
            raise ConfigurationError("all rates of a rate curve must be at least 0")
        if not (self.rate if self.repeats else self.rate[-1:]).any():
            raise ConfigurationError("a rate curve must not stay at 0 for good")

    @property
    def repeats(self) -> bool:
        """Whether the curve is finite, and therefore repeats."""
        return bool(np.isfinite(self.duration_s[-1]))

    @property
    def mean_rate(self) -> float:
        """Requests a second over the whole curve; those of its last piece if that is infinite."""
        if not self.repeats:
            return float(self.rate[-1])
        return float((self.rate * self.duration_s).sum() / self.duration_s.sum())

    def scaled_to(self, mean_rate: float) -> "RateCurve":
        """The same curve with another mean rate.

        Raises:
            ConfigurationError: the curve is infinite, and has no mean of its own.
        """
        if not self.repeats:
            raise ConfigurationError(
                "a rate curve can be scaled to a rate only if its last piece has a duration"
            )
        return RateCurve(self.duration_s, self.rate * (mean_rate / self.mean_rate))

    def compressed(self, factor: float) -> "RateCurve":
        """The same rates, with durations divided by `factor`."""
        return RateCurve(self.duration_s / factor, self.rate)

    def time_s(self, num_expected: NDArray[np.float64]) -> NDArray[np.float64]:
        """The times at which these numbers of requests are expected; ascending if the numbers are.

        The inverse of the integral of the rate. If a rate of 0 leaves a choice, the latest time.
        """
        expected = self.rate * self.duration_s
        num_rounds = np.zeros_like(num_expected)
        if self.repeats:
            num_rounds = np.floor(num_expected / expected.sum())
        in_round = num_expected - num_rounds * expected.sum() if self.repeats else num_expected
        before = np.concatenate(([0.0], np.cumsum(expected)[:-1]))
        start_s = np.concatenate(([0.0], np.cumsum(self.duration_s)[:-1]))
        # Pieces without requests are skipped, even if rounding puts a request behind the last piece
        # that has some.
        last = int(np.flatnonzero(self.rate)[-1])
        piece = np.minimum(np.searchsorted(before, in_round, side="right") - 1, last)
        piece = np.maximum(piece, int(np.flatnonzero(self.rate)[0]))
        time_s = start_s[piece] + (in_round - before[piece]) / self.rate[piece]
        if self.repeats:
            time_s = time_s + num_rounds * self.duration_s.sum()
        # Rounding at the border of two pieces must not change the order.
        return np.maximum.accumulate(np.maximum(time_s, 0.0))
