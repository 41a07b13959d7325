"""The comparison with vLLM's data parallelism: its tables, and a run of few requests."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.common.results_io import ROOT
from bench.plain_vllm import data_parallel_report as report
from bench.plain_vllm.sides import SIDES, STERNA, VLLM, VLLM_LEAN
from bench.serving.comparing import QUICK_FOLDER

COMMAND = [sys.executable, "-m", "bench.plain_vllm.data_parallel"]


def row(side: str, seed: int, replicas: int = 2, **values: float | None) -> dict[str, Any]:
    ones: dict[str, Any] = dict.fromkeys(report.SHOWN, 1.0)
    return {"side": side, "seed": seed, "replicas": replicas, **ones, **values}


def test_the_tables_have_means_and_factors_of_each_number_of_replicas() -> None:
    """By hand: TTFT is four times, and once, that of Sterna; twice in the mean."""
    rows = [
        *(row(STERNA, 1, ttft_mean_s=0.25), row(VLLM, 1, ttft_mean_s=1.0)),
        # Of the same start as the round before.
        *(row(STERNA, 2, ttft_mean_s=0.75, start_s=None), row(VLLM, 2, ttft_mean_s=0.75)),
        *(row(STERNA, 1, replicas=3), row(VLLM, 1, replicas=3, ttft_mean_s=5.0)),
    ]
    text = report.markdown(rows)
    two, three = text.split("**3 replicas**, means over 1 rounds:")
    assert "**2 replicas**, means over 2 rounds:" in two
    assert f"| {STERNA} | 0.500 |" in two
    assert f"| {VLLM} | 2.00 [1.00, 4.00] | 1.00 [1.00, 1.00] |" in two
    assert f"| {VLLM} | 5.00 |" in three
    assert f"- **{VLLM}**: " in text
    assert VLLM_LEAN not in text


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
    assert [each["side"] for each in rows] == list(SIDES)
    assert [each["failed"] for each in rows] == [0] * len(SIDES)
    assert all(each["tpot_mean_s"] > 0 for each in rows)
