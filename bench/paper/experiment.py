"""What the package knows of each figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paper.cells import Options
from bench.paper.claims import Claim
from bench.paper.points import Row


@dataclass(frozen=True, slots=True)
class Experiment:
    """One figure, or the sensitivity table.

    Attributes:
        name: of the command's argument and of the files.
        title: the heading.
        rows: measure or simulate; one row a cell and seed.
        claims: what the paper says about it, with our numbers.
        tables: Markdown, from rows alone.
        draw: the plot, from rows alone; None: there is none.
        config: what the result file says about how it was run.
    """

    name: str
    title: str
    rows: Callable[[Options], list[Row]]
    claims: Callable[[Sequence[Row]], list[Claim]]
    tables: Callable[[Sequence[Row]], str]
    draw: Callable[[Sequence[Row], Path], None] | None
    config: dict[str, object]
