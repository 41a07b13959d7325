"""The benchmark of the KV data plane: raw wires, report, and a run of few tokens."""

import json
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common.results_io import ROOT
from bench.migration import data_plane_report as report
from bench.migration import raw_wires


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("num_bytes", [1, 100, 1_000, 5_003])
def test_a_raw_wire_brings_all_bytes(kind: str, num_bytes: int) -> None:
    """Chunks of 100 bytes: shared memory has room for four."""
    arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
    destination = raw_wires.Destination(kind, 6_000, 100, lambda: arrived.put(None))
    source = raw_wires.connect(destination.address, 6_000, 100)
    for _ in range(2):
        source.send(num_bytes)
        arrived.get(timeout=60)
        assert destination.buffer[:num_bytes].all()
        assert not destination.buffer[num_bytes:].any()
        destination.buffer[:] = 0
    source.close()
    destination.close()


ROWS = [
    {
        **{"operation": "transfer", "model": "m", "transport": "tcp", "tokens": tokens},
        **{"copy_bytes": 2**20, "wire_ms": {"median": 2.0}, "gb_per_s": 0.5},
        **{"arrived_ms": {"median": 2.5, "p99": 3.0}, "foreign_cores": 0.0},
        "wire_share": {"median": share, "low": 0.1, "high": 0.9},
    }
    for tokens, share in ((16, 0.2), (256, 0.85), (512, 0.7))
] + [
    {
        **{"operation": "gather", "model": "m", "tokens": 512, "copy_bytes": 2**21},
        **{"duration_ms": {"median": 1.0}, "gb_per_s": 2.0},
    },
]


@pytest.mark.parametrize(
    ("intervals", "is_reached"),
    [
        (((0.82, 0.9), (0.8, 0.81)), True),
        (((0.75, 0.9), (0.8, 0.81)), None),
        (((0.75, 0.9), (0.69, 0.79)), False),
    ],
)
def test_the_shares_of_all_long_transfers_decide_the_goal(
    intervals: tuple[tuple[float, float], ...], is_reached: bool | None
) -> None:
    shares = [{"median": (low + high) / 2, "low": low, "high": high} for low, high in intervals]
    rows = [{**ROWS[1], "wire_share": share} for share in shares]
    (goal,) = report.goals(rows)
    assert goal.is_reached is is_reached


def test_the_smallest_share_of_long_transfers_has_a_goal() -> None:
    found = report.summary(ROWS)
    assert found["m, tcp"] == 0.7
    (goal,) = found["goals"]
    assert (goal["found"], goal["is_reached"]) == ("0.70 [0.10, 0.90]", None)
    text = report.markdown(ROWS)
    assert "| m, tcp, 16 tokens | 1.00 | 2.00 | 2.50 | 3.00 | 0.500 | 0.20 [0.10, 0.90] |" in text
    assert "| m, gather | 2.00 | 1.00 | 2.00 |" in text


def test_the_longest_transfers_stand_beside_the_sum_of_their_parts() -> None:
    """1 ms to gather, 2 on the wire and 1.5 to scatter: the transfer takes 2.5."""
    scatter = {**ROWS[-1], "operation": "scatter", "duration_ms": {"median": 1.5}}
    assert "| m, tcp, 512 tokens | 4.50 | 2.50 | 0.56 |" in report.markdown([*ROWS, scatter])


def test_shares_are_those_of_pairs() -> None:
    assert report.wire_share([(2.0, 9.0, 1.0), (4.0, 9.0, 1.0), (8.0, 9.0, 8.0)]).median == 0.5


@pytest.mark.slow
def test_a_run_of_few_tokens_has_all_rows(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.migration.data_plane", "--models", "smollm2-135m"),
            *("--max-tokens", "512", "--results", str(tmp_path)),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "data_plane.json").read_text())["rows"]
    shares = [(row["transport"], row["tokens"]) for row in rows if "wire_share" in row]
    assert shares == [(each, n) for each in ("tcp", "shm") for n in (32, 64, 256, 512)]
    assert {row["operation"] for row in rows} == {"gather", "scatter", "transfer", "connect"}
