"""Ratios, their intervals, and the choice of parameters, by hand."""

import math
from typing import Any

import numpy as np
import pytest

from bench.common.comparison import Estimate, Middle, best, estimate, factor, half_width, mean
from bench.policies.contenders import GRIDS, combinations, contenders
from bench.policies.search import score, tuned

METRIC = "ttft_mean_s"


def row(
    policy: str, seed: int, value: float | None, point: str = "p", **more: Any
) -> dict[str, Any]:
    return {"policy": policy, "point": point, "seed": seed, METRIC: value, **more}


def test_a_factor_is_the_others_value_over_ours() -> None:
    """By hand: twice and eight times as good in two seeds is four times in the mean."""
    rows = [row("ours", 1, 1.0), row("ours", 2, 0.5), row("other", 1, 2.0), row("other", 2, 4.0)]
    found = factor(rows, METRIC, "ours", "other", ["p"])
    assert found is not None
    assert found.mean == pytest.approx(4.0)
    # By hand: the logarithms are half of log(4) from their mean, and Student's t of one is 6.314.
    assert found.low == pytest.approx(4.0 / 4.0 ** (6.314 / 2))
    assert found.high == pytest.approx(4.0 * 4.0 ** (6.314 / 2))


def test_points_weigh_the_same_whatever_their_values() -> None:
    rows = [
        *(row("ours", 1, 1.0, "p"), row("other", 1, 3.0, "p")),
        *(row("ours", 1, 300.0, "q"), row("other", 1, 100.0, "q")),
    ]
    found = factor(rows, METRIC, "ours", "other", ["p", "q"])
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert str(found) == "1.00"


@pytest.mark.parametrize("value", [None, 0.0])
def test_a_value_that_is_missing_or_0_gives_no_factor(value: float | None) -> None:
    rows = [row("ours", 1, 1.0), row("other", 1, value)]
    assert factor(rows, METRIC, "ours", "other", ["p"]) is None
    assert factor(rows, METRIC, "other", "ours", ["p"]) is None
    assert factor(rows, METRIC, "nobody", "other", ["p"]) is None
    assert factor(rows, METRIC, "ours", "other", ["p", "q"]) is None


def test_seeds_count_that_both_policies_have_on_all_points() -> None:
    rows = [
        *(row("ours", seed, 1.0, point) for seed in (1, 2, 3) for point in "pq"),
        *(row("other", 1, 2.0, "p"), row("other", 1, 2.0, "q"), row("other", 2, 9.0, "p")),
    ]
    found = factor(rows, METRIC, "ours", "other", ["p", "q"])
    assert found is not None
    assert found.mean == pytest.approx(2.0)


def test_a_loss_that_is_gone_counts_as_a_millisecond() -> None:
    rows = [
        {"policy": policy, "point": "p", "seed": 1, "loss_mean_s": value}
        for policy, value in (("ours", 0.0), ("other", 0.5))
    ]
    found = factor(rows, "loss_mean_s", "ours", "other", ["p"])
    assert found is not None
    assert found.mean == pytest.approx(500.0)


def test_an_interval_holds_most_seeds_means_and_is_the_same_each_time() -> None:
    logs = [math.log(value) for value in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)]
    found = Estimate.of_seeds(logs)
    assert found == Estimate.of_seeds(logs)
    # By hand: the logarithms' standard deviation is 0.182, and Student's t of 7 degrees 1.895.
    assert (round(found.low, 2), round(found.high, 2)) == (1.18, 1.51)


@pytest.mark.parametrize("num", [2, 5, 8, 21, 40])
def test_nine_of_ten_intervals_hold_the_mean_of_what_they_are_drawn_from(num: int) -> None:
    drawn = np.random.default_rng(1).normal(3.0, 2.0, size=(20_000, num))
    held = [abs(float(values.mean()) - 3.0) <= half_width(values.tolist()) for values in drawn]
    assert sum(held) / len(held) == pytest.approx(0.9, abs=0.015)
    assert math.isnan(half_width([3.0]))


@pytest.mark.parametrize(
    ("num", "outside"), [(2, 0), (3, 0), (4, 0), (5, 0), (7, 0), (8, 1), (11, 2), (31, 10)]
)
def test_the_interval_of_a_median_is_from_one_value_to_another(num: int, outside: int) -> None:
    """By hand: of eight values 2 * (1 + 8) / 256 of all samples miss it with one outside at each
    end, 7 %, and 29 % with two."""
    values = [float(each) for each in range(num, 0, -1)]
    found = Middle.of(values)
    assert (found.low, found.high) == (1.0 + outside, num - outside)
    assert found.median == (num + 1) / 2
    assert math.isnan(Middle.of([3.0]).low)


