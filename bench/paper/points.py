"""The points of the paper's figures (bench/paper/points), and the distances of our numbers."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from bench.common.tables import Row

_FOLDER = Path(__file__).parent / "points"

LEAST_LOSS_S = 0.05
"""Mean losses below this come from a few requests; their ratios have no meaning."""


@cache
def _text(name: str) -> str:
    return (_FOLDER / f"{name}.csv").read_text()


def paper_points(name: str) -> list[Row]:
    """The rows of the figure's file; texts that are numbers become numbers."""
    reader = csv.DictReader(_text(name).splitlines())
    return [{column: _value(text) for column, text in row.items()} for row in reader]


def matching(rows: Sequence[Row], **labels: object) -> list[Row]:
    """The rows that have all these values."""
    return [row for row in rows if all(row.get(name) == each for name, each in labels.items())]


def _value(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of one metric over some points.

    Attributes:
        num_points: points that could be compared.
        error: median of |log(ours / paper)|.
        bias: median of the log itself; positive: ours is larger.
    """

    num_points: int
    error: float
    bias: float

    def __str__(self) -> str:
        return f"{self.error:.3f} ({self.bias:+.3f})"


def distance(metric: str, pairs: Iterable[tuple[float, float]]) -> Distance | None:
    """The distance of ours from the paper's; None where nothing can be compared.

    Args:
        pairs: our value and the paper's for each point. Preemption losses below `LEAST_LOSS_S` in
            the paper, and pairs in which ours is zero, are left out.
    """
    if metric == "preemption_loss_s":
        pairs = [(ours, paper) for ours, paper in pairs if paper >= LEAST_LOSS_S and ours > 0]
    logs = [math.log(ours / paper) for ours, paper in pairs]
    if not logs:
        return None
    return Distance(len(logs), median(map(abs, logs)), median(logs))
