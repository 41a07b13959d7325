"""The README's numbers and its picture are those of the result files."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.common import results_io
from bench.common.comparison import Estimate, factor
from bench.migration import downtime_plot
from bench.paced.report import predicted
from bench.paced.runs import PACED
from bench.policies.contenders import LLUMNIX, STERNA
from bench.policies.families import FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def row(begin: str) -> str:
    """The README's only line of a table that begins so."""
    (line,) = (each for each in README.splitlines() if each.startswith(f"| {begin}"))
    return line


def downtime_row(mode: str, transport: str | None) -> dict[str, Any]:
    (found,) = (
        each
        for each in results_io.read("migration")["rows"]
        if (each["mode"], each["transport"]) == (mode, transport)
        and (each["tokens"], each["busy"]) == (8192, False)
    )
    return dict(found)


def test_the_downtimes_are_those_that_were_measured() -> None:
    live, copy = downtime_row("live", "gloo"), downtime_row("stop_copy", "gloo")
    recompute = downtime_row("recompute", None)
    assert (
        f" {live['downtime_ms']['median']:.1f} ms; "
        f"stop and copy {copy['downtime_ms']['median']:.0f} ms; "
        f"recompute {recompute['downtime_ms']['median'] / 1e3:.0f} s. "
        f"A decode step takes {live['decode_step_ms']['median']:.0f} ms. "
    ) in row("Downtime of a live move of 8,192 tokens")


def test_the_downtimes_on_a_gpu_are_those_that_were_measured() -> None:
    found = {
        (row["mode"], row["busy"]): row
        for row in results_io.read("migration_cuda")["rows"]
        if row["tokens"] == 8192
    }
    live, copy = found["live", False], found["stop_copy", False]
    busy, busy_copy = found["live", True], found["stop_copy", True]
    assert (
        f" {live['downtime_ms']['median']:.1f} ms; "
        f"stop and copy {copy['downtime_ms']['median']:.0f} ms. "
        f"A decode step takes {live['decode_step_ms']['median']:.1f} ms. "
        f"Both busy: {busy['downtime_ms']['median']:.1f} and "
        f"{busy_copy['downtime_ms']['median']:.0f} ms, "
        f"a step {busy['decode_step_ms']['median']:.1f} ms. "
    ) in row("The same over shared memory")


def test_the_cost_beside_plain_vllm_is_what_was_measured() -> None:
    goals = results_io.read("overhead")["summary"]["goals"]
    found = {each["name"]: each["found"] for each in goals}
    load = "compiled, 128 tokens"
    assert (
        f" Tokens a second, saturated: {found[f'{load}, saturated: throughput']}; beside a busy "
        f"core {found[f'{load}, saturated, a core busy: throughput']}. "
        f"Time of a token at half the rate: {found[f'{load}, half the rate: TPOT']}. "
    ) in row("One instance beside plain")


def test_the_costs_of_the_http_process_and_without_requests_are_those_that_were_measured() -> None:
    costs, overhead = results_io.read("front_end")["summary"], results_io.read("overhead")
    idle = [
        each["idle_cores"]
        for each in overhead["rows"]
        if each["side"] == "vllm" and each["load"] == "idle"
    ]
    assert (
        f" A token takes {costs['sterna_token_us']:.1f} us of processor time, vLLM's server "
        f"{costs['vllm_token_us']:.1f}. Idle {100 * overhead['summary']['idle_cores']:.1f} % of a "
        f"core, vLLM {100 * median(idle):.1f} %. "
    ) in row("The same: its HTTP process")


def test_what_chaos_found_is_what_it_found() -> None:
    found = results_io.read("chaos")["summary"]
    assert (
        f" {found['requests']} requests, {found['failed']} failed; of {found['tokens']:,} tokens "
        f"{found['tokens_lost']} lost, {found['tokens_repeated']} repeated, "
        f"{found['tokens_changed']} changed "
    ) in row("Ten minutes of kills")


