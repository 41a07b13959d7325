"""The points of the paper's figures (bench/paper/points), and how far our numbers are from them."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

_FOLDER = Path(__file__).parent / "points"

LEAST_LOSS_S = 0.05
"""Mean losses below it come from a handful of requests; no ratio of them says anything."""

Row = dict[str, Any]
"""One point or one measured cell: what it is, and numbers under names that end in their unit."""


@cache
def _text(name: str) -> str:
    return (_FOLDER / f"{name}.csv").read_text()


def paper_points(name: str) -> list[Row]:
    """The rows of the figure's file; whatever reads as a number is one."""
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
