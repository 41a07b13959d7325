"""Ratios of two policies, and medians over pairs of runs, with confidence intervals. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.common.tables import LOSS_FLOOR_S, Row

CONFIDENCE = 0.9

INTERVALS = "90 % intervals (of fewer than five values: from the smallest to the largest)"
"""What reports call those of `Middle`."""


# fmt: off
T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)
# fmt: on
"""The 95th percentile of Student's t, for 1 to 30 degrees of freedom. Of 5 or 8 seeds, resampling
gives intervals of `CONFIDENCE` that hold the mean in 78 or 83 % of cases only."""

NORMAL_95 = 1.645
"""The same of the normal distribution, for more degrees of freedom."""


def half_width(values: Sequence[float]) -> float:
    """Half of the interval of `CONFIDENCE` around the mean of values of one normal distribution;
    NaN of a single one."""
    if len(values) < 2:
        return math.nan
    freedom = len(values) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else NORMAL_95
    return t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _is_at_least(value: float, low: float, high: float, bound: float) -> bool | None:
    """Whether a value with this interval is the bound or more; None: it has numbers on both sides.
    Without an interval the value itself decides."""
    if math.isnan(low):
        return value >= bound
    return None if low < bound <= high else low >= bound


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
        """The geometric mean, from the logarithm of each seed's factor, by Student's t."""
        middle, half = sum(logs) / len(logs), half_width(logs)
        return cls(math.exp(middle), math.exp(middle - half), math.exp(middle + half))

    def at_least(self, bound: float) -> bool | None:
        """Whether the number is this or more; None: the interval has numbers on both sides."""
        return _is_at_least(self.mean, self.low, self.high, bound)

    def at_most(self, bound: float) -> bool | None:
        """Whether the number is this or less; None: the interval has numbers on both sides."""
        return _is_at_least(-self.mean, -self.high, -self.low, -bound)

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Middle:
    """A median over pairs of runs, with the bounds of its interval.

    The bounds are two of the values, as far from the smallest as from the largest: the closest ones
    between which the median of the distribution is with at least `CONFIDENCE`, whatever the
    distribution. Of five values these are the smallest and the largest (93.75 %). Fewer have no
    such bounds: the interval is from the smallest to the largest, and holds the median less often.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Middle":
        """Of at least one value; a single one has no interval."""
        if len(values) < 2:
            return cls(values[0], math.nan, math.nan)
        ordered = sorted(map(float, values))
        outside = _num_outside(len(ordered))
        return cls(median(ordered), ordered[outside], ordered[-1 - outside])

    def at_least(self, bound: float) -> bool | None:
        """Whether the number is this or more; None: the interval has numbers on both sides."""
        return _is_at_least(self.median, self.low, self.high, bound)

    def at_most(self, bound: float) -> bool | None:
        """Whether the number is this or less; None: the interval has numbers on both sides."""
        return _is_at_least(-self.median, -self.high, -self.low, -bound)

    def text(self, digits: int) -> str:
        """With this number of digits behind the point."""
        if math.isnan(self.low):
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} [{self.low:,.{digits}f}, {self.high:,.{digits}f}]"


def _num_outside(num_values: int) -> int:
    """The number of values below an interval of `CONFIDENCE` of the median, and above it.

    Each value is below the median of its distribution with a probability of a half. The interval
    misses the median when no more than this number of values are on one side of it.
    """
    outside, missed = -1, 0.0
    while True:
        missed += 2 * math.comb(num_values, outside + 1) / 2**num_values
        if missed > 1 - CONFIDENCE:
            return max(0, outside)
        outside += 1


def factor(
    rows: Iterable[Row], metric: str, policy: str, other: str, points: Sequence[str]
) -> Estimate | None:
    """The other's value over the policy's, for a metric of which less is better: above 1 the policy
    is better. The geometric mean over points and the seeds that both have on all of these.

    Preemption losses count with at least `LOSS_FLOOR_S`.

    Returns:
        None if a value is missing, or is 0, or there is no such seed.
    """
    found = {(row["policy"], row["point"], row["seed"]): row.get(metric) for row in rows}
    seeds = set.intersection(
        *(
            {seed for name, at, seed in found if (name, at) == (each, point)}
            for each in (policy, other)
            for point in points
        )
    )
    floor = LOSS_FLOOR_S if metric == "loss_mean_s" else 0.0
    logs = []
    for seed in sorted(seeds):
        of_seed = []
        for point in points:
            ours, theirs = found.get((policy, point, seed)), found.get((other, point, seed))
            if ours is None or theirs is None or not (floor or (ours and theirs)):
                return None
            of_seed.append(math.log(max(theirs, floor) / max(ours, floor)))
        logs.append(sum(of_seed) / len(of_seed))
    return Estimate.of_seeds(logs) if logs else None


def estimate(
    rows: Sequence[Row], statistic: Callable[[Sequence[Row]], float | None]
) -> Estimate | None:
    """A number that a function finds in rows, with its interval: the function gets the rows without
    those of one seed, for each seed (jackknife; Student's t). None if it finds none in all rows; no
    interval if it finds none without one of the seeds."""
    value = statistic(rows)
    if value is None:
        return None
    seeds = sorted({row["seed"] for row in rows})
    without = [statistic([row for row in rows if row["seed"] != each]) for each in seeds]
    known = [each for each in without if each is not None]
    if len(known) < len(seeds):
        return Estimate(value, math.nan, math.nan)
    half = half_width([len(seeds) * value - (len(seeds) - 1) * each for each in known])
    return Estimate(value, value - half, value + half)


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
