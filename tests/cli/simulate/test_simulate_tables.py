"""The tables, lists and plots of `sterna simulate`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sterna.cli.main import main
from sterna.cli.simulate import simulate_report
from sterna.cli.simulate.simulate_report import DESCRIPTIONS, cell, number
from sterna.engine.emulated.profiles import profile
from sterna.policy.presets import PRESETS, STERNA
from sterna.simulator.config import SimulationConfig
from sterna.simulator.runs import Job, run
from sterna.workload.catalog import Workload
from tests.cli.simulate.simulations import simulate

# -------------------------------------------------------------------------------------- tables


def test_one_run_prints_its_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--high-fraction", "0.1") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for words in ("S-S at 2/s, poisson; 20 requests; 2 instances; live reports; seed 51934",
                  "TTFT, s", "TPOT, ms", "P99.9", "high", "(2 requests)", "normal",
                  "completed 20 of 20 requests", "migrations: ", "fragmentation "):  # fmt: skip
        assert words in captured.out


def test_several_runs_print_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--policy", "llumnix", "round-robin", "--seed", "1", "2") == 0
    captured = capsys.readouterr().out
    assert "Means over 2 seeds" in captured
    assert "x: times llumnix's" in captured
    (line,) = [line for line in captured.splitlines() if "TTFT mean" in line]
    assert line.count("x") == 1, "the ratio of round robin's mean to llumnix's"


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("llumnix:interval=1", "20 requests; 2 instances; live reports; seed 51934"),
        ("llumnix:report=stale", "20 requests; 2 instances; seed 51934"),
        ("llumnix:num_instances=3", "20 requests; live reports; seed 51934"),
    ],
)
def test_the_headline_of_a_comparison_has_what_all_have_in_common(
    variant: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for policies in (("llumnix", variant), (variant, "llumnix")):
        assert simulate("--policy", *policies) == 0
        assert f"S-S at 2/s, poisson; {expected}\n" in capsys.readouterr().out


def test_ratios_are_to_the_chosen_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--policy", "llumnix", "round-robin", "--baseline", "round-robin") == 0
    captured = capsys.readouterr().out
    assert "x: times round-robin's" in captured
    assert "seeds," not in captured


@pytest.mark.parametrize(
    ("values", "baseline", "expected"),
    [
        ([2.0], None, "2"),
        ([2.0], [4.0], "2 [bold]0.5x[/bold]"),
        ([2.0, 6.0], [1.0, 3.0], "4 [bold]2x[/bold]\n[dim]2 to 6[/dim]"),
        ([2.0, 2.0], [0.0, 0.0], "2"),
        ([None, None], [1.0, 1.0], "–"),
        ([None, 3.0], [1.0, None], "3 [bold]3x[/bold]"),
    ],
)
def test_a_cell_has_mean_ratio_and_range(
    values: Sequence[float | None], baseline: Sequence[float | None] | None, expected: str
) -> None:
    assert cell(values, baseline) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.01234, "0.0123"), (99.44, "99.4"), (123.4, "123"), (12_345.6, "12,346")],
)
def test_a_number_has_the_digits_that_matter(value: float, expected: str) -> None:
    assert number(value) == expected


def test_the_list_has_everything_that_options_can_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    captured = capsys.readouterr().out
    for name in ("M-M", "azure-conv", "a10-llama-7b", *PRESETS, "policy.round_interval_s"):
        assert name in captured


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """The first two words of every line that `--list` prints."""
    assert main(["simulate", "--list", *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[0]: words[1] for words in lines if len(words) > 1}


def test_the_list_has_the_values_of_the_policy_that_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert listed(capsys)["policy.migrates"] == "true"
    assert listed(capsys, "--policy", "infaas++")["policy.migrates"] == "false"
    assert listed(capsys, "--policy", "llumnix:interval=7")["policy.round_interval_s"] == "7.0"
    paper = listed(capsys, "--paper")
    assert (paper["report"], paper["policy.victim"]) == ("stale", "last-started")
    assert listed(capsys, "--paper", "--policy", "infaas++")["policy.migrates"] == "false"


def test_a_new_preset_is_in_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = {"mine": replace(STERNA, name="mine")}
    monkeypatch.setattr(simulate_report, "PRESETS", {**PRESETS, **mine})
    assert main(["simulate", "--list"]) == 0
    assert "mine" in {line.strip() for line in capsys.readouterr().out.splitlines()}


# --------------------------------------------------------------------------------------- plots


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_plot_is_what_its_suffix_says(
    suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / f"plot.{suffix}"
    assert simulate("--policy", "llumnix", "round-robin", "--plot", str(path), "--json") == 0
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    content = path.read_bytes()
    assert content.startswith(begin)
    assert len(content) > 5_000
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_title_of_a_plot_has_what_all_runs_have_in_common() -> None:
    from sterna.cli.simulate.simulate_report import _title

    workload = Workload("S-S", 5, 2.0, seed=1)
    chosen = profile("a10-llama-7b")
    two = SimulationConfig(
        chosen.engine, chosen.step_time, chosen.copy_time, STERNA, num_instances=2, is_fast=False
    )
    runs = [run(Job(workload, each)) for each in (two, replace(two, num_instances=3))]
    common = "S-S at 2/s, poisson, 5 requests"
    assert _title(runs[:1]) == f"{common}, 2 instances (simulated; seed 1)"
    assert _title(runs) == f"{common} (simulated; seed 1)"


@pytest.mark.slow
def test_the_same_runs_draw_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.svg", "second.svg")]
    for path in paths:
        assert simulate("--plot", str(path), "--auto-scaling", "1:2") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.slow
def test_a_plot_that_cannot_be_written_loses_no_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "plot.svg"
    folder.mkdir()
    assert simulate("--json", "--plot", str(folder)) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["completed"] == 20
    assert captured.err == f"sterna: error: --plot {folder} cannot be written: Is a directory\n"


def test_every_policy_is_described() -> None:
    assert list(DESCRIPTIONS) == list(PRESETS)
