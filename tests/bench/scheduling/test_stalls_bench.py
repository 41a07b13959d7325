"""Scheduling stalls: what instances log, the simulated clusters, the report, and a short run."""

import json
import subprocess
import sys
from statistics import median
from typing import Any

import pytest

from bench.common import results_io
from bench.common.results_io import ROOT
from bench.paper.figures.scheduling_costs import Costs
from bench.paper.figures.stress import WARM_UP_S
from bench.scheduling import report, stalls, stalls_report
from bench.serving.comparing import QUICK_FOLDER

COMMAND = [sys.executable, "-m", "bench.scheduling.stalls"]


def wall_clock(instances: int, seed: int, stall_ms: float) -> dict[str, Any]:
    return {
        **{"kind": stalls_report.WALL_CLOCK, "instances": instances, "seed": seed, "rate": 1.0},
        **{"step_mean_ms": 40.0, "tpot_mean_ms": 41.0, "stall_mean_ms": stall_ms, "failed": 0},
    }


def simulated(instances: int, rate: float, stall_ms: float) -> dict[str, Any]:
    return {
        **{"kind": stalls_report.SIMULATED, "instances": instances, "seed": 1, "rate": rate},
        **{"step_mean_ms": 40.0, "stall_mean_ms": stall_ms},
        **{"own_stall_mean_ms": 0.1, "dispatch_p99_ms": 0.3},
    }


ROWS = [
    *(wall_clock(4, seed, stall_ms) for seed, stall_ms in ((1, 0.3), (2, 0.5), (3, 0.4))),
    wall_clock(1, 1, 2.0),
    *(wall_clock(16, seed, stall_ms) for seed, stall_ms in ((1, 0.8), (2, 1.1), (3, 0.9))),
    *(simulated(64, 1.0, 0.3), simulated(64, 2.0, 0.9), simulated(1_024, 1.0, 1.1)),
]


def test_goals_are_those_of_all_numbers_of_instances_and_of_the_highest_rate() -> None:
    found = stalls_report.summary(ROWS)
    assert found["stall_ms"] == {1: 2.0, 4: 0.4, 16: 0.9}
    assert {each["name"]: each["is_reached"] for each in found["goals"]} == {
        "a step's stall, 1 instance on the wall clock": False,
        "a step's stall, 4 instances on the wall clock": True,
        "a step's stall, 16 instances on the wall clock": None,
        "a step's stall, 64 simulated instances": True,
        "a step's stall, 1,024 simulated instances": False,
    }
    text = stalls_report.markdown(ROWS)
    assert "| 4 | 1 | 40.0 | 41.0 | 0.400 [0.300, 0.500] | 0 |" in text
    assert "| 1,024 | 1 | 40.0 | 1.10 | 0.100 | 0.300 |" in text


def test_all_instances_count_from_their_first_line_to_their_last() -> None:
    """By hand: 8 steps of one instance and 20 of the other one."""
    log = (
        "stalls counted instance=i0 steps=2 seconds=0.1 following=1 stalled_seconds=0.001\n"
        "stalls counted instance=i0 steps=10 seconds=0.5 following=8 stalled_seconds=0.010\n"
        "(front end 0 pid=2) ready\n"
        "stalls counted instance=i1 steps=10 seconds=0.5 following=9 stalled_seconds=0.002\n"
        "stalls counted instance=i1 steps=30 seconds=2.0 following=28 stalled_seconds=0.007\n"
    )
    found = stalls.stalls_of(log)
    assert (found.num_instances, found.num_steps, found.num_followed) == (2, 28, 26)
    assert (found.steps_s, found.stalled_s) == pytest.approx((1.9, 0.014))
    assert stalls.stalls_of("").num_instances == 0


def test_only_the_queue_for_decisions_depends_on_the_number_of_instances() -> None:
    """Each schedules its own steps; the scheduler of all makes new requests wait."""
    costs = Costs(local_s=(0.001, 0.0), central_s=(0.001, 0.0), dispatch_s=1e-3, report_s=0.0)
    few, many = (
        stalls.simulated_row(num_instances, 1.0, costs, WARM_UP_S + 1.0)
        for num_instances in (16, 256)
    )
    assert few["stall_mean_ms"] == pytest.approx(1.0, abs=1e-3)
    assert many["stall_mean_ms"] == pytest.approx(1.0, abs=1e-3)
    assert many["dispatch_p99_ms"] > few["dispatch_p99_ms"] >= 1.0


def test_costs_are_those_of_the_committed_results() -> None:
    few, many = (stalls.measured_costs(each) for each in stalls.SIMULATED_INSTANCES)
    assert few.local_s == many.local_s
    assert 0.0 < few.dispatch_s < 0.01
    rows = [row for row in results_io.read("dispatch")["rows"] if row["policy"] == report.DEFAULT]
    rates = [row["decisions_per_s_per_core"] for row in rows if row["instances"] == 1_024]
    assert many.dispatch_s == pytest.approx(1 / median(rates))
    assert 0.0 < many.report_s < 0.001


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_counts_the_stalls_of_each_instance() -> None:
    done = subprocess.run(
        [*COMMAND, "--quick", "--rounds", "1", "--instances", "2"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "stalls.json").read_text())["rows"]
    first, *others = rows
    assert (first["kind"], first["instances"], first["failed"]) == ("wall clock", 2, 0)
    assert 0.0 < first["stall_mean_ms"] < first["step_mean_ms"]
    assert [(each["instances"], each["rate"]) for each in others] == [
        (instances, rate)
        for instances in stalls.SIMULATED_INSTANCES
        for rate in stalls.SIMULATED_RATES
    ]
