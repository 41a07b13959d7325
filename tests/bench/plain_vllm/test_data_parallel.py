"""The comparison with vLLM's data parallelism: its tables, and a run of few requests."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.results_io import ROOT
from bench.plain_vllm import data_parallel_report as report
from bench.plain_vllm import sides
from bench.plain_vllm.sides import SIDES, STERNA, VLLM, VLLM_LEAN
from bench.serving.comparing import QUICK_FOLDER
from sterna.engine.vllm.guard import is_cpu_build

COMMAND = [sys.executable, "-m", "bench.plain_vllm.data_parallel"]


def row(
    side: str,
    seed: int,
    replicas: int = 2,
    load: str = report.AS_THEY_COME,
    **values: float | None,
) -> dict[str, Any]:
    ones: dict[str, Any] = dict.fromkeys(report.SHOWN, 1.0)
    return {"side": side, "seed": seed, "replicas": replicas, "load": load, **ones, **values}


def test_sides_that_were_not_all_measured_are_measured_again_together() -> None:
    """Others that are not asked for now, and groups that have all, stay."""
    kept = [row(STERNA, 1), row(VLLM, 1), row(VLLM_LEAN, 2)]
    rows = [*kept, row(STERNA, 2), row(VLLM, 2, replicas=3)]
    assert report.whole(rows, {STERNA, VLLM}) == kept
    assert report.whole(rows, {STERNA}) == rows


def test_the_tables_have_means_and_factors_of_each_number_of_replicas() -> None:
    """By hand: TTFT is four times, and once, that of Sterna; twice in the mean."""
    rows = [
        *(row(STERNA, 1, ttft_mean_s=0.25), row(VLLM, 1, ttft_mean_s=1.0)),
        # Of the same start as the round before.
        *(row(STERNA, 2, ttft_mean_s=0.75, start_s=None), row(VLLM, 2, ttft_mean_s=0.75)),
        *(row(STERNA, 1, replicas=3), row(VLLM, 1, replicas=3, ttft_mean_s=5.0)),
    ]
    text = report.markdown(rows)
    two, three = text.split("**3 replicas, requests as they come**, means over 1 rounds:")
    assert "**2 replicas, requests as they come**, means over 2 rounds:" in two
    assert f"| {STERNA} | 0.500 |" in two
    assert f"| {VLLM} | 2.00 [0.03, 159.12] | 1.00 [1.00, 1.00] |" in two
    assert f"| {VLLM} | 5.00 |" in three
    assert f"- **{VLLM}**: " in text
    assert VLLM_LEAN not in text


def test_throughput_is_judged_at_once_and_first_tokens_as_requests_come() -> None:
    """By hand: 90 tokens a second to vLLM's 100, and a P99 TTFT of 2 s to its 3."""
    rows = [
        row(STERNA, 1, ttft_p99_s=2.0, output_tokens_per_s=50.0),
        row(VLLM, 1, ttft_p99_s=3.0, output_tokens_per_s=50.0),
        row(STERNA, 1, load=report.AT_ONCE, ttft_p99_s=9.0, output_tokens_per_s=90.0),
        row(VLLM, 1, load=report.AT_ONCE, output_tokens_per_s=100.0),
    ]
    found = report.summary(rows)
    assert found["ratios"] == [
        {"replicas": 2, "side": VLLM, "throughput_ratio": 0.9, "ttft_p99_ratio": 1.5}
    ]
    assert [each["is_reached"] for each in found["goals"]] == [False, True]
    assert f"2 replicas, against {VLLM}: P99 TTFT" in report.markdown(rows)


@pytest.mark.parametrize(("num_replicas", "bound"), [(1, "4"), (2, "4|6"), (3, "nobind")])
def test_each_rank_of_lean_vllm_has_a_core_if_there_are_enough(
    num_replicas: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "physical_cores", lambda: [4, 6])
    monkeypatch.setattr(sides, "num_usable_cores", lambda: 2)
    found = SIDES[VLLM_LEAN].environment(num_replicas)
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", bound)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not is_cpu_build(), reason="needs vLLM for CPU")
@pytest.mark.parametrize(("rank", "core"), [(0, 4), (1, 6)])
def test_vllm_gives_a_rank_the_core_of_its_number(
    rank: int, core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    monkeypatch.setattr(sides, "physical_cores", lambda: [4, 6])
    monkeypatch.setattr(sides, "num_usable_cores", lambda: 2)
    for name, value in sides.one_bound_thread(2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    parallel = SimpleNamespace(
        local_world_size=1, data_parallel_rank_local=rank, _api_process_count=1
    )
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
        assert os.environ["OMP_PLACES"] == f"{{{core}}}"


@pytest.mark.parametrize("options", [("--sides", "paprika"), ("--replicas", "9")])
def test_what_does_not_exist_is_refused(options: tuple[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert options[1] in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_quick_run_has_a_row_for_each_side() -> None:
    done = subprocess.run(
        [*COMMAND, "--quick", "--rounds", "1", "--replicas", "2"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "data_parallel.json").read_text())["rows"]
    assert [each["side"] for each in rows] == [*SIDES, *SIDES]
    assert {each["failed"] for each in rows} == {0}
    assert all(each["tpot_mean_s"] > 0 for each in rows)
