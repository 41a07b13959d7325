"""The comparison of policies as a whole: few requests, every table, and the page from rows."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.common.pages import END, begin_mark
from bench.common.results_io import ROOT, read
from bench.policies import report, search
from bench.policies.__main__ import COMMAND, PAGE
from bench.policies.bounds import pooled, with_true_lengths
from bench.policies.contenders import (
    AHEAD,
    BOUNDS,
    ENGINE_COSTS,
    GRIDS,
    LLUMNIX,
    STERNA,
    combinations,
    contenders,
)
from bench.policies.families import FAMILIES, PREFIXES, REASONING, reasoning_point
from bench.policies.goals import goals, rate_at
from bench.policies.measures import METRICS, THIRD_METRICS, by_reuse
from bench.policies.plots import draw
from bench.policies.runs import jobs, rows_of
from sterna.config import Soonest
from sterna.metrics.records import Records
from sterna.policy.presets import preset
from tests.policy.builders import instance, running

TUNED = {"dynamo": "dynamo:prefill_scale=4", "sterna": "sterna:horizon_steps=32"}


def rows(family: str, **of_sterna: float) -> list[dict[str, Any]]:
    """Rows in which every value is 1, but for these of Sterna's policy."""
    ones = dict.fromkeys((*METRICS, *THIRD_METRICS, "prefix_reuse", "imbalance_mean"), 1.0)
    ones |= {"makespan_s": 1.0, "migrations": 1.0, "instances_avg": 1.0}
    ones |= {"again_ttft_p99_s": 1.0, "local_ttft_p99_s": 1.0}
    return [
        {
            "family": family,
            "point": point.name,
            "policy": policy,
            "seed": seed,
            **ones,
            **(of_sterna if policy == STERNA else {}),
        }
        for point in FAMILIES[family].points
        for policy in contenders(family, TUNED, has_parts=point.has_parts)
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("rule", ["llm-d", "dynamo", "sglang"])
def test_the_tuned_policies_have_what_the_search_chose(rule: str) -> None:
    variant = search.tuned(read("policies_search")["rows"])[rule]
    (job,) = jobs(PREFIXES.points[0], [variant], [1])
    assert job.config.policy.dispatch == preset(f"{rule}-tuned").dispatch


def test_a_goal_has_the_shares_of_the_policy_and_of_references() -> None:
    """By hand: where all values are 1, factors are 1 and the goals 3 and 1.1 (at most)."""
    of_paper = {each.name: each for each in goals(rows("paper"))}
    shares = of_paper["TTFT P99 of the paper's traces against Llumnix's"].shares
    assert shares.keys() == {STERNA, "true lengths", "each alone"}
    assert all(each == pytest.approx([1 / 3] * 3, rel=1e-4) for each in shares.values())
    of_prefixes = [each for each in goals(rows("prefixes")) if "begin as earlier ones" in each.name]
    shares = of_prefixes[0].shares
    assert shares.keys() == {STERNA, AHEAD, "free moves"}
    assert all(each == pytest.approx([1.1] * 3, rel=1e-4) for each in shares.values())


def test_the_goals_are_judged_by_the_factors() -> None:
    found = {each.name: each for each in goals(rows("paper", ttft_mean_s=0.4))}
    mean = found["TTFT mean of the paper's traces against Llumnix's"]
    assert (mean.found, mean.is_reached) == ("2.50 [2.50, 2.50] times better", True)
    assert not found["TTFT P99 of the paper's traces against Llumnix's"].is_reached


def test_further_seeds_of_two_policies_decide_goals_and_are_in_no_table_of_all() -> None:
    known = rows("clusters")
    further = [{**row, "seed": 9, "ttft_mean_s": 100.0} for row in known if row["seed"] == 1]
    decided = [each for each in further if each["policy"] in (STERNA, "llumnix")]
    (goal,) = [
        each
        for each in goals([*known, *decided])
        if each.name == "4 instances: TTFT mean against Llumnix's"
    ]
    assert goal.found.startswith("1.00 [1.00, 1.00]")
    text = report.markdown([*known, *decided], [])
    assert "| `llumnix` | 1.00 | 1.00 |" in text
    assert "34.0" not in text


def test_a_trace_with_prefixes_needs_both_latencies_at_once() -> None:
    slow = {each.name: each for each in goals(rows("prefixes", tpot_mean_s=1.2))}
    both = "against `dynamo:prefill_scale=4`, and TPOT mean against round robin"
    assert not slow[f"agents: TTFT mean {both}"].is_reached
    # By hand: all others have values of 1, and so factors of 1.
    assert slow[f"agents: TTFT mean {both}"].found == (
        "1.00 [1.00, 1.00] and 0.83 [0.83, 0.83] times better (*the worse of both with free "
        "moves*: 1.00; *the worse of both with each alone*: 1.00)"
    )
    even = {each.name: each for each in goals(rows("prefixes"))}
    assert even[f"agents: TTFT mean {both}"].is_reached


def test_a_table_has_only_the_policies_of_its_point() -> None:
    known = [
        row
        for row in rows("reasoning")
        if row["policy"] != "true lengths" or row["point"] == reasoning_point(3)
    ]
    assert report.markdown(known, []).count("| *true lengths* |") == 1


def test_next_turns_are_compared_with_those_that_found_their_prefix() -> None:
    found = {each.name: each for each in goals(rows("prefixes", again_ttft_p99_s=2.3))}
    of_turns = [each for name, each in found.items() if "begin as earlier ones" in name]
    assert [(each.found, each.is_reached) for each in of_turns] == 3 * [
        (f"2.30 [2.30, 2.30] (*`{AHEAD}`*: 1.00; *free moves*: 1.00)", False)
    ]
    even = [each for each in goals(rows("prefixes")) if "begin as earlier ones" in each.name]
    assert [each.is_reached for each in even] == [True, True, True]


def test_variants_of_sternas_own_are_no_rules_of_others() -> None:
    of_family = rows("prefixes")
    for row in of_family:
        if row["policy"] in (ENGINE_COSTS, AHEAD):
            row |= {"ttft_p99_s": 0.1, "prefix_reuse": 2.0}
    (goal,) = [
        each
        for each in goals(of_family)
        if each.name.startswith("agents: TTFT P99 against the best other one")
    ]
    assert goal.found.startswith("1.00 [1.00, 1.00]")
    assert ENGINE_COSTS not in goal.name


def test_copies_ahead_may_cost_few_tokens() -> None:
    of_family = rows("prefixes", output_tokens_per_s=100.0)
    for row in of_family:
        if row["policy"] == AHEAD:
            row["output_tokens_per_s"] = 97.0 if row["point"] == "agents" else 99.0
    found = [each for each in goals(of_family) if "copies ahead" in each.name]
    assert [(each.found, each.is_reached) for each in found] == [
        ("0.97 [0.97, 0.97]", False),
        ("0.99 [0.99, 0.99]", True),
        ("0.99 [0.99, 0.99]", True),
    ]


def test_local_hits_are_those_that_found_all_that_was_computed_before() -> None:
    """By hand: three of five had a prefix to find, and two of these found it; the first tokens of
    the others are later."""
    arrival_s, tokens = np.zeros(5), np.full(5, 8)
    first_token_s = np.array([9.0, 1.0, 5.0, 1.0, 9.0])
    records = Records(
        arrival_s=arrival_s,
        first_token_s=first_token_s,
        end_s=first_token_s + 1,
        input_tokens=tokens,
        output_tokens=tokens,
        priority=np.zeros(5, np.int64),
        num_preemptions=np.zeros(5, np.int64),
        preemption_loss_s=arrival_s,
        queue_s=arrival_s,
        decode_execution_s=arrival_s,
        cached_tokens=np.array([0, 64, 16, 32, 0]),
        reusable_tokens=np.array([0, 64, 64, 32, 0]),
    )
    found = by_reuse(records)
    assert found["local_ttft_p99_s"] == 1.0
    assert 4.9 < found["again_ttft_p99_s"] <= 5.0
    assert by_reuse(replace(records, reusable_tokens=None)) == {}


def test_fewer_instances_count_only_where_first_tokens_come_as_soon() -> None:
    """Sterna needs half of the instances with the last thresholds, and its P99 is larger with these
    than Llumnix's."""
    name = "auto-scaling: instance-seconds at no larger TTFT P99 than Llumnix's"

    def goal(p99_s: float) -> str:
        of_family = rows("clusters")
        for row in of_family:
            if row["policy"] == STERNA and "320" in row["point"]:
                row |= {"instances_avg": 0.5, "ttft_p99_s": p99_s}
        return {each.name: each.found for each in goals(of_family)}[name]

    assert goal(1.1) == "1.00 [1.00, 1.00] (*true lengths*: 1.00)"
    assert goal(1.0) == "0.50 [0.50, 0.50]"


def test_the_makespan_is_judged_by_the_bound() -> None:
    found = {each.name: each for each in goals(rows("reasoning", makespan_s=1.25))}
    goal = found["512 rollouts at once: makespan over the bound's"]
    assert (goal.found, goal.is_reached) == ("1.25 [1.25, 1.25]", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_has_every_policy_and_every_point(family: str, tmp_path: Path) -> None:
    of_family = rows(family)
    text = report.markdown(of_family, [])
    has_parts = any(point.has_parts for point in FAMILIES[family].points)
    for policy in contenders(family, TUNED, has_parts=has_parts):
        mark = "*" if policy in (*BOUNDS, ENGINE_COSTS) else "`"
        assert policy == LLUMNIX or f"{mark}{policy}{mark}" in text
    if family != "paper":
        for point in FAMILIES[family].points:
            assert f"<summary>{point.name}" in text
    draw(of_family, goals(of_family), tmp_path, "plot")
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {f"plot_{family}.png", "plot_goals.png"}
    assert all(each.stat().st_size > 1_000 for each in tmp_path.iterdir())


def test_the_bound_has_the_memory_and_the_speed_of_all_instances() -> None:
    (job,) = jobs(REASONING.points[0], ["round-robin"], [1])
    bound = pooled(job).config
    assert bound.num_instances == 1
    assert bound.engine.total_tokens == 16 * job.config.engine.total_tokens
    assert bound.step_time.decode_token_s == pytest.approx(job.config.step_time.decode_token_s / 16)
    assert bound.step_time.decode_s == job.config.step_time.decode_s


def test_the_costs_of_the_engine_are_those_of_its_profile() -> None:
    """By hand, from that of the H100: a request of a decode step takes 13.341 us, a token of a
    prompt 21.715, a copied block of 16 tokens 209.72."""
    (job,) = jobs(PREFIXES.points[0], [ENGINE_COSTS], [1])
    rule = job.config.policy.dispatch
    assert isinstance(rule, Soonest)
    found = (rule.pair_cost, rule.request_cost, rule.kv_token_cost, rule.copy_token_cost)
    assert found == pytest.approx((6.189e-5, 0.6144, 3.165e-3, 0.6036), rel=1e-3)
    assert job.policy == ENGINE_COSTS


def test_the_oracle_moves_what_will_have_the_largest_load() -> None:
    """By hand: over 1,000 steps, two requests of 100 tokens that have 10 and 500 more to come have
    means of 1.05 and 175 tokens."""
    (job,) = (with_true_lengths(jobs(REASONING.points[0], ["sterna"], [1], is_quick=True)[0]),)
    oracle = job.config.policy.own
    assert oracle is not None
    rest = [10, 500]
    for index, num_tokens in enumerate(rest):
        oracle._output_tokens[index] = num_tokens
    view = instance("i0", running=[running(f"r{index}", 100) for index in range(2)])
    assert [each.request_id for each in oracle.victims(view)] == ["r1", "r0"]
    load_tokens, moved_tokens = oracle._loads_tokens["i0"]
    assert (load_tokens, moved_tokens) == (pytest.approx(176.05), pytest.approx(175.0))


def test_each_request_alone_has_the_latencies_of_its_steps() -> None:
    """No policy is better, whatever its metric."""
    point = PREFIXES.points[1]
    found = rows_of("prefixes", point, ["sterna", *BOUNDS], [1], is_quick=True)
    ours, oracle, _, _, bound = found
    assert [row["policy"] for row in found] == ["sterna", *BOUNDS]
    assert all(
        bound[metric] <= row[metric]
        for metric in METRICS
        if metric in bound
        for row in (ours, oracle)
    )
    step_time = jobs(point, ["sterna"], [1], is_quick=True)[0].config.step_time
    assert bound["tpot_mean_s"] > step_time.decode_s + step_time.decode_request_s


def test_a_rate_lies_between_those_that_have_run() -> None:
    """By hand: 30 ms are two thirds of the way from 20 ms at 3/s to 35 ms at 3.5/s."""
    of_rates = [
        {"policy": "sterna", "point": reasoning_point(rate), "seed": 1, "tpot_p90_s": tpot_s}
        for rate, tpot_s in ((2.5, 0.018), (3, 0.020), (3.5, 0.035))
    ]
    assert rate_at(of_rates, "sterna", 0.030) == pytest.approx(3 + 1 / 3)
    assert rate_at(of_rates, "sterna", 0.040) is None


def test_the_search_takes_the_best_variant_over_all_points_of_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Before the next test: what is compiled here, that one has.
    monkeypatch.setattr(search, "GRIDS", {"sglang": GRIDS["sglang"]})
    points = tuple(each for each in PREFIXES.points if each.name in ("agents", "1 system prompt"))
    found = search.searched(replace(PREFIXES, points=points), is_quick=True, num_processes=1)
    assert {row["policy"] for row in found} == set(combinations("sglang"))
    scores = [row["score_s"] for row in found]
    assert scores == sorted(scores)
    assert scores[0] < scores[-1]
    assert search.tuned(found) == {"sglang": found[0]["policy"]}


def test_points_run_as_the_command_would_run_them() -> None:
    found = rows_of("prefixes", PREFIXES.points[0], ["sterna", "dynamo"], [3], is_quick=True)
    assert [row["policy"] for row in found] == ["sterna", "dynamo"]
    assert all(row["n"] == 100 and row["prefix_reuse"] > 0 for row in found)
    assert all(row["ttft_p99_long_s"] >= row["ttft_mean_s"] for row in found)


def test_the_page_has_a_place_for_the_tables() -> None:
    text = PAGE.read_text()
    assert text.index(begin_mark(COMMAND)) < text.index(END)


def test_a_family_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.policies", "paprika"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "must be some of paper, clusters, prefixes, reasoning, not 'paprika'" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_goes_through_everything_and_writes_nothing(tmp_path: Path) -> None:
    chosen = [{"rule": rule, "policy": variant, "score_s": 1.0} for rule, variant in TUNED.items()]
    (tmp_path / "policies_search.json").write_text(json.dumps({"rows": chosen}))
    done = subprocess.run(
        [sys.executable, "-m", "bench.policies", "--quick", "--seeds", "1", "--results", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "none was written" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["policies_search.json"]
