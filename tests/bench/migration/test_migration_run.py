"""`sterna bench migration` as a whole, on two real instances of the small model."""

import subprocess
import sys

import pytest

from bench.common import results_io
from bench.migration.__main__ import UNFINISHED
from bench.migration.samples import PHASES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


def test_a_short_run_has_all_parts_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sterna.cli.main", "bench", "migration", "--quick"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    rows = results_io.read("migration", UNFINISHED / "quick")["rows"]
    assert {(row["mode"], row["busy"]) for row in rows} == {
        (mode, busy) for mode in ("live", "stop_copy", "recompute") for busy in (False, True)
    }
    for row in rows:
        if row["mode"] == "live":
            assert row["stages"] == 2
            assert [len(row["phases_ms"][name]) for name in PHASES] == [5] * len(PHASES)

    cost = results_io.read("migration_cost", UNFINISHED / "quick")["rows"]
    assert [row["measure"] for row in cost] == [
        "copy",
        "throughput",
        "throughput",
        "throughput_ratio",
    ]
    assert min(row["tokens_per_s"]["median"] for row in cost[1:3]) > 0
