"""The comparison of starts: its report, and the starts that take the shortest."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.common.results_io import ROOT
from bench.plain_vllm import start_report as report
from bench.plain_vllm.sides import STERNA, VLLM
from bench.serving.comparing import QUICK_FOLDER

COMMAND = [sys.executable, "-m", "bench.plain_vllm.start"]


def row(side: str, seed: int, first_token_s: float, *, mode: str = report.COLD) -> dict[str, Any]:
    return {
        **{"replicas": 2, "side": side, "seed": seed, "mode": mode, "options_s": 10.0},
        **{"engines_s": None, "ready_s": 30.0, "first_token_s": first_token_s},
    }


ROWS = [
    # Ratios of 0.5, 0.8 and 1.1.
    *(row(VLLM, 1, 100.0), row(STERNA, 1, 50.0)),
    *(row(VLLM, 2, 100.0), row(STERNA, 2, 80.0)),
    *(row(VLLM, 3, 100.0), row(STERNA, 3, 110.0)),
    row(STERNA, 1, 40.0, mode=report.WARM),
]


def test_the_summary_has_medians_over_pairs() -> None:
    assert report.summary(ROWS) == {"first_token_ratio": {"2, compiles": 0.8}}


def test_the_table_has_both_servers_and_leaves_out_what_is_not_known() -> None:
    lines = report.markdown(ROWS).splitlines()
    assert f"| 2, compiles | {VLLM} | 3 | 10.0 |  | 30.0 | 100 |  |" in lines
    assert f"| 2, compiles | {STERNA} | 3 | 10.0 |  | 30.0 | 80.0 | 0.80 [0.50, 1.10] |" in lines
    assert f"| 2, compiled before | {STERNA} | 1 | 10.0 |  | 30.0 | 40.0 |  |" in lines


def test_starts_of_one_server_alone_are_measured_again_with_the_other() -> None:
    """What stopped in between went on another day, or on a slower machine."""
    assert report.paired([*ROWS, row(STERNA, 4, 50.0)]) == ROWS


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_run_has_the_stages_of_both_servers() -> None:
    done = subprocess.run(
        [*COMMAND, "--quick", "--rounds", "1", "--replicas", "2"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "start.json").read_text())["rows"]
    assert [each["side"] for each in rows] == [VLLM, STERNA]
    for each in rows:
        times_s = [each[stage] for stage in report.STAGES]
        assert all(time_s is not None for time_s in times_s), each
        assert times_s == sorted(times_s)
