"""The type of an experiment: one figure with its rows, claims, tables and plot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.tables import Row
from bench.paper.cells import Options
from bench.paper.claims import Claim


@dataclass(frozen=True, slots=True)
class Experiment:
    """One figure, or the sensitivity table.

    Attributes:
        name: the command's argument and the name of the files.
        title: the heading.
        rows: measures or simulates; one row for each cell and seed.
        claims: the paper's claims, with our numbers.
        tables: Markdown, from rows alone.
        draw: the plot, from rows alone; None: there is none.
        config: the configuration in the result file.
    """

    name: str
    title: str
    rows: Callable[[Options], list[Row]]
    claims: Callable[[Sequence[Row]], list[Claim]]
    tables: Callable[[Sequence[Row]], str]
    draw: Callable[[Sequence[Row], Path], None] | None
    config: dict[str, object]
