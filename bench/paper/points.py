"""The points of the paper's figures (bench/paper/points)."""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "points"

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
