"""The comparison of policies on paced engines: its cases, its tables, and a run of few requests."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from bench.common import results_io
from bench.common.results_io import ROOT, read
from bench.paced import report
from bench.paced.__main__ import main
from bench.paced.cases import CASES, POLICIES, Case
from bench.paced.plot import draw
from bench.paced.runs import PACED, SIMULATED, job_of, late_steps
from bench.serving.comparing import QUICK_FOLDER
from sterna.engine.emulated.config import Preemption
from sterna.engine.emulated.profiles import profile
from sterna.policy.presets import PRESETS
from sterna.workload.catalog import build_trace


@pytest.mark.parametrize("case", CASES.values(), ids=lambda each: each.name)
def test_server_and_simulation_have_the_hardware_of_the_case(case: Case, tmp_path: Path) -> None:
    path = case.write_hardware(tmp_path)
    assert profile(str(path)) == case.hardware()
    job = job_of(case, path, "round-robin", 3)
    assert job.config.engine == case.hardware().engine
    assert job.config.num_instances == case.instances
    assert case.hardware().step_time.decode_s == pytest.approx(
        profile(case.profile).step_time.decode_s / case.speed
    )
    trace = build_trace(job.workload)
    assert len(trace) == case.requests
    assert (trace.input_tokens + trace.output_tokens).max() <= case.max_total_tokens


def test_a_case_with_other_step_times_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["M-M, 4 instances"]
    before = case.description
    hardware = case.hardware()
    slower = replace(hardware.step_time, prefill_token_s=2 * hardware.step_time.prefill_token_s)
    monkeypatch.setattr(Case, "hardware", lambda _: replace(hardware, step_time=slower))
    assert case.description != before


def test_an_engine_serves_by_priority_where_the_policy_has_priorities(tmp_path: Path) -> None:
    case = CASES["M-M, 4 instances"]
    path = case.write_hardware(tmp_path)
    for policy in POLICIES:
        engine = job_of(case, path, policy, 1).config.engine
        is_urgent_last = engine.preemption is Preemption.LEAST_URGENT
        assert is_urgent_last == PRESETS[policy].has_priorities


def test_the_last_line_of_each_instance_counts() -> None:
    def line(name: str, num_steps: int, num_late: int, late_s: float) -> str:
        pace = f"paced steps={num_steps} seconds=1 late={num_late} late_seconds={late_s}"
        return f"(instance {name} pid=7) 12:00 INFO step_thread: {pace}"

    lines = [
        line("i0", 10, 1, 1),
        line("i1", 5, 0, 0),
        "(instance i0 pid=7) another line",
        line("i0", 30, 2, 1.5),
        line("i0", 99, 99, 99).partition(") ")[2],
    ]
    assert late_steps(lines) == (35, 2, 1.5)
    assert late_steps([]) == (0, 0, 0)


def row(policy: str, seed: int, kind: str, value: float, **more: Any) -> dict[str, Any]:
    metrics = dict.fromkeys(report.SHOWN, 1.0)
    return {
        "point": "a case",
        "policy": policy,
        "seed": seed,
        "kind": kind,
        **metrics,
        "request_mean_s": value,
        "machine": "a processor",
        "case": "hardware, requests",
        **more,
    }


ROWS = [
    *(row("sterna", 1, PACED, 1.0), row("sterna", 1, SIMULATED, 1.5)),
    *(row("llumnix", 1, PACED, 2.0), row("llumnix", 1, SIMULATED, 2.0)),
    *(row("sterna", 2, PACED, 2.0), row("llumnix", 2, PACED, 4.0)),
]


def test_a_prediction_is_judged_by_the_mean_over_the_rounds() -> None:
    """By hand: 1.5 of 1.5 seconds, and 2 of 3."""
    found = {each.name.partition("`")[2].partition("`")[0]: each for each in report.goals(ROWS)}
    assert (found["sterna"].found, found["sterna"].is_reached) == ("1.00", True)
    assert (found["llumnix"].found, found["llumnix"].is_reached) == ("0.67", False)


def test_the_page_has_both_numbers_and_the_factors() -> None:
    text = report.markdown(ROWS)
    assert "**a case** (hardware, requests), 2 rounds on a processor; " in text
    assert "| `sterna` |" in text
    assert "1.50<br>(1.50)" in text
    assert "2.00 [2.00, 2.00]" in text


def test_predictions_stand_beside_what_was_measured_round_by_round() -> None:
    """By hand: 1.5 and 2 times, the geometric mean of which is 1.73."""
    text = report.markdown([*ROWS, row("sterna", 2, SIMULATED, 4.0)])
    predicted = text[text.index("Predicted over measured") :]
    assert "| `sterna` | 1.00 [1.00, 1.00] | " in predicted
    assert "| 1.73 [0.70, 4.30] |" in predicted


def test_the_plot_has_a_row_of_panels_for_each_case(tmp_path: Path) -> None:
    path = tmp_path / "paced.png"
    draw(ROWS, path)
    one_case = pyplot.imread(path).shape
    draw([*ROWS, *({**each, "point": "another case"} for each in ROWS)], path)
    two_cases = pyplot.imread(path).shape
    assert two_cases[0] > 1.5 * one_case[0]
    assert two_cases[1] == one_case[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("change", "message", "options"),
    [
        (
            {"machine": "another one"},
            "are of another machine, or of other versions (another one;",
            (),
        ),
        (
            {"case": "another one"},
            "are of another definition of the case (another one; now a10-",
            (),
        ),
        ({"case": "another one"}, "are of another definition of the case", ("--predict",)),
    ],
)
def test_runs_of_a_case_are_continued_and_predicted_as_they_were_begun(
    change: dict[str, str], message: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    case = CASES["M-M, 4 instances"]
    begun = {"point": case.name, "machine": results_io.machine(), "case": case.description}
    results_io.write("paced", {}, [{**each, **begun, **change} for each in ROWS], tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.paced", case.name),
            *("--continue", *options, "--results", str(tmp_path)),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert message in done.stderr


def test_what_has_been_measured_is_predicted_anew(tmp_path: Path) -> None:
    case = "BurstGPT, 4 instances"
    whole = read("paced")
    of_run = {"point": case, "policy": "round-robin", "seed": 2}
    rows = [each for each in whole["rows"] if of_run.items() <= each.items()]
    (measured,) = (each for each in rows if each["kind"] == PACED)
    # As if it had been measured with the step times of today.
    measured["case"] = CASES[case].description
    outdated = {**measured, "kind": SIMULATED, "ttft_mean_s": 7.0}
    whole["rows"] = [measured, outdated]
    (tmp_path / "paced.json").write_text(json.dumps(whole))
    options = [case, "--continue", "--predict", "--results", str(tmp_path)]
    assert main(options) == 0
    again = {each["kind"]: each for each in read("paced", tmp_path)["rows"]}
    assert again[PACED] == measured
    assert again[SIMULATED].items() >= of_run.items()
    assert again[SIMULATED]["commit"]
    assert again[SIMULATED]["ttft_mean_s"] == pytest.approx(measured["ttft_mean_s"], rel=0.2)


def test_a_case_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.paced", "paprika"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "must be one of: M-M, 4 instances; " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_run_has_a_row_for_each_policy_and_its_prediction() -> None:
    command = [sys.executable, "-m", "bench.paced", "M-M, 4 instances", "--quick"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--policies", "sterna", "round-robin"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((QUICK_FOLDER / "paced.json").read_text())["rows"]
    assert (QUICK_FOLDER / "paced.png").is_file()
    assert {(each["policy"], each["kind"]) for each in rows} == {
        (policy, kind) for policy in ("sterna", "round-robin") for kind in (PACED, SIMULATED)
    }
    for each in rows:
        assert each["n"] > 0
        if each["kind"] == PACED:
            assert each["failed"] == 0
            assert each["steps"] > 0
            assert each["prefix_hits"] is not None