def test_the_ratios_of_priorities_are_those_that_were_measured() -> None:
    summary = results_io.read("priorities")["summary"]
    high, normal = summary["high"]["ratio"]["ttft_s"], summary["normal"]["ratio"]["request_s"]
    low, top = high["mean"]["interval"]
    line = row("Priorities on, against off")
    ratio = high["mean"]["mean"]
    assert f" {ratio:.2f} times as long (95 % interval {low:.2f} to {top:.2f})" in line
    assert f" {normal['mean']['mean']:.2f} times " in line


def test_the_cost_of_scaling_is_what_was_measured() -> None:
    runs = {each["run"]: each for each in results_io.read("autoscaling")["runs"]}
    share = runs["sterna"]["instance_seconds"] / runs["fixed"]["instance_seconds"]
    scaled = runs["sterna"]
    assert (
        f" {share:.0%} of the instance-seconds; "
        f"{scaled['failed']} of {scaled['requests']} requests failed "
    ).replace("%", " %") in row("One to three instances")


VERDICTS = ("reproduced", "partly", "not", "not judged")


def test_the_verdicts_are_counted_as_the_page_counts_them() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    (together,) = re.findall(r"^\| \*\*together\*\* \|(.*)\|$", page, re.MULTILINE)
    counts = [int(each) for each in together.split("|") if each.strip()]
    reproduced, partly, missed, unjudged = counts
    line = row("75 claims about ")
    assert reproduced + partly + missed + unjudged == 75
    assert (
        f" {reproduced} reproduced, {partly} partly, {missed} not, {unjudged} not judged. "
    ) in line
    claims = [
        each
        for path in (results_io.RESULTS / "paper").glob("*.json")
        for each in json.loads(path.read_text("utf-8")).get("claims", ())
    ]
    counts_of = [
        Counter(each["verdict"] for each in claims if ("points" in each["note"]) is from_plots)
        for from_plots in (False, True)
    ]
    stated, read = (
        (sum(each.values()), ", ".join(str(each[name]) for name in VERDICTS)) for each in counts_of
    )
    assert f" {stated[0]} of them ({stated[1]}); {read[0]} are numbers read" in line
    assert f"its plots ({read[1]}). " in line


@pytest.mark.parametrize("page", ["light", "dark"])
def test_the_picture_has_the_ink_of_its_page_and_no_background(page: str, tmp_path: Path) -> None:
    drawn = {each.name: each for each in downtime_plot.draw(results_io.read("migration"), tmp_path)}
    picture = drawn[f"downtime_{page}.svg"].read_text("utf-8")
    (other,) = downtime_plot.INK.keys() - {page}
    assert downtime_plot.INK[page] in picture
    assert downtime_plot.INK[other] not in picture
    assert "fill: #ffffff" not in picture
    assert f"bench/results/{drawn[f'downtime_{page}.svg'].name}" in README


PAPER = FAMILIES["paper"].points
OTHERS = [each.name for each in PAPER if not each.chooses]
SHORT_TO_LONG = [each.name for each in PAPER if each.name.startswith("S-L")]


def factor_of(metric: str, points: list[str]) -> str:
    """Of Sterna's policy against Llumnix's on some of the paper's traces."""
    found = factor(results_io.read("policies")["rows"], metric, STERNA, LLUMNIX, points)
    assert found is not None
    return f"{found.mean:.2f}"


def test_the_policy_is_as_much_better_in_simulation_as_was_measured() -> None:
    found = {goal["name"]: goal["found"] for goal in results_io.read("policies")["summary"]}
    of_paper = " of the paper's traces against Llumnix's"
    ttft_p99, ttft_mean, loss, tpot_p99 = (
        found[name + of_paper].partition(" times better")[0]
        for name in ("TTFT P99", "TTFT mean", "preemption loss", "TPOT P99")
    )
    assert (
        f"P99 TTFT {ttft_p99} times better, mean TTFT {ttft_mean}, "
        f"preemption loss {loss}, P99 TPOT {tpot_p99}. On the three traces that took part in the "
        f"choice of one parameter only: {factor_of('ttft_p99_s', OTHERS)} and "
        f"{factor_of('ttft_mean_s', OTHERS)}. Worse with short prompts and long answers: P99 TPOT "
        f"{factor_of('tpot_p99_s', SHORT_TO_LONG)} times. |"
    ) in row("Sterna's policy beside Llumnix's in simulation")


