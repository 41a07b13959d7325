"""The cost of front ends: its report, and a run of few streams."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.common.results_io import ROOT
from bench.plain_vllm.sides import STERNA, VLLM
from bench.processes import front_end_report as report
from bench.serving.comparing import QUICK_FOLDER
from bench.serving.measured import LOGS

COMMAND = [sys.executable, "-m", "bench.processes.front_end"]


def rows_of(side: str, seed: int, *, request_us: float, token_us: float) -> list[dict[str, Any]]:
    loads = ((report.SHORT, 1_000, 1_000), (report.LONG, 100, 20_000))
    return [
        {
            **{"side": side, "seed": seed, "load": load, "n": n, "failed": 0, "tokens": tokens},
            **{"duration_s": 10.0, "cpu_s": (n * request_us + tokens * token_us) / 1e6},
        }
        for load, n, tokens in loads
    ]


EMULATED = {
    **{"side": STERNA, "seed": 1, "load": "many", "instances": 64, "front_ends": 1, "n": 5_000},
    **{"failed": 2, "tokens": 100_000, "duration_s": 50.0, "cpu_s": 10.0, "memory_bytes": 2**30},
}

ROWS = [
    *rows_of(VLLM, 1, request_us=1_000.0, token_us=50.0),
    *rows_of(STERNA, 1, request_us=1_500.0, token_us=80.0),
    *rows_of(VLLM, 2, request_us=1_000.0, token_us=50.0),
    *rows_of(STERNA, 2, request_us=2_500.0, token_us=100.0),
    EMULATED,
]


def test_costs_are_those_that_both_loads_have_together() -> None:
    found = report.summary(ROWS)
    goals = found.pop("goals")
    assert found == pytest.approx(
        {
            **{"request_ratio": 2.0, "token_ratio": 1.8},
            **{"sterna_request_us": 2_000.0, "sterna_token_us": 90.0},
            **{"vllm_request_us": 1_000.0, "vllm_token_us": 50.0},
        }
    )
    assert [each["is_reached"] for each in goals] == [False, False]


def test_the_tables_have_costs_and_ratios() -> None:
    text = report.markdown(ROWS)
    assert f"| {VLLM} | 1,000 |  | 50.0 |  | 20,000 |" in text
    assert "| 2,000 | 2.00 [1.50, 2.50] | 90.0 | 1.80 [1.60, 2.00] | 11,111 |  |" in text
    assert "| many | 2,000 | 100 | 10,000 |  | 1,024 |  | 2 |" in text


def test_chunks_with_several_tokens_show_where_they_were_counted() -> None:
    rows = [{**row, "chunks": row["tokens"] / 2, "most_open": 4_321} for row in ROWS]
    text = report.markdown(rows)
    assert "| 1.80 [1.60, 2.00] | 11,111 | 2.00 |" in text
    assert "| many | 2,000 | 100 | 10,000 | 2.00 | 1,024 | 4,321 | 2 |" in text
    assert "5,000 streams at once: failed: 2, and 4,321 were open at one time" in text


@pytest.mark.parametrize(
    ("streams", "cpu_s", "found"),
    [(20_000, 43.0, ("1.07", True)), (20_000, 48.0, ("1.20", False)), (5_000, 48.0, None)],
)
def test_several_front_ends_are_judged_where_each_has_as_many_streams_as_one(
    streams: int, cpu_s: float, found: tuple[str, bool] | None
) -> None:
    four = {**EMULATED, "front_ends": 4, "n": streams, "tokens": 400_000, "cpu_s": cpu_s}
    goals = [each for each in report.goals([EMULATED, four]) if "front ends" in each.name]
    assert [(each.found, each.is_reached) for each in goals] == ([] if found is None else [found])


def test_one_server_alone_is_compared_with_nothing() -> None:
    found = report.summary(rows_of(STERNA, 1, request_us=1.0, token_us=1.0))
    assert "token_ratio" not in found


def test_stacks_belong_to_their_innermost_file_that_is_known() -> None:
    stacks = [
        "run (threading.py:9);send (sterna/frontend/router.py:1);send (zmq/sugar/socket.py:7) 3",
        "run (threading.py:9);update (vllm/v1/output.py:1);decode (msgspec.py:2) 6",
        "run (threading.py:9);Condition.wait (threading.py:3) 100",
        "native 1",
    ]
    assert report.shares(stacks) == {"vLLM": 0.6, "sockets": 0.3, "other": 0.1}
    assert report.shares([]) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_run_has_both_servers_and_emulated_instances() -> None:
    done = subprocess.run(
        [*COMMAND, "--quick", "--rounds", "1"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "front_end.json").read_text())["rows"]
    assert [each["side"] for each in rows] == [VLLM, STERNA, VLLM, STERNA, STERNA]
    assert all(each["failed"] == 0 and each["cpu_s"] > 0 for each in rows)
    assert all(0 < each["chunks"] <= each["tokens"] for each in rows)
    assert all(0 < each["most_open"] <= each["n"] for each in rows)
    assert rows[-1]["front_ends"] == 2
    for side in (STERNA, VLLM):
        log = (LOGS / "front_end" / f"{side}-1.log").read_text("utf-8", "replace")
        assert "POST /v1/completions" not in log
