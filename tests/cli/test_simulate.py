"""`sterna simulate` as its users meet it: output, comparison, refusals.

Runs here are small and use the plain engines, which need no compiled code.
"""

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sterna.cli import simulate_report
from sterna.cli.main import main
from sterna.cli.simulate_options import SETTINGS
from sterna.cli.simulate_report import cell, number
from sterna.engine.emulated.profiles import profile
from sterna.policy.presets import PRESETS, STERNA
from sterna.simulator.config import SimulationConfig
from sterna.simulator.runs import Job, run
from sterna.workload.catalog import Workload, build_trace

PLAIN = ("--set", "is_fast=false")
SMALL = ("--trace", "S-S", "--rate", "2", "--requests", "20", "--instances", "2", *PLAIN)
HERE = ("--processes", "1")

DOCUMENTED = {
    "policy",
    "trace",
    "rate",
    "seed",
    "instances",
    "requests",
    "completed",
    "request_s",
    "ttft_s",
    "tpot_s",
    "preemption_loss_s",
    "preempted_fraction",
    "migrations",
    "fragmentation",
    "instances_avg",
    "simulated_s",
    "wall_s",
    "steps",
}


def simulate(*options: str) -> int:
    return main(["simulate", *SMALL, *HERE, *options])


def documents(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """What is printed with `--json`."""
    assert simulate("--json", *options) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def error_line(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that the command fails with."""
    assert simulate(*options) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sterna: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("sterna: error: ").rstrip()


# ---------------------------------------------------------------------------------------- json


def test_one_run_is_one_object_with_the_documented_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = documents(capsys)
    assert document.keys() >= DOCUMENTED
    assert (document["policy"], document["trace"], document["rate"]) == ("sterna", "S-S", 2.0)
    assert (document["seed"], document["instances"]) == (0xCADE, 2)
    assert document["requests"] == document["completed"] == 20
    for name in ("request_s", "ttft_s", "tpot_s", "preemption_loss_s"):
        assert list(document[name]) == ["mean", "p50", "p90", "p99", "p999", "max"]
        assert 0 <= document[name]["p50"] <= document[name]["p99"] <= document[name]["max"]
    assert document["migrations"].keys() >= {"started", "committed", "aborted"}
    assert document["fragmentation"].keys() == {"mean"}
    assert document["instances_avg"] == 2.0
    assert document["simulated_s"] > document["request_s"]["max"]
    assert document["steps"] > 0
    assert document["classes"] == {}


def test_several_runs_are_a_list_in_the_order_of_the_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = documents(capsys, "--policy", "round-robin", "llumnix", "--seed", "7", "0x3")
    assert [(each["policy"], each["seed"]) for each in found] == [
        ("round-robin", 7),
        ("round-robin", 3),
        ("llumnix", 7),
        ("llumnix", 3),
    ]


def test_the_same_options_give_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = documents(capsys), documents(capsys)
    for document in (first, second):
        del document["wall_s"]
    assert first == second


def test_another_seed_gives_other_requests_to_all_policies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = documents(capsys, "--policy", "llumnix", "infaas++", "--seed", "1", "2")
    ttft_s = {(each["policy"], each["seed"]): each["ttft_s"]["mean"] for each in found}
    assert ttft_s["llumnix", 1] != ttft_s["llumnix", 2]
    assert ttft_s["infaas++", 1] != ttft_s["infaas++", 2]


def test_classes_are_told_apart_where_there_are_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = documents(capsys, "--high-fraction", "0.1")
    assert list(document["classes"]) == ["high", "normal"]
    assert document["classes"]["high"]["requests"] == 2
    assert document["classes"]["normal"]["requests"] == 18
    assert document["requests"] == 20


def test_the_settings_of_a_run_are_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents(capsys, "--interval", "0.7", "--bandwidth", "1600")
    assert document["settings"]["policy"]["round_interval_s"] == 0.7
    assert document["settings"]["copy_time"]["block_s"] == 0.01, "16 tokens at 1,600 a second"
    assert document["settings"]["report"] == "live"


def test_the_papers_auto_scaling_is_that_of_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Section 6.5's figures, and the artifact's rules: docs/simulation.md promises both."""
    settings = documents(capsys, "--paper", "--auto-scaling", "1:3")["settings"]
    scaling = settings["scaling"]
    assert (scaling["is_sustained"], scaling["terminates_newest"]) == (False, True)
    assert (scaling["low_freeness_steps"], scaling["high_freeness_steps"]) == (160.0, 960.0)
    assert settings["scaling_begins_s"] == 100.0


def test_auto_scaling_changes_the_number_of_instances(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents(capsys, "--auto-scaling", "1:3", "--scale-period", "1")
    assert document["settings"]["scaling"]["max_instances"] == 3
    assert document["settings"]["scaling"]["period_s"] == 1.0
    assert 1.0 <= document["instances_avg"] < 2.0, "one instance is more than enough"


def test_the_papers_runs_have_its_rules_and_are_sampled_like_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The paper's own policy is what runs where none is named."""
    document = documents(capsys, "--paper")
    assert document["policy"] == "llumnix"
    assert document["settings"]["report"] == "stale"
    assert document["settings"]["policy"]["victim"] == "last_started"
    assert document["fragmentation"]["mean"] == 0.0
    assert documents(capsys, "--paper", "--report", "live")["settings"]["report"] == "live"


@pytest.mark.parametrize(
    ("option", "value", "key"), [
        ("--report", "stale", "report"),
        ("--queue-demand", "all", "policy.queue_demand"),
        ("--victim", "last-started", "policy.victim"),
        ("--source-threshold", "7", "policy.source_freeness_steps"),
        ("--destination-threshold", "77", "policy.destination_freeness_steps"),
        ("--interval", "0.7", "policy.round_interval_s"),
        ("--concurrency", "3", "policy.num_concurrent_migrations"),
        ("--watermark", "0.25", "engine.watermark"),
        ("--engine-mode", "chunked", "engine.step_mode"),
        ("--scale-low", "7", "scaling.low_freeness_steps"),
        ("--scale-high", "777", "scaling.high_freeness_steps"),
        ("--scale-period", "7", "scaling.period_s"),
        ("--scale-begin", "7", "scaling_begins_s"),
        ("--start-delay", "7", "start_delay_s"),
    ],
)  # fmt: skip
def test_an_option_reaches_what_it_is_named_for(
    option: str, value: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (option, key) in {(each[0], each[1]) for each in SETTINGS}
    scaling = ("--auto-scaling", "1:2") if option.startswith("--scale") else ()
    found = documents(capsys, *scaling, option, value)["settings"]
    for part in key.split("."):
        found = found[part]
    assert str(found) in (value, value.replace("-", "_"), f"{value}.0")


def test_every_option_for_a_setting_is_tried_above() -> None:
    (mark,) = test_an_option_reaches_what_it_is_named_for.pytestmark  # type: ignore[attr-defined]
    assert [case[0] for case in mark.args[1]] == [each[0] for each in SETTINGS]


def test_a_variant_of_a_policy_is_a_policy_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    variant = "llumnix:interval=0.7,victim=longest"
    plain, varied = documents(capsys, "--policy", "llumnix", variant)
    assert (plain["policy"], varied["policy"]) == ("llumnix", variant)
    assert plain["settings"]["policy"]["round_interval_s"] == 0.2
    assert varied["settings"]["policy"]["round_interval_s"] == 0.7
    assert varied["settings"]["policy"]["victim"] == "longest"


def test_a_bandwidth_may_stand_in_a_variant(capsys: pytest.CaptureFixture[str]) -> None:
    """It holds there whatever the option says, and for blocks of the variant's size."""
    policies = ("llumnix", "llumnix:bandwidth=800", "llumnix:bandwidth=800,block_size=8")
    policies += ("llumnix:copy_time.block_s=0.5",)
    found = documents(capsys, "--policy", *policies, "--bandwidth", "1600")
    assert [each["settings"]["copy_time"]["block_s"] for each in found] == [0.01, 0.02, 0.01, 0.5]


def test_too_long_requests_are_left_out_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "long.csv"
    with trace.open("w", newline="") as file:
        csv.writer(file).writerows(
            [("input_tokens", "output_tokens"), (100, 10), (20_000, 10), (50, 5)]
        )
    assert (
        main(["simulate", "--trace", str(trace), "--rate", "1", "--json", *HERE, *SMALL[-2:]]) == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ("sterna: requests of more than 12,560 tokens are left out (1 of 3)\n")
    assert json.loads(captured.out)["requests"] == 2
    common = ("--trace", str(trace), "--rate", "1", *HERE, *SMALL[-2:])
    assert main(["simulate", *common, "--json", "--requests", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "sterna: requests of more than 12,560 tokens are left out (1 of the first 3); the trace's "
        "next ones run instead\n"
    )
    assert json.loads(captured.out)["requests"] == 3
    assert main(["simulate", *common, "--max-total-tokens", "50"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "sterna: error: max_total_tokens 50 leaves no request: the shortest has 55 tokens "
        "(by default it is what one instance holds)\n"
    )


def test_too_long_requests_of_drawn_lengths_are_drawn_again_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate("--json", "--max-total-tokens", "200", "--seed", "1", "2") == 0
    captured = capsys.readouterr()
    for seed, line in zip((1, 2), captured.err.splitlines(), strict=True):
        whole = build_trace(Workload("S-S", 20, 2.0, seed=seed))
        num_too_long = (whole.input_tokens + whole.output_tokens > 200).sum()
        assert 0 < num_too_long < 20
        assert line == (
            "sterna: requests of more than 200 tokens are drawn again "
            f"({num_too_long} of 20, seed {seed})"
        )
    for document in json.loads(captured.out):
        assert (document["requests"], document["max_total_tokens"]) == (20, 200)
        assert document["request_s"]["max"] < 200 * 0.1, "short requests end soon"


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
    from sterna.cli.simulate_plot import _title

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


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "lumnix"), "not 'lumnix'; did you mean llumnix?"),
        (("--policy", "llumnix:victm=longest"), "no setting 'victm'; did you mean victim?"),
        (("--policy", "llumnix:longest"), "a setting must be key=value, not 'longest'"),
        (("--policy", "llumnix:bandwidth=0"), "bandwidth must be positive tokens a second"),
        (("--trace", "M-N"), "no trace is called 'M-N'"),
        (("--trace", "absent.csv"), "absent.csv"),
        (("--arrivals", "gama:2"), "arrivals must be poisson, gamma:CV"),
        (("--profile", "a100"), "profile must be one of a10-llama-7b"),
        (("--victim", "shortst"), "--victim must be shortest or longest or last-started"),
        (("--interval", "-1"), "round_interval_s must be positive, not -1.0"),
        (("--set", "round_intervl_s=1"), "did you mean round_interval_s?"),
        (("--set", "scaling_begins_s=inf"), "scaling_begins_s must be finite, not 'inf'"),
        (("--start-delay", "inf"), "--start-delay must be finite, not 'inf'"),
        (("--scale-low", "1"), "--scale-low needs auto-scaling"),
        (("--auto-scaling", "5:2"), "max_instances must be at least min_instances (5), not 2"),
        (
            ("--auto-scaling", "1:4", "--instances", "5"),
            "--instances must be within auto-scaling's bounds (1 to 4), not 5",
        ),
        (("--source-threshold", "100"), "source_freeness_steps must be at most"),
        (("--plot", "plot.jpg"), "--plot must end in .png, .svg, .pdf, not 'plot.jpg'"),
        (("--plot", "absent/plot.png"), "there is no folder absent"),
        (("--baseline", "infaas++"), "--baseline must be one of the policies that run (sterna)"),
        (("--paper", "--profile", "a10-llama-7b"), "leave --profile out"),
        (("--paper", "--policy", "sterna"), "infaas++, round-robin, not 'sterna'"),
        (("--max-total-tokens", "1"), "token"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_line(capsys, *options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "recorded"),
        (("--arrivals", "Recorded"), "recorded"),
        (("--rate", "2"), "poisson"),
        (("--rate", "2", "--arrivals", "Poisson"), "poisson"),
        (("--rate", "2", "--arrivals", "recorded"), "recorded"),
        (("--rate", "2", "--arrivals", "Gamma:4"), "gamma:4"),
    ],
)
def test_the_json_says_how_the_requests_came(
    options: Sequence[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--trace", "azure-conv", "--requests", "2", "--instances", "1", *PLAIN, *HERE)
    assert main(["simulate", *common, "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["arrivals"] == expected


def test_arrivals_that_are_named_are_not_replaced_by_those_of_the_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--trace", "azure-conv", "--arrivals", "poisson"]) == 1
    assert "azure-conv with poisson arrivals needs a rate" in capsys.readouterr().err


def test_a_rate_that_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "M-M"]) == 1
    assert "needs a rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "0"), "argument --rate: invalid positive number value: '0'"),
        (("--rate", "nan"), "argument --rate: invalid positive number value: 'nan'"),
        (("--requests", "0"), "argument --requests: invalid count (1 or more) value: '0'"),
        (("--instances", "few"), "argument --instances: invalid count (1 or more) value: 'few'"),
        (("--seed", "-1"), "argument --seed: "),
        (("--seed", "5000000000"), "argument --seed: invalid seed (0 to 2^32 - 1) value"),
        (("--high-fraction", "1.5"), "invalid fraction (0 to 1) value: '1.5'"),
        (("--auto-scaling", "4"), "argument --auto-scaling: invalid MIN:MAX value: '4'"),
        (("--polcy", "llumnix"), "unrecognized arguments: --polcy"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_as_by_any_command(
    options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate(*options)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


def test_a_plot_with_a_wrong_suffix_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else this would take minutes."""
    assert main(["simulate", "--rate", "100", "--requests", "9000000", "--plot", "x.bmp"]) == 1
    assert "--plot must end in" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ processes


HEAVY = ("numpy", "numba", "matplotlib", "rich", "ray", "vllm", "torch")


def imported_by(*arguments: str) -> set[str]:
    """The heavy libraries that the command imports."""
    script = (
        "import sys\nfrom sterna.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('\\n', *({HEAVY!r} & sys.modules.keys()))".replace(repr(HEAVY), repr(set(HEAVY)))
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_nothing_that_takes_time() -> None:
    assert imported_by("simulate", "--help") == set()


@pytest.mark.slow
def test_json_needs_neither_tables_nor_plots_nor_a_server() -> None:
    assert imported_by("simulate", *SMALL, "--json") == {"numpy"}


@pytest.mark.slow
def test_progress_goes_to_a_terminal_on_stderr_and_nowhere_else() -> None:
    """Standard output stays JSON, whatever stderr is."""
    command, terminal = started("--json", "--seed", "1", "2")
    shown = shown_until_end(terminal)
    output, _ = command.communicate()
    assert command.returncode == 0
    assert len(json.loads(output)) == 2
    assert b"simulating" in shown


@pytest.mark.slow
def test_the_progress_of_a_run_is_that_of_its_requests() -> None:
    command, terminal = started("--requests", "2000")
    shown = shown_until_end(terminal)
    command.communicate()
    assert command.returncode == 0
    assert {int(each) for each in re.findall(rb"(\d+)%", shown)} - {0, 100} != set()


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_all_its_processes_in_silence() -> None:
    command, terminal = started("--requests", "1000000", "--seed", "1", "2")
    shown = b""
    while b"simulating" not in shown:
        shown += os.read(terminal, 65536)
    os.killpg(command.pid, signal.SIGINT)
    shown = shown_until_end(terminal)
    output, _ = command.communicate()
    assert command.returncode == 130
    assert b"Traceback" not in shown
    assert output == ""
    # Nobody has the terminal open any more, so that whoever was started is gone or on its way.
    left = [each for each in psutil.process_iter() if _session(each.pid) == command.pid]
    assert psutil.wait_procs(left, timeout=EXIT_TIMEOUT_S)[1] == []


EXIT_TIMEOUT_S = 60.0


def started(*options: str) -> tuple["subprocess.Popen[str]", int]:
    """The command in a session of its own, and the terminal that its stderr is."""
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "sterna.cli.main", "simulate", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
        text=True,
    )
    os.close(theirs)
    return command, ours


def shown_until_end(terminal: int) -> bytes:
    """All that comes until nobody has the terminal open any more."""
    shown = b""
    with suppress(OSError):  # How a terminal without another end says that nothing more comes.
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    return shown


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
