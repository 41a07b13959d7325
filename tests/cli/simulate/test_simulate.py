"""Output of `sterna simulate --json`, and the settings that its options reach."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.main import main
from sterna.cli.simulate.simulate_options import SETTINGS
from sterna.workload.catalog import Workload, build_trace
from tests.cli.simulate.simulations import HERE, PLAIN, SMALL, simulate

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


def documents(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """What is printed with `--json`."""
    assert simulate("--json", *options) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


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


@pytest.mark.parametrize(
    ("policy", "preemption"),
    [
        ("sterna", "least_urgent"),
        ("round-robin", "last_admitted"),
        ("sterna:has_priorities=false", "last_admitted"),
        ("round-robin:has_priorities=true", "least_urgent"),
    ],
)
def test_an_engine_of_vllm_1_schedules_as_it_is_served_under_the_policy(
    policy: str, preemption: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = ("--profile", "h100-llama-3.1-8b")
    document = documents(capsys, "--policy", policy, *profile)
    assert document["settings"]["engine"]["preemption"] == preemption


def test_a_rule_that_is_set_holds_under_any_policy(capsys: pytest.CaptureFixture[str]) -> None:
    rule = ("--set", "engine.preemption=last-admitted")
    document = documents(capsys, "--profile", "h100-llama-3.1-8b", *rule)
    assert document["settings"]["engine"]["preemption"] == "last_admitted"


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
    assert (option, key) in {(each.name, each.field) for each in SETTINGS.options}
    scaling = ("--auto-scaling", "1:2") if option.startswith("--scale") else ()
    found = documents(capsys, *scaling, option, value)["settings"]
    for part in key.split("."):
        found = found[part]
    assert str(found) in (value, value.replace("-", "_"), f"{value}.0")


def test_every_option_for_a_setting_is_tried_above() -> None:
    (mark,) = test_an_option_reaches_what_it_is_named_for.pytestmark  # type: ignore[attr-defined]
    assert [case[0] for case in mark.args[1]] == [each.name for each in SETTINGS.options]


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


def test_blocks_of_another_size_hold_and_copy_as_many_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As with `sterna serve --block-size`; what is given as well is as it is given."""
    policies = ("llumnix", "llumnix:block_size=20", "llumnix:block_size=20,num_blocks=700")
    policies += ("llumnix:block_size=20,block_s=0.5",)
    found = [each["settings"] for each in documents(capsys, "--policy", *policies)]
    num_blocks = [each["engine"]["num_blocks"] for each in found]
    assert num_blocks == [792, 792 * 16 // 20, 700, 792 * 16 // 20]
    block_s = [each["copy_time"]["block_s"] for each in found]
    scaled_s = pytest.approx(block_s[0] * 20 / 16)
    assert block_s[1:] == [scaled_s, scaled_s, 0.5]


def test_blocks_without_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--set", "block_size=0") == 1
    assert "block_size must be at least 1, not 0" in capsys.readouterr().err


def test_shorter_think_times_end_sessions_sooner(capsys: pytest.CaptureFixture[str]) -> None:
    ends_s = []
    for factor in ("1", "1000"):
        sessions = ("--trace", "agents", "--divide-lengths", "16", "--divide-think-times", factor)
        assert simulate("--json", *sessions) == 0
        ends_s.append(json.loads(capsys.readouterr().out)["simulated_s"])
    assert ends_s[1] < ends_s[0]


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


@pytest.mark.parametrize(
    ("options", "num_runs"), [((), 1), (("--rate", "2"), 3), (("--high-fraction", "0.5"), 3)]
)
def test_seeds_that_change_nothing_are_one_run_of_each_policy(
    options: Sequence[str], num_runs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a policy that takes instances as if they were drawn."""
    common = ("--trace", "azure-conv", "--requests", "5", "--instances", "3", *PLAIN, *HERE)
    policies = ("--policy", "power-of-two", "llumnix")
    assert main(["simulate", *common, *policies, "--json", "--seed", "1", "2", "3", *options]) == 0
    captured = capsys.readouterr()
    found = [(each["policy"], each["seed"]) for each in json.loads(captured.out)]
    seeds = (1, 2, 3)[:num_runs]
    assert found == [(policy, seed) for policy in ("power-of-two", "llumnix") for seed in seeds]
    told = (
        "sterna: nothing of this workload is drawn, so that its seed changes nothing: each policy "
        "runs once, and not 3 times\n"
    )
    assert captured.err == ("" if num_runs == 3 else told)


def test_a_policy_that_is_made_for_prefix_caches_runs_without_them_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server refuses it."""
    policies = ("--policy", "sterna", "llumnix", "dynamo", "sglang:dispatch=soonest")
    vllm_1 = ("--profile", "h100-llama-3.1-8b")
    assert simulate("--json", *policies, *vllm_1) == 0
    assert capsys.readouterr().err == (
        "sterna: dynamo looks at prefix caches, and its engines have none: set "
        "engine.prefix_caching=true, with a profile of vLLM 1\n"
    )
    assert simulate("--json", *policies, *vllm_1, "--set", "engine.prefix_caching=true") == 0
    assert capsys.readouterr().err == ""


def test_several_seeds_print_a_list_also_where_they_are_one_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ("--trace", "azure-conv", "--requests", "2", "--instances", "1", *PLAIN, *HERE)
    assert main(["simulate", *common, "--json", "--seed", "1", "2"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
