"""Verdicts are computed: by rule, from rows, for each seed."""

import math

import pytest

from bench.paper.claims import NOT, PARTLY, REPRODUCED, UNTESTED, Claim, Kind, claim, judge
from sterna.workload.seeds import PAPER_SEED


@pytest.mark.parametrize(
    ("kind", "paper", "ours", "verdict"),
    [
        (Kind.FACTOR, 4.0, 8.0, REPRODUCED),
        (Kind.FACTOR, 4.0, 4.0**0.7 + 0.01, REPRODUCED),
        (Kind.FACTOR, 4.0, 4.0**0.7 - 0.01, PARTLY),
        (Kind.FACTOR, 4.0, 4.0**0.3 - 0.01, NOT),
        (Kind.FACTOR, 4.0, 0.5, NOT),
        (Kind.REDUCTION, 0.36, 0.26, REPRODUCED),
        (Kind.REDUCTION, 0.36, 0.20, PARTLY),
        (Kind.REDUCTION, 0.36, 0.10, NOT),
        (Kind.REDUCTION, 0.36, -0.10, NOT),
        (Kind.AT_LEAST, 0.5, 0.5, REPRODUCED),
        (Kind.AT_LEAST, 0.5, 0.3, PARTLY),
        (Kind.AT_LEAST, 0.5, 0.2, NOT),
        (Kind.AT_MOST, 0.13, -0.02, REPRODUCED),
        (Kind.AT_MOST, 0.13, 0.143, REPRODUCED),
        (Kind.AT_MOST, 0.13, 0.2, PARTLY),
        (Kind.AT_MOST, 0.13, 0.3, NOT),
        (Kind.VALUE, 0.62, 0.67, REPRODUCED),
        (Kind.VALUE, 0.62, 0.40, PARTLY),
        (Kind.VALUE, 50.0, 10.0, NOT),
        (Kind.VALUE, 50.0, 0.0, NOT),
    ],
)
def test_a_number_is_judged_by_what_it_is(
    kind: Kind, paper: float, ours: float, verdict: str
) -> None:
    assert judge(kind, paper, ours) == verdict


def test_the_worse_one_of_the_papers_seed_and_of_the_mean_counts() -> None:
    lucky = Claim("x", "6", Kind.FACTOR, 4.0, ours=5.0, over_seeds=(1.0, 4.0))
    unlucky = Claim("x", "6", Kind.FACTOR, 4.0, ours=1.0, over_seeds=(4.0, 4.0))
    alone = Claim("x", "6", Kind.FACTOR, 4.0, ours=5.0)

    assert [lucky.verdict, unlucky.verdict, alone.verdict] == [PARTLY, NOT, REPRODUCED]


def test_factors_are_averaged_geometrically_and_amounts_arithmetically() -> None:
    factor = Claim("x", "6", Kind.FACTOR, 4.0, ours=None, over_seeds=(1.0, 4.0))
    amount = Claim("x", "6", Kind.VALUE, 4.0, ours=None, over_seeds=(1.0, 4.0))

    assert factor.mean_over_seeds == pytest.approx(2.0)
    assert amount.mean_over_seeds == pytest.approx(2.5)


def test_a_claim_is_computed_from_each_seeds_rows_alone() -> None:
    rows = [{"seed": PAPER_SEED, "x": 1.0}, {"seed": 1, "x": 2.0}, {"seed": PAPER_SEED, "x": 3.0}]

    found = claim("x", "6", Kind.VALUE, 1.0, rows, lambda those: sum(row["x"] for row in those))

    assert found.ours == 4.0
    assert found.over_seeds == (2.0,)


def test_what_cannot_be_computed_is_no_number_and_not_tested() -> None:
    found = claim("x", "6", Kind.VALUE, 1.0, [{"seed": 1}], lambda _: math.nan)

    assert found.ours is None
    assert found.over_seeds == ()
    assert found.verdict == UNTESTED


def test_a_claim_survives_its_result_file() -> None:
    written = Claim("x", "6", Kind.AT_MOST, 0.13, 0.1, (0.1, 0.2), unit="%", note="a note")

    assert Claim.from_json(written.as_json()) == written


def test_a_factor_of_less_than_half_the_papers_is_partly_reproduced_at_most() -> None:
    """Its logarithm is 78 % of the paper's, which would be enough."""
    assert judge(Kind.FACTOR, 34.4, 15.8) == PARTLY
    assert judge(Kind.FACTOR, 34.4, 17.3) == REPRODUCED
    assert judge(Kind.FACTOR, 34.4, 2.0) == NOT


def test_a_number_of_other_conditions_is_shown_and_not_judged() -> None:
    found = claim("x", "6", Kind.FACTOR, 2.0, [{}], lambda _: 3.0, is_judged=False)
    assert (found.ours, found.verdict) == (3.0, UNTESTED)
