"""The choice of parameters, the same for each rule that has some.

Every combination of a rule's grid runs on the points of choice, and the smallest product of
`OBJECTIVE` wins.
"""

import math
from collections.abc import Mapping, Sequence

from bench.common.tables import Row
from bench.policies.contenders import GRIDS, OBJECTIVE, combinations
from bench.policies.families import Family
from bench.policies.runs import rows_of

SEEDS = (101, 102)
"""Those of the search; no reported run has them."""


def searched(family: Family, *, is_quick: bool, num_processes: int | None) -> list[Row]:
    """A row for each combination: its rule, its variant, and its score, the best one first."""
    variants = {name: combinations(name) for name in GRIDS}
    every = [each for of_rule in variants.values() for each in of_rule]
    rows: list[Row] = []
    for point in family.points:
        if point.chooses:
            rows += rows_of(
                family.name, point, every, SEEDS, is_quick=is_quick, num_processes=num_processes
            )
    scores = {each: score(rows, each) for each in every}
    return [
        {"rule": rule, "policy": each, "score_s": scores[each]}
        for rule, of_rule in variants.items()
        for each in sorted(of_rule, key=lambda each: scores[each])
    ]


def score(rows: Sequence[Row], policy: str) -> float:
    """The geometric mean of the policy's latencies, in seconds; less is better."""
    logs = [
        math.log(row[metric]) for row in rows if row["policy"] == policy for metric in OBJECTIVE
    ]
    return float(f"{math.exp(sum(logs) / len(logs)):.5g}")


def tuned(rows: Sequence[Row]) -> Mapping[str, str]:
    """The best variant of each rule, from the rows of `searched`."""
    best: dict[str, Row] = {}
    for row in rows:
        rule = row["rule"]
        if rule not in best or row["score_s"] < best[rule]["score_s"]:
            best[rule] = row
    return {rule: row["policy"] for rule, row in best.items()}
