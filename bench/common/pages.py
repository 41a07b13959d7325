"""Texts of benchmarks in pages: their goals, and text between two marks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END = "<!-- end of what is written -->"


def begin_mark(command: str) -> str:
    """The line before the text of this command."""
    return f"<!-- written by `{command}` -->"


def write_marked(page: Path, command: str, text: str) -> None:
    """Put the text between the marks of the page.

    Raises:
        ValueError: the page has no such marks; it is not changed.
    """
    begin = begin_mark(command)
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"{page} needs the marks {begin} and {END}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}")


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of a benchmark, and its measured value.

    Attributes:
        bound: in words.
        found: in words, with the cell that decides.
        is_reached: None: not decided, as the interval of what was found has the bound in it.
    """

    name: str
    bound: str
    found: str
    is_reached: bool | None


_VERDICTS = {True: "reached", False: "**not reached**", None: "**not decided**"}


def goal_list(goals: Sequence[Mapping[str, Any]]) -> str:
    """The goals of a result file, as a list of Markdown."""
    return "\n".join(
        f"- {each['name']}: {each['found']} (goal: {each['bound']}): "
        + _VERDICTS[each["is_reached"]]
        for each in goals
    )
