"""How far our numbers are from the paper's points: logarithms of ratios, and their medians."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

LEAST_LOSS_S = 0.05
"""Mean losses below it come from a handful of requests; no ratio of them says anything."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one metric over some points.

    Attributes:
        num_points: that could be compared.
        error: median of |log(ours / paper)|.
        bias: median of the log itself; positive: ours is larger.
    """

    num_points: int
    error: float
    bias: float

    def __str__(self) -> str:
        return f"{self.error:.3f} ({self.bias:+.3f})"


def distance(metric: str, pairs: Iterable[tuple[float, float]]) -> Distance | None:
    """How far ours are from the paper's; None where nothing can be compared.

    Args:
        pairs: ours and the paper's of each point. Of preemption losses those below `LEAST_LOSS_S`
            in the paper, and those of which ours is zero, are left out.
    """
    if metric == "preemption_loss_s":
        pairs = [(ours, paper) for ours, paper in pairs if paper >= LEAST_LOSS_S and ours > 0]
    logs = [math.log(ours / paper) for ours, paper in pairs]
    if not logs:
        return None
    return Distance(len(logs), median(map(abs, logs)), median(logs))