@pytest.mark.parametrize("num", [5, 8, 21, 40])
def test_nine_of_ten_intervals_or_more_hold_the_median_of_a_skewed_distribution(num: int) -> None:
    drawn = np.random.default_rng(1).exponential(1.0, size=(5_000, num)).tolist()
    found = [Middle.of(each) for each in drawn]
    held = [each.low <= math.log(2.0) <= each.high for each in found]
    assert 0.89 < sum(held) / len(held) < 0.97


@pytest.mark.parametrize(
    ("low", "high", "at_least", "at_most"),
    [
        (1.0, 2.0, True, None),
        (1.1, 2.0, True, False),
        (0.5, 0.9, False, True),
        (0.9, 1.1, None, None),
    ],
)
def test_a_bound_within_the_interval_is_not_decided(
    low: float, high: float, at_least: bool | None, at_most: bool | None
) -> None:
    for kind in (Estimate, Middle):
        found = kind((low + high) / 2, low, high)
        assert (found.at_least(1.0), found.at_most(1.0)) == (at_least, at_most)
        single = kind(1.0, math.nan, math.nan)
        assert (single.at_least(1.0), single.at_most(0.9)) == (True, False)


def test_a_number_from_rows_has_an_interval_over_their_seeds() -> None:
    rows = [row("ours", seed, float(seed)) for seed in range(1, 9)]
    found = estimate(rows, lambda drawn: mean(drawn, METRIC, "ours", "p"))
    assert found == estimate(rows, lambda drawn: mean(drawn, METRIC, "ours", "p"))
    assert found is not None
    assert found.mean == 4.5
    # By hand: that of a mean is the interval of the seeds' values.
    assert (found.low, found.high) == pytest.approx((2.86, 6.14), abs=0.01)
    assert estimate(rows, lambda drawn: mean(drawn, METRIC, "other", "p")) is None
    lacking = [*rows, row("ours", 9, None)]
    assert estimate(lacking, lambda drawn: mean(drawn, METRIC, "ours", "p")) is not None
    single = estimate(rows[:1], lambda drawn: mean(drawn, METRIC, "ours", "p"))
    assert str(single) == "1.00"


def test_the_mean_leaves_out_what_is_missing() -> None:
    rows = [row("ours", 1, 1.0), row("ours", 2, 3.0), row("ours", 3, None), row("other", 1, 9.0)]
    assert mean(rows, METRIC, "ours", "p") == 2.0
    assert mean(rows, METRIC, "ours", "q") is None


def test_the_best_policy_has_the_smallest_value() -> None:
    values = {"a": 2.0, "b": 1.0, "c": None}
    assert best(values.get, values) == ("b", 1.0)
    assert best(values.get, ["c"]) is None


def test_a_grid_has_every_combination() -> None:
    found = combinations("dynamo")
    assert len(found) == len(set(found)) == 42
    assert "dynamo:prefill_scale=4,request_tokens=500" in found


def test_the_score_is_the_geometric_mean_of_the_latencies() -> None:
    latencies = dict(zip(
        ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s"),
        (1.0, 2.0, 4.0, 8.0, 16.0),
        strict=True,
    ))  # fmt: skip
    assert score([{"policy": "a", **latencies}, {"policy": "b"}], "a") == pytest.approx(4.0)


def test_each_rule_gets_its_best_variant() -> None:
    rows = [
        {"rule": "dynamo", "policy": "dynamo:prefill_scale=1", "score_s": 2.0},
        {"rule": "dynamo", "policy": "dynamo:prefill_scale=4", "score_s": 1.0},
        {"rule": "sglang", "policy": "sglang:max_difference=8", "score_s": 3.0},
    ]
    assert tuned(rows) == {"dynamo": "dynamo:prefill_scale=4", "sglang": "sglang:max_difference=8"}


@pytest.mark.parametrize("family", ["paper", "clusters", "prefixes", "reasoning"])
def test_each_policy_competes_once(family: str) -> None:
    chosen = {rule: combinations(rule)[0] for rule in GRIDS}
    found = contenders(family, chosen, has_parts=True)
    assert len(found) == len(set(found))
    assert found[:2] == ["llumnix", "sterna"]
