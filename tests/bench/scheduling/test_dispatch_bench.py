"""The scheduler's costs: the report, the made-up cluster, and a run of few decisions."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.common.results_io import ROOT
from bench.scheduling import report
from bench.scheduling.core_costs import Timed, core_row, decided
from bench.scheduling.made_cluster import MadeCluster, report_interval_s, reports_a_decision
from bench.serving.comparing import QUICK_FOLDER
from sterna.messages.actors import (
    CacheReport,
    Dispatched,
    DispatchRequest,
    PrefixDone,
    WireMessage,
)
from sterna.messaging.send_effects import ToMailbox
from sterna.scheduler.core import SchedulerCore, SchedulerEffect
from sterna.types import InstanceId, unpacked

COMMAND = [sys.executable, "-m", "bench.scheduling"]


def row(
    policy: str, instances: int, seed: int, decisions: float, **values: float
) -> dict[str, Any]:
    ones = dict.fromkeys(report.SHOWN, 1.0)
    return {
        **{"policy": policy, "instances": instances, "seed": seed, **ones},
        **{"decisions_per_s_per_core": decisions, **values},
    }


ROWS = [
    *(row("sterna", 64, seed, rate) for seed, rate in ((1, 6_000.0), (2, 7_000.0), (3, 8_000.0))),
    *(
        row("sterna", 1_024, seed, rate, reports_cores=0.2, round_ms=round_ms, p99_ms=90.0)
        for seed, rate, round_ms in ((1, 4_500.0, 6.0), (2, 5_500.0, 4.0))
    ),
    row("round-robin", 64, 1, 20_000.0),
]


def test_medians_and_goals_are_those_of_the_default_policy() -> None:
    """By hand: 6,000 to 4,500 and 7,000 to 5,500 decisions are 1.33 and 1.27 times as long."""
    found = report.summary(ROWS)
    assert [each["instances"] for each in found["instances"]] == [64, 1_024]
    assert found["instances"][0]["decisions_per_s_per_core"] == 7_000.0
    assert {each["name"]: each["is_reached"] for each in found["goals"]} == {
        "decisions a second and core": None,
        "from 64 to 1,024 instances, a decision takes": False,
        "wait with 64 instances, median": False,
        "wait with 64 instances, P99": True,
        "reports of 1,024 instances": True,
        "a round of 1,024 instances": None,
    }
    assert found["goals"][0]["found"] == "5,000 [4,500, 5,500] with 1,024 instances"
    text = report.markdown(ROWS)
    assert "| sterna | 64 | 7,000 | 1.00 |" in text
    assert "| round-robin | 64 | 20,000 |" in text
    assert "| round-robin | 1,024 |" not in text


def test_asking_stands_beside_reports_where_it_was_measured() -> None:
    asked = row("sterna", 16, 1, 8_000.0, cache_report_us=40.0, asking_ms=0.5)
    assert "| 16 | 0.0400 |  | 0.500 |" in report.markdown([*ROWS, asked])
    text = report.markdown([*ROWS, {**asked, "reporting_ms": 0.2}])
    assert "| 16 | 0.0400 | 0.200 | 0.500 |" in text
    assert "asking" not in report.markdown(ROWS)


def test_a_sender_that_is_late_shows() -> None:
    late = row(
        "sterna", 16, 1, 8_000.0,
        reports_due_per_s=320.0, reports_per_s=320.0, asked_reports_per_s=240.0,
    )  # fmt: skip
    assert "| 16 | 320 | 100 | 75.0 |" in report.markdown([*ROWS, late])
    assert "not counted" in report.markdown(ROWS)


def test_a_computed_prompt_is_in_the_cache_that_is_reported() -> None:
    cluster = MadeCluster(3, seed=1)
    first, *_ = cluster.caches()
    request = cluster.request()
    computed = cluster.computed(first.instance_id, request)
    assert isinstance(computed, CacheReport)
    held, asked = set(unpacked(first.added)), set(unpacked(request.block_hashes))
    assert set(unpacked(computed.added)) == asked - held
    assert unpacked(cluster.computed(first.instance_id, request).added).tolist() == []


def test_every_decision_is_counted() -> None:
    found = core_row("sterna", 4, 150, seed=1)
    assert found["n"] == 150
    assert found["decision_p99_ms"] >= found["decision_median_ms"] > 0
    assert found["load_report_us"] > 0
    assert found["cache_report_us"] > 0
    assert found["round_ms"] > 0


@pytest.mark.parametrize(
    ("instances", "interval_s", "a_decision"),
    [(16, 0.05, 0.64), (64, 0.05, 2.56), (256, 0.1, 5.12), (1_024, 0.4, 5.12)],
)
def test_between_decisions_there_are_the_reports_of_that_time(
    instances: int, interval_s: float, a_decision: float
) -> None:
    """By hand, at 500 requests a second: 320 reports of 16 instances, and 2,560 of 1,024."""
    assert report_interval_s(instances) == pytest.approx(interval_s)
    assert reports_a_decision(instances) == pytest.approx(a_decision)


def test_a_row_says_how_many_reports_there_were_between_decisions() -> None:
    assert core_row("round-robin", 16, 10, seed=1)["reports_a_decision"] == 0.64


class WaitsForPrefix(SchedulerCore):
    """Sends no request on before its prefix is there."""

    def __init__(self) -> None:
        pass

    def on_message(self, message: WireMessage, now_s: float) -> list[SchedulerEffect]:
        if isinstance(message, PrefixDone):
            return [ToMailbox("f", Dispatched(message.request_id, InstanceId("i0"), 7))]
        return []


def test_the_decision_about_a_request_that_waits_has_the_time_of_both_messages() -> None:
    timed = Timed(WaitsForPrefix())
    dispatched, duration_s = decided(timed, MadeCluster(1, seed=1).request())
    assert dispatched.dispatch_number == 7
    (asked_s,), (done_s,) = timed.durations_s[DispatchRequest], timed.durations_s[PrefixDone]
    assert duration_s == asked_s + done_s


def test_each_instance_has_an_address_of_its_own() -> None:
    cluster = MadeCluster(2, seed=1, frontend="", instances=["a", "b"])
    membership = cluster.membership()
    assert [each.address for each in membership.instances] == ["a", "b"]
    assert membership.frontends == ()


def test_the_holder_of_a_prompt_has_a_part_of_it() -> None:
    cluster = MadeCluster(16, seed=1)
    assert len([*cluster.caches()]) == 16
    request = cluster.request()
    computed = cluster.computed(cluster.holder(request), request)
    assert {*unpacked(computed.added)} < {*unpacked(request.block_hashes)}


@pytest.mark.slow
def test_a_quick_run_has_a_row_for_each_policy() -> None:
    done = subprocess.run(
        [*COMMAND, "--quick", "--rounds", "1", "--instances", "4"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "dispatch.json").read_text())["rows"]
    assert [each["policy"] for each in rows] == ["sterna", "round-robin"]
    assert all(each["p99_ms"] >= each["p50_ms"] > 0 for each in rows)
    assert ["asking_ms" in each for each in rows] == [True, False]
    assert rows[0]["reporting_ms"] > 0
    # The run is short: some reports that are due arrive after its end.
    assert all(each["reports_due_per_s"] == 80.0 for each in rows)
    assert all(0 < each["reports_per_s"] < 160.0 for each in rows)
    assert all(0 < each["asked_reports_per_s"] < 160.0 for each in rows)
