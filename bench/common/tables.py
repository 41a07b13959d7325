"""Rows of results, and Markdown tables of them."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sterna.metrics.summary import Distribution

Row = dict[str, Any]
"""One point or one measured cell: its labels, and numbers under names that end in their unit."""

LOSS_FLOOR_S = 0.001
"""Smallest preemption loss in ratios: a ratio of two tiny losses has no meaning, and a ratio to
zero does not exist."""


def rounded(value: float | None) -> float | None:
    """The value to five significant digits: more would only make files longer."""
    return None if value is None else float(f"{value:.5g}")


def statistic(distribution: Distribution | None, name: str) -> float | None:
    """A number of the distribution by its name, rounded."""
    return None if distribution is None else rounded(getattr(distribution, name))


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]], num_text: int = 1) -> str:
    """A table; its first `num_text` columns are text, the others numbers."""
    marks = ["---" if index < num_text else "---:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, marks, *lines])


def cell(value: object) -> str:
    """The value as the text of a cell, which is empty for None."""
    return "" if value is None else str(value)


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None or math.isnan(value):
        return ""
    if value == 0 or 0.001 <= abs(value) < 1000:
        digits = 3 - (math.floor(math.log10(abs(value))) + 1 if value else 1)
        return f"{value:,.{max(0, digits)}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1e}"


def span(counts: Collection[int]) -> str:
    """The smallest and the largest count, or the one that all are; 0 for none."""
    least, most = min(counts, default=0), max(counts, default=0)
    return str(most) if least == most else f"{least} to {most}"


def folded(summary: str, text: str) -> str:
    """A part of the page that is folded at first."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"
