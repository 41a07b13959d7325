"""`sterna bench priorities`: what its runs come to, and the whole of it on emulated instances."""

import json
from math import exp
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.common import results_io
from bench.common.pace import Pace
from bench.priorities.__main__ import Benchmark, main, scarcity
from bench.priorities.plan import make_parser, plan_of
from bench.priorities.report import (
    CLASSES,
    METRICS,
    compared,
    goals_of,
    interval_95,
    markdown,
    plot,
    summary_of,
)
from bench.serving.loads import bursty_trace
from sterna.workload.trace import Trace


def cells(high: float, normal: float) -> dict[str, dict[str, dict[str, float]]]:
    """Every number of a class is the same."""
    return {
        name: {metric: {"n": 9, "median": value, "p99": value, "mean": value} for metric in METRICS}
        for name, value in (("high", high), ("normal", normal))
    }


def document(*pairs: tuple[float, float]) -> dict[str, Any]:
    """A result of pairs of runs: what high and normal requests took with priorities, where all
    took 1 s without."""
    runs: list[dict[str, Any]] = []
    for pair, (high, normal) in enumerate(pairs, start=1):
        for side, of_side in (("on", cells(high, normal)), ("off", cells(1.0, 1.0))):
            common = {"failed": 0, "foreign_cores": 0.04, "is_steady": True}
            runs.append({"pair": pair, "priorities": side, "classes": of_side, **common})
    summary = summary_of(runs)
    return {
        "date": "2026-11-21T00:00:00+00:00",
        "commit": "abc",
        "hardware": {"cpu": "a processor", "num_cores": 2},
        "config": {
            "model": "terns",
            "instances": 2,
            "requests": 60,
            "rate": 0.5,
            "cv": 4.0,
            "high_fraction": 0.1,
            "target_load": {"tokens": 1600, "from": "--target-load"},
        },
        "summary": summary,
        "goals": [
            {"name": g.name, "found": g.found, "bound": g.bound, "is_reached": g.is_reached}
            for g in goals_of(summary)
        ],
        "runs": runs,
    }


def reached(*pairs: tuple[float, float]) -> list[bool]:
    """High's mean and P99 TTFT, mean and P99 TPOT; normal's mean latency."""
    return [goal["is_reached"] for goal in document(*pairs)["goals"]]


def test_the_interval_of_the_mean_is_students() -> None:
    """By hand: logarithms of -0.2, -0.1 and 0 have a mean of -0.1 and a standard deviation of 0.1;
    4.303 times that over the square root of 3 is 0.2484."""
    found = interval_95([exp(-0.2), exp(-0.1), 1.0])
    assert found == pytest.approx((exp(-0.3484), exp(0.1484)), rel=1e-4)
    assert interval_95([0.5]) is None
    narrow, wide = interval_95([0.5, 0.6] * 5), interval_95([0.5, 0.6])
    assert narrow is not None
    assert wide is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_a_gain_beyond_the_scatter_of_the_pairs_is_a_gain() -> None:
    assert reached((0.5, 1.0), (0.6, 1.0), (0.7, 1.0)) == [True] * 5


def test_a_gain_within_the_scatter_of_the_pairs_is_noise() -> None:
    assert reached((0.5, 1.0), (0.8, 1.0), (0.9, 1.0)) == [False] * 4 + [True]


def test_of_one_pair_nobody_knows_the_noise() -> None:
    assert reached((0.5, 1.0)) == [False] * 4 + [True]


def test_normal_requests_may_take_a_twentieth_longer() -> None:
    assert reached((0.5, 1.05), (0.5, 1.05))[-1] is True
    assert reached((0.5, 1.06), (0.5, 1.06))[-1] is False


def test_the_summary_has_both_sides_and_the_ratio_of_every_pair() -> None:
    high = document((0.5, 1.0), (0.6, 1.1))["summary"]["high"]
    assert (high["on"]["ttft_s"]["p99"], high["off"]["ttft_s"]["p99"]) == (0.55, 1.0)
    ratio = high["ratio"]["tpot_s"]["mean"]
    assert ratio["pairs"] == [0.5, 0.6]
    assert ratio["mean"] == 0.5477
    assert ratio["interval"] == pytest.approx(interval_95([0.5, 0.6]), abs=1e-4)


def test_the_page_says_what_was_not_reached() -> None:
    text = markdown(document((0.5, 1.2), (0.51, 1.2)))
    assert "| high | P99 TPOT, ms | 1,000 | 505 | 0.51 | 0.45 to 0.57 | 2 of 2 pairs |" in text
    assert text.count(": reached") == 4
    assert text.count("**not reached**") == 1


@pytest.mark.slow
def test_the_plot_is_the_same_whenever_it_is_drawn(tmp_path: Path) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        plot(document((0.5, 1.2), (0.6, 1.2)), path)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 1000


def test_pairs_in_which_the_machine_changed_its_speed_do_not_count() -> None:
    found = document((0.5, 1.0), (0.6, 1.0), (3.0, 1.0))
    runs = found["runs"]
    assert compared(runs) == runs
    assert "did not keep its speed" not in markdown(found)
    for run in runs[-2:]:
        run["is_steady"] = False
    assert compared(runs) == runs[:4]
    assert "3 pairs of runs of the same requests" in markdown(found)
    assert "2 count: in the others the machine did not keep its speed." in markdown(found)


