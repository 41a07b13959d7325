"""A promise that a benchmark holds its rows against. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise and what was measured of it.

    Attributes:
        bound: in words.
        found: in words, with the cell that decides.
    """

    name: str
    bound: str
    found: str
    is_reached: bool
