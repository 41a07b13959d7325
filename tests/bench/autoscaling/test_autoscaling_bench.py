"""`sterna bench autoscaling`: what its runs come to, and the whole of it on emulated instances."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.autoscaling.__main__ import main
from bench.autoscaling.report import SUMMARY, goals_of, markdown, plot, summary_of


def distribution(value: float) -> dict[str, float]:
    return dict.fromkeys(("mean", "p50", "p90", "p99", "p999", "max"), value)


def run(name: str = "sterna", **changes: Any) -> dict[str, Any]:
    timeline = {
        "time_s": [0.0, 1.0, 2.0],
        "running": [0, 9, 0],
        "queuing": [0, 3, 0],
        "freeness": [900.0, None, 900.0],
        "serving": [1, 3, 1],
        "instances": [1, 3, 1],
        "migrations": [0.0, 2.0, 4.0],
    }
    return {
        "run": name,
        "requests": 212,
        "failed": 0,
        "instances_min": 1,
        "instances_max": 3,
        "instance_seconds": 500.0,
        "ttft_s": distribution(0.5),
        "tpot_s": distribution(0.05),
        "request_s": distribution(5.0),
        "serving_first": 1,
        "serving_max": 3,
        "serving_last": 1,
        "migrations": 12,
        "preemptions": 0,
        "foreign_cores": 0.0,
        "fillings": [
            {"instance": "2", "ready_s": 31.0, "filled_s": 1.02, "migrations": 4},
            {"instance": "3", "ready_s": 60.0, "filled_s": None, "migrations": None},
        ],
        "timeline": timeline,
    } | changes


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-11-21T00:00:00+00:00",
        "commit": "abc",
        "hardware": {"cpu": "a processor", "num_cores": 2},
        "config": {
            "model": "terns",
            "min_instances": 1,
            "max_instances": 3,
            "warm_instances": 0,
            "arrivals": "step:1@60,9@60,1@60",
            "changes_s": [60.0, 120.0, 180.0],
        },
        "goals": [asdict(each) for each in goals_of(runs, 1, 3)],
        "runs": list(runs),
    }


OTHERS = (
    run("infaas++", ttft_s=distribution(0.9), migrations=0),
    run("fixed", instance_seconds=900.0, serving_first=3, serving_last=3),
)


def reached(**changes: Any) -> list[bool]:
    """No failure; instances up and down; cost."""
    return [each.is_reached for each in goals_of([run(**changes), *OTHERS], 1, 3)]


def test_all_goals_can_be_reached() -> None:
    assert reached() == [True, True, True]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"failed": 1}, 0),
        ({"serving_max": 2}, 1),
        ({"serving_last": 2}, 1),
        ({"serving_first": 3}, 1),
        ({"instance_seconds": 900.0}, 2),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_each_goal_is_missed_by_itself(changes: dict[str, Any], missed: int) -> None:
    assert [index for index, each in enumerate(reached(**changes)) if not each] == [missed]


def test_goals_are_judged_by_the_runs_that_are_there() -> None:
    assert len(goals_of([run()], 1, 3)) == 2


def test_the_summary_is_of_what_others_read() -> None:
    """Its names are stable."""
    assert tuple(summary_of(run())) == SUMMARY
    assert {"requests", "failed", "instances_min", "instances_max"} < set(SUMMARY)
    assert {"instance_seconds", "ttft_s", "tpot_s"} < set(SUMMARY)


def test_the_page_has_the_runs_side_by_side_and_says_what_was_not_reached() -> None:
    text = markdown(document(run(serving_max=2), *OTHERS))
    assert "| instance 2 of `sterna`, scaling | 31 | 1.0 | 4 |" in text
    assert "| instance 3 of `infaas++`, scaling without migration | 60 | never | unknown |" in text
    assert "| `sterna`, scaling | 212 | 0 | 1 → 2 → 1 | 500 | 0.50 | 0.50 | 50 | 50 |" in text
    assert "| `sterna`, fixed | 212 | 0 | 3 → 3 → 3 | 900 |" in text
    assert (
        "`sterna`: instances follow the load up and down: 1 → 2 → 1 (goal: 1 → 3 → 1): **not"
        in text
    )
    assert "56 % of those of 3 instances throughout (goal: less): reached" in text


@pytest.mark.slow
def test_the_time_line_is_drawn_from_the_results_of_the_scaling_run(tmp_path: Path) -> None:
    first, again, other = (tmp_path / f"{each}.svg" for each in range(3))
    found = document(run(), *OTHERS)
    plot(found, first)
    plot(json.loads(json.dumps(found)), again)
    found["runs"][0]["timeline"]["serving"] = [1, 2, 1]
    plot(found, other)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rates", "1", "2"), "--rates and --phases must be equally many, not 2 and 3"),
        (("--max-instances", "1"), "--max-instances 1 must be above --min-instances 1"),
        (("--serve", "'"), "--serve cannot be read as options"),
        (("--report",), "autoscaling.json yet: leave out --report"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_work_is_said_in_one_line(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*options, "--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_emulated_instances_come_and_go_and_no_stream_is_cut(tmp_path: Path) -> None:
    """Section 4.4: "When a new instance is launched, Llumnix's load balancing policy will
    automatically saturate it by migrating requests from other instances to it. When an instance is
    terminating [...] the remaining requests will be migrated to other instances"."""
    assert main(["--quick", "--runs", "sterna", "fixed", "--results", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "autoscaling.json").read_text())
    scaled, fixed = found["runs"]
    assert (scaled["errors"], fixed["errors"]) == ({}, {})
    assert found["summary"]["failed"] == 0
    assert (scaled["serving_first"], scaled["serving_last"]) == (1, 1)
    assert scaled["serving_max"] > 1
    assert scaled["migrations"] > 0
    assert found["summary"]["instances_min"] == 1
    assert (fixed["instances_min"], fixed["instances_max"]) == (3, 3)
    assert scaled["instance_seconds"] < fixed["instance_seconds"]
    assert (tmp_path / "autoscaling.svg").is_file()
    left = [e for e in psutil.Process().children(recursive=True) if "serve" in e.cmdline()]
    assert not left