def test_where_the_machine_was_never_steady_all_pairs_count() -> None:
    runs = document((0.5, 1.0), (0.6, 1.0))["runs"]
    for run in runs[:2]:
        run["is_steady"] = False
    assert compared(runs) == runs


def test_runs_with_few_high_requests_are_said_to_say_little() -> None:
    def trace(rate: float) -> Trace:
        return bursty_trace(rate, 90.0, cv=2.5, high_fraction=0.1, seed=1)

    assert scarcity([trace(1.0), trace(2.0)]) is None
    assert scarcity([trace(1.0), trace(0.2)]) == (
        "only 2 high requests in a run, too few for their P99: raise --seconds"
    )


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ((), [("on", 1, True), ("off", 1, True)]),
        # As the first run ends, it has grown slower.
        ((100, 50), [("on", 2, True), ("off", 2, True)]),
        # As the second run of each attempt ends.
        ((100, 100, 50) * 3, [("on", 3, False), ("off", 3, False)]),
    ],
)
def test_a_pair_is_measured_again_when_the_machine_grew_slower(
    speeds: tuple[float, ...],
    kept: list[tuple[str, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = list(speeds)

    def measure(_: Any, server: str, pair: int, side: str, trace: Any, attempt: int) -> Any:
        assert (server, pair) == (f"server {side}", 1)
        return {"priorities": side, "attempt": attempt}

    monkeypatch.setattr(Benchmark, "_measure", measure)
    benchmark = Benchmark(plan_of(make_parser().parse_args([])))
    benchmark.pace = Pace(
        100.0, lambda _: None, speed=lambda: left.pop(0) if left else 100.0, wait=lambda _: None
    )
    benchmark.measure_pair({"on": "server on", "off": "server off"}, 1, None)
    found = [(run["priorities"], run["attempt"], run["is_steady"]) for run in benchmark.runs]
    assert found == kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--high-fraction", "1"), "--high-fraction must be above 0 and below 1, not 1"),
        (("--serve", "'"), "--serve cannot be read as options"),
        (
            ("--rate", "0.01", "--seconds", "1"),
            "none of 2 requests of seed 1 is high: raise",
        ),
        (("--report",), "priorities.json yet: leave out --report"),
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


def test_pairs_of_several_commits_are_said_to_be() -> None:
    found = document((0.5, 1.0), (0.5, 1.0))
    assert "at commit abc:" in markdown(found)
    for run, commit in zip(found["runs"], ("tern", "tern", "gull", "gull"), strict=True):
        run["commit"] = commit
    assert "at commit tern, gull:" in markdown(found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "has no results that could be continued: leave out --continue"),
        ({"seconds": 10.0}, "measured with another seconds: give the same options"),
        ({"seeds": [7, 8]}, "measured with another seed: give the same options"),
        ({"cpu": "an abacus"}, "of another machine"),
    ],
    ids=["none", "other_seconds", "other_seed", "other_machine"],
)
def test_only_results_of_the_same_options_are_continued(
    settings: dict[str, Any] | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if settings is not None:
        hardware = results_io.hardware()
        hardware["cpu"] = settings.pop("cpu", hardware["cpu"])
        config = {
            "serve": [],
            "policies": {"on": "llumnix", "off": "llumnix-base"},
            "instances": 2,
            "seconds": 60.0,
            "arrivals": "gamma:4",
            "cv": 4.0,
            "input_tokens": [32, 256],
            "output_tokens": [32, 128],
            "high_fraction": 0.1,
            "seeds": [1, 2],
            **settings,
        }
        results = {"config": config, "hardware": hardware, "runs": []}
        (tmp_path / "priorities.json").write_text(json.dumps(results))
    assert main(["--continue", "--results", str(tmp_path)]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_pair_is_measured_on_emulated_instances(tmp_path: Path) -> None:
    assert main(["--quick", "--results", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "priorities.json").read_text())
    assert (tmp_path / "priorities.svg").is_file()
    assert [run["priorities"] for run in found["runs"]] == ["on", "off"]
    assert [run["failed"] for run in found["runs"]] == [0, 0]
    assert found["config"]["target_load"]["tokens"] == 1600
    assert {(row["class"], row["metric"]) for row in found["rows"]} == {
        (name, metric) for name in CLASSES for metric in METRICS
    }
    counts = {(row["class"], row["n"]) for row in found["rows"]}
    assert counts == {("high", 6), ("normal", 54)}
    assert all(0.0 < row["mean"] <= row["p99"] * 2 for row in found["rows"])
    assert not _left_behind()
    # All that was to be measured is there.
    assert main(["--quick", "--continue", "--results", str(tmp_path)]) == 0
    counted_again = json.loads((tmp_path / "priorities.json").read_text())
    assert {**counted_again, "date": found["date"]} == found


def _left_behind() -> list[Any]:
    """Servers that this process has started and that still run."""
    return [each for each in psutil.Process().children(recursive=True) if "serve" in each.cmdline()]
