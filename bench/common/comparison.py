"""Ratios of two policies, and medians over pairs of runs, with confidence intervals. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common.tables import LOSS_FLOOR_S, Row

NUM_RESAMPLES = 2_000
CONFIDENCE = 0.9
TAILS = (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE))
"""The percentiles of an interval's bounds."""


NUM_REDRAWS = 500
"""Resamples where each computes a number from the rows again."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number that follows from several seeds.

    Attributes:
        mean: of all seeds.
        low, high: the bounds of the interval of `CONFIDENCE`, over the seeds; NaN of a single one.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of_seeds(cls, logs: Sequence[float]) -> "Estimate":
        """The geometric mean, from the logarithm of each seed's factor, resampled (bootstrap,
        percentiles)."""
        values = np.array(logs)
        mean = math.exp(float(values.mean()))
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        draws = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
        means = np.exp(values[draws].mean(axis=1))
        low, high = np.percentile(means, TAILS)
        return cls(mean, float(low), float(high))

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Middle:
    """A median over pairs of runs, with the bounds of its interval of `CONFIDENCE` (bootstrap)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Middle":
        """Of at least one value; a single one has no interval."""
        ordered = np.array(values)
        if len(values) < 2:
            return cls(values[0], math.nan, math.nan)
        draws = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
        low, high = np.percentile(np.median(ordered[draws], axis=1), TAILS)
        return cls(float(np.median(ordered)), float(low), float(high))

    def text(self, digits: int) -> str:
        """With this number of digits behind the point."""
        if math.isnan(self.low):
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def factor(
    rows: Iterable[Row], metric: str, policy: str, other: str, points: Sequence[str]
) -> Estimate | None:
    """The other's value over the policy's, for a metric of which less is better: above 1 the policy
    is better. The geometric mean over points and seeds.

    Preemption losses count with at least `LOSS_FLOOR_S`.

    Returns:
        None if a value is missing.
    """
    found = {(row["policy"], row["point"], row["seed"]): row.get(metric) for row in rows}
    seeds = sorted({seed for name, point, seed in found if name == policy and point in points})
    floor = LOSS_FLOOR_S if metric == "loss_mean_s" else 0.0
    logs = []
    for seed in seeds:
        of_seed = []
        for point in points:
            ours, theirs = found.get((policy, point, seed)), found.get((other, point, seed))
            if (not ours and not floor) or theirs is None or ours is None:
                return None
            of_seed.append(math.log(max(theirs, floor) / max(ours, floor)))
        logs.append(sum(of_seed) / len(of_seed))
    return Estimate.of_seeds(logs) if logs else None


def estimate(
    rows: Sequence[Row], statistic: Callable[[Sequence[Row]], float | None]
) -> Estimate | None:
    """A number that a function finds in rows, with its interval: seeds are drawn with replacement,
    and the function gets the rows of these. None if it finds none in all rows."""
    value = statistic(rows)
    if value is None:
        return None
    of_seed: dict[int, list[Row]] = {}
    for row in rows:
        of_seed.setdefault(row["seed"], []).append(row)
    if len(of_seed) < 2:
        return Estimate(value, math.nan, math.nan)
    every = list(of_seed.values())
    draws = np.random.default_rng(0).integers(len(every), size=(NUM_REDRAWS, len(every)))
    again = (statistic([row for k in drawn for row in every[k]]) for drawn in draws.tolist())
    low, high = np.percentile([each for each in again if each is not None], TAILS)
    return Estimate(value, float(low), float(high))


def mean(rows: Iterable[Row], metric: str, policy: str, point: str) -> float | None:
    """The mean over the seeds of one point; None without values."""
    values = [
        row[metric]
        for row in rows
        if row["policy"] == policy and row["point"] == point and row.get(metric) is not None
    ]
    return sum(values) / len(values) if values else None


def best(
    value_of: Callable[[str], float | None], policies: Iterable[str]
) -> tuple[str, float] | None:
    """The policy of the smallest value, and that value."""
    known = [(value, each) for each in policies if (value := value_of(each)) is not None]
    if not known:
        return None
    value, name = min(known)
    return name, value