def first_tokens(case: str, *others: str) -> dict[tuple[str, str], Any]:
    """How many times sooner they come on paced engines with Sterna's policy than with others."""
    return {
        (metric, other): on_paced_engines(case, f"ttft_{metric}_s", other)
        for metric in ("mean", "p99")
        for other in others
    }


def on_paced_engines(case: str, metric: str, other: str) -> Estimate | None:
    """How many times better it is with Sterna's policy than with the other."""
    rows = [each for each in results_io.read("paced")["rows"] if each["kind"] == PACED]
    return factor(rows, metric, STERNA, other, [case])


def test_policies_on_paced_engines_are_as_much_better_as_was_measured() -> None:
    sharegpt, burst, medium, eight = (
        first_tokens(f"{case} instances", LLUMNIX)
        for case in ("ShareGPT, 4", "BurstGPT, 4", "M-M, 4", "ShareGPT, 8")
    )
    assert (
        f"ShareGPT: first tokens {sharegpt['mean', LLUMNIX]} times sooner in the mean than with "
        f"Llumnix's rules, P99 {sharegpt['p99', LLUMNIX]}; BurstGPT: {burst['mean', LLUMNIX]} and "
        f"{burst['p99', LLUMNIX]}; M-M: no significant difference; S-L: P99 TPOT "
        f"{on_paced_engines('S-L, 4 instances', 'tpot_p99_s', LLUMNIX)} times as "
        "good. |"
    ) in row("Policies on four real vLLM engines")
    assert all(each.low < 1 < each.high for each in medium.values())
    assert (
        f"First tokens {eight['mean', LLUMNIX]} times sooner in the mean than with Llumnix's "
        f"rules, P99 {eight['p99', LLUMNIX]}. |"
    ) in row("Eight such engines")


def test_long_outputs_on_paced_engines_are_as_much_better_as_was_measured() -> None:
    case = "reasoning, 4 instances"
    assert (
        f"P99 TPOT {on_paced_engines(case, 'tpot_p99_s', 'round-robin')} times better than with "
        f"round robin; P99 TTFT {on_paced_engines(case, 'ttft_p99_s', LLUMNIX)} times better than "
        "with Llumnix's rules. |"
    ) in row("The same, long outputs")


def test_sessions_on_paced_engines_have_first_tokens_as_much_sooner_as_was_measured() -> None:
    found = first_tokens("sessions, 4 instances", "dynamo-tuned", "llm-d-tuned", "sglang-tuned")
    assert (
        f"First tokens {found['mean', 'dynamo-tuned']} times sooner in the mean than with Dynamo's "
        f"tuned rule, P99 {found['p99', 'dynamo-tuned']}; llm-d's tuned "
        f"{found['mean', 'llm-d-tuned'].mean:.2f} and {found['p99', 'llm-d-tuned'].mean:.2f}. "
        f"Later than with SGLang's tuned rule: {found['mean', 'sglang-tuned']} and "
        f"{found['p99', 'sglang-tuned']}. |"
    ) in row("Agents' sessions")


def test_the_simulators_errors_are_those_that_were_found() -> None:
    rows = results_io.read("paced")["rows"]
    kinds = {(each["point"], each["policy"]) for each in rows if each["kind"] == PACED}

    def errors(metric: str) -> list[float]:
        found = [predicted(rows, metric, *each) for each in kinds]
        return [each.mean for each in found if each is not None]

    most = max(abs(each - 1) for each in errors("request_mean_s"))
    lowest, highest = min(errors("ttft_mean_s")), max(errors("ttft_mean_s"))
    assert (
        f"Mean request latency within {math.ceil(100 * most)} %; mean TTFT "
        f"{lowest:.2f} to {highest:.2f} times what it was (geometric means over the rounds of each "
        "policy and case). |"
    ) in row("What the simulator predicts")
    page = " ".join((ROOT / "docs" / "simulation.md").read_text("utf-8").split())
    assert (
        f"mean request latencies were predicted within {math.ceil(100 * most)} %, mean TTFT as "
        f"{lowest:.2f} to {highest:.2f} times what it was."
    ) in page
