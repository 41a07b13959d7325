"""The comparison with plain `vllm serve`: its report, and a run of few requests."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.common.results_io import ROOT
from bench.plain_vllm import overhead
from bench.plain_vllm import overhead_report as report
from bench.plain_vllm.sides import STERNA, VLLM
from bench.serving.comparing import QUICK_FOLDER
from bench.serving.measured import LOGS

COMMAND = [sys.executable, "-m", "bench.plain_vllm.overhead"]

SATURATED, BUSY, HALF = "saturated", "saturated, a core busy", report.SUMMARY_LOAD
ONE = "one at a time"


def row(
    side: str, seed: int, load: str, *, tokens_per_s: float = 100.0, ttft: float = 50.0,
    tpot: float = 30.0, mode: str = "eager",
) -> dict[str, Any]:  # fmt: skip
    return {
        "mode": mode,
        "side": side,
        "seed": seed,
        "load": load,
        "is_saturated": load in (SATURATED, BUSY),
        "with_busy_core": load == BUSY,
        "tokens_per_s": tokens_per_s,
        "duration_s": 10.0,
        "server_cpu_s": 20.0,
        "ttft_mean_ms": ttft,
        "tpot_mean_ms": tpot,
    }


def idle(side: str, cores: float) -> dict[str, Any]:
    return {
        **{"mode": "eager", "side": side, "seed": 1, "load": "idle", "start_s": 20.0},
        **{"idle_cores": cores, "memory_bytes": 2**30},
    }


ROWS = [
    # Ratios of 0.9, 1.0 and 0.98 in three pairs: the median is 0.98.
    *(row(VLLM, 1, SATURATED), row(STERNA, 1, SATURATED, tokens_per_s=90.0)),
    *(row(VLLM, 2, SATURATED), row(STERNA, 2, SATURATED)),
    *(row(VLLM, 3, SATURATED, tokens_per_s=50.0), row(STERNA, 3, SATURATED, tokens_per_s=49.0)),
    *(row(VLLM, 1, BUSY), row(STERNA, 1, BUSY, tokens_per_s=96.0)),
    *(row(VLLM, 1, HALF), row(STERNA, 1, HALF, ttft=51.5, tpot=33.0)),
    # Without its counterpart.
    row(VLLM, 2, HALF),
    *(row(VLLM, 1, HALF, mode="compiled"), row(STERNA, 1, HALF, mode="compiled", ttft=51.0)),
    *(row(VLLM, 1, ONE, mode="compiled"), row(STERNA, 1, ONE, mode="compiled", ttft=90.0)),
    *(idle(VLLM, 0.2), idle(STERNA, 0.02)),
]


def test_the_page_says_what_a_busy_program_gets_beside_each_server() -> None:
    """The median over runs; nothing for modes, and results, without both servers."""
    rows = [
        {**row(side, seed, BUSY, mode=mode), "busy_program_cores": cores}
        for mode, side, seed, cores in (
            *(("eager", VLLM, 1, 0.4), ("eager", VLLM, 2, 0.5), ("eager", VLLM, 3, 0.9)),
            *(("eager", STERNA, 1, 0.75), ("compiled", VLLM, 1, 0.6)),
        )
    ]
    found = [each for each in report.markdown([*ROWS, *rows]).splitlines() if "busy got" in each]
    assert found == [
        "eager: the program that would keep a core busy got 0.50 of a core beside vLLM, 0.75 "
        "beside Sterna."
    ]
    assert "busy got" not in report.markdown(ROWS)


def test_the_summary_has_medians_over_pairs_and_times_of_one_load() -> None:
    found = report.summary(ROWS)
    goals = found.pop("goals")
    assert found == pytest.approx(
        {
            "throughput_ratio": 0.98,
            "busy_throughput_ratio": 0.96,
            "ttft_added_ms": 1.0,
            "tpot_ratio": 1.0,
            "idle_cores": 0.02,
        }
    )
    assert {each["name"]: each["is_reached"] for each in goals} == {
        f"eager, {SATURATED}: throughput": None,
        f"eager, {BUSY}: throughput": True,
        f"eager, {HALF}: added to TTFT": True,
        f"eager, {HALF}: TPOT": False,
        f"compiled, {HALF}: added to TTFT": True,
        f"compiled, {HALF}: TPOT": True,
        f"compiled, {ONE}: added to TTFT": False,
        f"compiled, {ONE}: TPOT": True,
        "idle": True,
    }


def test_the_summary_names_a_load_that_there_is() -> None:
    assert report.SUMMARY_MODE in overhead.MODES
    assert report.SUMMARY_LOAD in [each.name for each in overhead.LOADS]


def test_the_tables_have_both_servers_and_their_ratios() -> None:
    text = report.markdown(ROWS)
    # 20 s for 1,000 tokens and for 900.
    assert (
        f"| eager, {SATURATED} | 3 | 100 / 90.0 | 0.980 [0.900, 1.000] | 50.0 / 50.0 "
        "| 0.0 [0.0, 0.0] | 30.0 / 30.0 | 1.000 [1.000, 1.000] | 20.0 / 22.2 |" in text
    )
    assert f"| {VLLM} | 12.0 | 1,024 | 20.0 |" in text
    assert f"| {STERNA} | 1.20 | 1,024 | 20.0 |" in text


def test_each_load_has_the_number_of_its_pairs_that_count() -> None:
    unsteady = [{**each, "is_steady": each["seed"] != 2} for each in ROWS]
    text = report.markdown(unsteady)
    assert f"| eager, {SATURATED} | 2 | " in text
    assert f"| eager, {HALF} | 1 | " in text


def test_in_older_rows_the_tokens_of_the_warm_up_have_their_part_of_the_processor_time() -> None:
    """By hand: 20 s for 1,000 tokens and 1,000 of the warm-up are 10 ms a token."""
    warmed = [{**each, "warm_up_tokens": 1_000} for each in ROWS if each["load"] == BUSY]
    assert "| 10.0 / 10.2 | 1.02 |" in report.markdown(warmed)


def test_a_run_without_its_counterpart_is_done_again() -> None:
    lone = row(VLLM, 2, HALF)
    assert report.paired(ROWS) == [each for each in ROWS if each != lone]


def test_a_pair_at_two_speeds_of_the_machine_is_run_once_more_and_replaced() -> None:
    slowed = [{**each, "is_steady": each["load"] != BUSY} for each in ROWS]
    assert report.counted(slowed, "eager", 1) == {SATURATED, HALF, "idle"}
    pair = [row(VLLM, 1, BUSY), row(STERNA, 1, BUSY)]
    found = report.replaced(slowed, pair)
    place = next(n for n, each in enumerate(slowed) if each["load"] == BUSY)
    others = [each for each in slowed if (each["load"], each["seed"]) != (BUSY, 1)]
    assert found[place : place + 2] == pair
    assert [each for each in found if each not in pair] == others
    assert BUSY in report.counted(found, "eager", 1)


def test_pairs_at_two_speeds_of_the_machine_do_not_count() -> None:
    slowed = [
        {**each, "is_steady": False}
        for each in (row(VLLM, 4, HALF), row(STERNA, 4, HALF, ttft=500.0, tpot=99.0))
    ]
    rows = [*ROWS, *slowed]
    assert report.summary(rows) == report.summary(ROWS)
    text = report.markdown(rows)
    assert text.startswith("Of all pairs of runs, 1 do not count")
    assert text.endswith(report.markdown(ROWS))


def test_pairs_with_failed_requests_do_not_count_and_are_measured_again() -> None:
    """Those that a server refuses would leave it faster for the others."""
    failing = [row(VLLM, 4, HALF), {**row(STERNA, 4, HALF, ttft=5.0), "failed": 3}]
    rows = [*ROWS, *failing]
    assert report.summary(rows) == report.summary(ROWS)
    assert report.counted(rows, "eager", 4) == set()
    text = report.markdown(rows)
    assert text.startswith("Of all pairs of runs, 1 do not count: requests failed.")
    assert text.endswith(report.markdown(ROWS))


def test_a_first_server_alone_has_no_summary_of_pairs() -> None:
    found = report.summary([row(STERNA, 1, SATURATED), idle(STERNA, 0.1)])
    assert "throughput_ratio" not in found


def test_what_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "--modes", "paprika"], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "paprika" in done.stderr.splitlines()[-1]


def test_a_load_at_half_a_rate_needs_the_rate() -> None:
    done = subprocess.run(
        [*COMMAND, "--loads", "1,024 tokens, half the rate"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs a saturated load" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_quick_run_has_pairs_of_rows() -> None:
    done = subprocess.run(
        [*COMMAND, "--quick", "--rounds", "1", "--modes", "eager"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((QUICK_FOLDER / "overhead.json").read_text())
    assert "throughput_ratio" in document["summary"]
    loads = [each for each in document["rows"] if each["load"] != "idle"]
    assert [each["side"] for each in loads] == [STERNA, VLLM, VLLM, STERNA]
    assert all(each["failed"] == 0 for each in loads)
    assert all(each["n"] == 4 and each["server_cpu_s"] > 0 for each in loads)
    for side in (STERNA, VLLM):
        log = (LOGS / "overhead" / f"{side}-eager.log").read_text("utf-8", "replace")
        assert "POST /v1/completions" not in log
