"""The benchmark of the simulator's speed: what it measures, and where that goes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulation import simulator
from bench.simulation.simulator import Case
from sterna.workload.catalog import build_trace


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A short case, and another one that is not to run."""
    case = Case("S-S", 20.0, rules="own", num_instances=4, num_requests=200)
    monkeypatch.setattr(simulator, "CASES", (case, Case("L-L", 1.0)))
    return case


@pytest.mark.slow
def test_a_run_is_measured_and_written_with_its_goal(tmp_path: Path, one_case: Case) -> None:
    arguments = ["--runs", "2", "--cases", "S-S", "--results", str(tmp_path)]
    assert simulator.main(arguments) == 0
    document = json.loads((tmp_path / "simulator.json").read_text())
    (row,) = document["rows"]
    assert row["case"] == one_case.name == "S-S 20/s on 4, own"
    assert (row["n"], row["goal_s"], row["num_requests"]) == (2, 5.0, 200)
    assert row["report"] == "live"
    assert row["steps"] > 200
    assert 0 < row["run_s"]["median"] <= row["run_s"]["p99"]
    assert row["peak_memory_bytes"] > 10_000_000
    # By the process that ran: its parent would take it, once it has ended, for somebody else.
    assert 0 <= row["foreign_cores"] <= document["hardware"]["num_cores"]
    assert "foreign_cores" not in document["config"]
    table = simulator.markdown(document)
    assert f"other programs kept up to {row['foreign_cores']:g} of" in table
    assert document["commit"] in table
    assert f"| {one_case.name} | 200 | {row['run_s']['median']:.2f} | 5 |" in table


def test_a_part_of_the_cases_does_not_replace_the_result_file(
    one_case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "_in_fresh_process", simulator._measure)
    monkeypatch.setattr(simulator.results_io, "write", lambda *_: pytest.fail("written"))
    assert simulator.main(["--runs", "1", "--cases", "S-S"]) == 0
    assert "nothing is written" in capsys.readouterr().out


def test_cases_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulator.main(["--cases", "X-X"])
    assert "no case has X-X in its name" in capsys.readouterr().err


def test_a_class_is_compared_with_the_rules_on_the_same_run() -> None:
    rows = [
        {
            "trace": "M-M",
            "rate": 7.5,
            "num_instances": 16,
            "rules": rules,
            "run_s": {"median": run_s},
        }
        for rules, run_s in (("paper", 9.0), ("own", 2.0), ("class", 7.0))
    ]
    assert simulator.own_rules_ratio(rows) == 3.5
    assert simulator.own_rules_ratio(rows[:2]) is None


def test_the_class_that_is_measured_decides_as_the_rules_do() -> None:
    """So that both runs have as much to simulate."""
    case = Case("M-M", 2.0, rules="class", num_instances=4, num_requests=300)
    runs = [
        simulator.simulate(build_trace(each.workload(300)), each.config())
        for each in (case, replace(case, rules="own"))
    ]
    means = [(records.first_token_s - records.arrival_s).mean() for records, _ in runs]
    assert means[0] == pytest.approx(means[1], rel=0.2)
