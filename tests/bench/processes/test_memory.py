"""The memory of servers: its report, and a run of few streams."""

import datetime
import json
import subprocess
import sys
from typing import Any

import pytest

from bench.common import results_io
from bench.common.results_io import ROOT
from bench.plain_vllm.sides import STERNA, VLLM_LEAN
from bench.processes import memory_report as report
from bench.serving.comparing import QUICK_FOLDER

MIB = 2**20


def idle(side: str, replicas: int, **mib: int) -> dict[str, Any]:
    memory = {name.replace("_", " "): MIB * each for name, each in mib.items()}
    return {"seed": 1, "side": side, "replicas": replicas, "streams": 0, "memory_bytes": memory}


ROWS = [
    idle(VLLM_LEAN, 1, engines=1_000),
    idle(STERNA, 1, engines=1_100, scheduler=50),
    idle(VLLM_LEAN, 2, engines=2_000),
    idle(STERNA, 2, engines=2_130, scheduler=50),
    {
        **idle(STERNA, report.EMULATED, scheduler=60, engines=140),
        **{
            "streams": 100,
            "failed": 0,
            "before_bytes": {"scheduler": 50 * MIB, "engines": 50 * MIB},
        },
    },
]


@pytest.mark.parametrize(
    ("command_line", "kind"),
    [
        ("ray::_FrontendActor.run", "HTTP server"),
        ("ray::_InstanceActor.run", "engines"),
        ("VLLM::Worker", "engines"),
        ("ray::DashboardAgent", "Ray"),
        ("python -m bench.plain_vllm.vllm_command serve model", "HTTP server"),
        ("python sterna serve model", "the command"),
        ("cat", report.OTHERS),
    ],
)
def test_a_process_is_of_a_kind(command_line: str, kind: str) -> None:
    assert report.kind_of(command_line) == kind


def test_what_sterna_adds_to_a_server_an_instance_and_a_stream() -> None:
    """By hand: 150 MiB with one replica and 180 with two; 100 MiB for 100 streams."""
    assert report.summary(ROWS) == {
        "server_mib": 150.0,
        "further_instance_mib": 30.0,
        "stream_kib": {"100": 1024.0},
    }
    text = report.markdown(ROWS)
    assert f"| 1 | {VLLM_LEAN} | 0.00 | 1,000 |" in text
    assert "| 100 |  | 1,024 | 0.00 |" in text
    counted = [{**row, "most_open": 90} for row in ROWS]
    assert "| 100 | 90.0 | 1,024 | 0.00 |" in report.markdown(counted)


def test_the_page_says_how_much_processes_grew_in_half_an_hour() -> None:
    document = results_io.read("soak")
    found, date = document["summary"], datetime.date.fromisoformat(document["date"][:10])
    assert found["seconds"] == 1_800
    page = " ".join((ROOT / "docs" / "performance.md").read_text("utf-8").split())
    assert (
        f"Of {found['requests']:,} requests no process of Sterna's grew by more than "
        f"{found['max_growth_mib']} MiB, from the second quarter of the time to the last (on an "
        f"{document['hardware']['cpu']}, {date.day} {date:%B %Y}: "
    ) in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_finds_every_kind_of_process() -> None:
    command = [sys.executable, "-m", "bench.processes.memory", "--quick", "--rounds", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "memory.json").read_text())["rows"]
    of_sterna = next(row["memory_bytes"] for row in rows if row["side"] == STERNA)
    assert {kind for kind, _ in report.KINDS} <= of_sterna.keys()
    assert all(num_bytes > MIB for num_bytes in of_sterna.values())
    of_vllm = next(row["memory_bytes"] for row in rows if row["side"] == VLLM_LEAN)
    assert of_vllm["engines"] > of_vllm["HTTP server"] > 0
