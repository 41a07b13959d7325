"""Claims of the paper in numbers, our results, and verdicts by rule.

A claim is computed from the rows of one seed, so that it can be computed for each seed. The
verdict is never written by hand: `judge` compares a number with the paper's, and a claim gets the
worse of two verdicts, that of the paper's seed and that of the mean over the other seeds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np

from bench.common.tables import Row
from sterna.workload.seeds import PAPER_SEED

REPRODUCED = "reproduced"
PARTLY = "partly"
NOT = "not"
UNTESTED = "not judged"
"""Not run, or measured under conditions that cannot be compared with the paper's."""

_ORDER = (NOT, PARTLY, REPRODUCED)

FULL_SHARE = 0.7
"""An effect of at least this share of the paper's is reproduced, a factor only within
`PART_FACTOR` of the paper's ..."""
PART_SHARE = 0.3
"""... and one of at least this share is partly so."""
FULL_FACTOR = 1.25
"""A plain number within this factor of the paper's is reproduced ..."""
PART_FACTOR = 2.0
"""... and one within this factor is partly so."""
BOUND_SLACK = 1.1
"""A bound that is exceeded by no more than this factor still holds."""


class Kind(Enum):
    """The kind of a claim's number, which decides how it is judged and shown."""

    FACTOR = "factor"
    """A factor of improvement; 1 is no effect. Effects are compared by their logarithms."""
    REDUCTION = "reduction"
    """A share of reduction; 0 is no effect."""
    AT_LEAST = "at least"
    """A lower bound of a share."""
    AT_MOST = "at most"
    """An upper bound."""
    VALUE = "value"
    """A plain value."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim with its numbers.

    Attributes:
        text: the claim in words, without its number.
        section: of the paper.
        unit: of a value or a bound: "s", "ms", "%" (of a fraction) or "".
        paper: the paper's number; computed from its figure's points where the text has none.
        ours: at the paper's seed, or measured; None where that was not run.
        over_seeds: at each other seed.
        note: a note for readers.
        is_judged: whether our conditions can be compared with the paper's.
    """

    text: str
    section: str
    kind: Kind
    paper: float
    ours: float | None
    over_seeds: tuple[float, ...] = ()
    unit: str = ""
    note: str = ""
    is_judged: bool = True

    @property
    def mean_over_seeds(self) -> float | None:
        """Geometric for factors, arithmetic for the rest; None without seeds."""
        if not self.over_seeds:
            return None
        if self.kind is Kind.FACTOR:
            return float(np.exp(np.mean(np.log(self.over_seeds))))
        return float(np.mean(self.over_seeds))

    @property
    def verdict(self) -> str:
        """The worse one of the paper's seed and of the mean over the others."""
        found = [each for each in (self.ours, self.mean_over_seeds) if each is not None]
        if not found or not self.is_judged:
            return UNTESTED
        return min((judge(self.kind, self.paper, each) for each in found), key=_ORDER.index)

    def as_json(self) -> dict[str, Any]:
        """The claim as result files hold it."""
        document = asdict(self)
        document["kind"] = self.kind.value
        document["over_seeds"] = [round(each, 5) for each in self.over_seeds]
        document["ours"] = None if self.ours is None else round(self.ours, 5)
        document["mean_over_seeds"] = self.mean_over_seeds
        document["verdict"] = self.verdict
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Claim":
        """The claim from the result of `as_json`."""
        fields = {name: document[name] for name in cls.__dataclass_fields__}
        fields["kind"] = Kind(document["kind"])
        fields["over_seeds"] = tuple(document["over_seeds"])
        return cls(**fields)


def judge(kind: Kind, paper: float, ours: float) -> str:
    """The verdict on our number.

    An effect (a factor or a reduction) is reproduced from `FULL_SHARE` of the paper's on, partly
    from `PART_SHARE` on; a larger one than the paper's is reproduced as well. A plain value must
    be within a factor on either side. A bound must be kept.
    """
    match kind:
        case Kind.FACTOR:
            share = math.log(ours) / math.log(paper) if ours > 0 else -math.inf
            if ours < paper / PART_FACTOR:
                share = min(share, PART_SHARE)
        case Kind.REDUCTION:
            share = ours / paper
        case Kind.AT_LEAST:
            if ours >= paper:
                return REPRODUCED
            return PARTLY if ours >= paper / PART_FACTOR else NOT
        case Kind.AT_MOST:
            if ours <= paper * BOUND_SLACK:
                return REPRODUCED
            return PARTLY if ours <= paper * PART_FACTOR else NOT
        case Kind.VALUE:
            factor = max(ours / paper, paper / ours) if ours > 0 else math.inf
            if factor <= FULL_FACTOR:
                return REPRODUCED
            return PARTLY if factor <= PART_FACTOR else NOT
    if share >= FULL_SHARE:
        return REPRODUCED
    return PARTLY if share >= PART_SHARE else NOT


def claim(
    text: str,
    section: str,
    kind: Kind,
    paper: float,
    rows: Sequence[Row],
    compute: Callable[[list[Row]], float],
    *,
    unit: str = "",
    note: str = "",
    is_judged: bool = True,
) -> Claim:
    """The claim, computed from each seed's rows. Rows without a seed were measured, once."""
    by_seed: dict[int, list[Row]] = {}
    for row in rows:
        by_seed.setdefault(row.get("seed", PAPER_SEED), []).append(row)
    values = {seed: float(compute(those)) for seed, those in by_seed.items()}
    # A value may not exist, such as the crossing of a level that was not reached.
    values = {seed: value for seed, value in values.items() if not math.isnan(value)}
    others = tuple(value for seed, value in values.items() if seed != PAPER_SEED)
    ours = values.get(PAPER_SEED)
    return Claim(text, section, kind, paper, ours, others, unit, note, is_judged)


def up_to_and_typical(
    text: str,
    section: str,
    number: float,
    rows: Sequence[Row],
    points: list[Row],
    largest: Callable[[list[Row]], float],
    typical: Callable[[list[Row]], float],
) -> list[Claim]:
    """The paper's largest factor, and the typical one, which is more meaningful.

    Args:
        points: the points of the paper's figure, which give its typical factor.
    """
    note = "the paper's number is that of its points"
    paper = typical(points)
    return [
        claim(f"{text}, up to", section, Kind.FACTOR, number, rows, largest),
        claim(f"{text}, typical", section, Kind.FACTOR, paper, rows, typical, note=note),
    ]
