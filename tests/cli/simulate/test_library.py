"""`sterna.simulate`: the command's options, and what it returns."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import sterna
from sterna.cli.simulate.library import KEYS
from sterna.errors import ConfigurationError
from sterna.policy.own import Policy

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"
SMALL: dict[str, Any] = {"trace": "M-M", "rate": 6.0, "requests": 60, "instances": 4}


class Fewest(Policy):
    base = "llumnix"

    def dispatch(self, request: Any, instances: Any) -> Any:
        return min(instances, key=lambda each: each.tie_break).instance_id


def test_runs_are_those_of_the_command() -> None:
    result = sterna.simulate("llumnix:migrates=false", **SMALL, seed=3)
    command = [
        *(str(Path(sys.executable).with_name("sterna")), "simulate", "--json", "--seed", "3"),
        *("--trace", "M-M", "--rate", "6", "--requests", "60", "--instances", "4"),
        *("--policy", "llumnix:migrates=false"),
    ]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (row,) = result.runs.to_dict("records")
    assert row["ttft_s.p99"] == shown["ttft_s"]["p99"]
    assert row["request_s.mean"] == shown["request_s"]["mean"]
    assert row["policy"] == "llumnix:migrates=false"


def leaves(value: Any, *keys: Any) -> Iterator[tuple[str, Any]]:
    """The known values, by their names."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, *keys, key)
    elif value is not None:
        yield ".".join(map(str, keys)), value


def test_a_run_has_the_columns_of_the_commands_json() -> None:
    """Those of goodput, and of each class, are among them; the settings are not."""
    result = sterna.simulate("llumnix", **SMALL, high_fraction=0.3)
    (row,) = result.runs.to_dict("records")
    command = [
        *(str(Path(sys.executable).with_name("sterna")), "simulate", "--json", "--policy"),
        *("llumnix", "--trace", "M-M", "--rate", "6", "--requests", "60", "--instances", "4"),
        *("--high-fraction", "0.3"),
    ]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    del shown["settings"]
    known = dict(leaves(shown))
    assert {"goodput.1.fraction", "classes.high.ttft_s.p99"} <= known.keys()
    assert {**row, "wall_s": None} == {**row, **known, "wall_s": None}
    assert all(np.isnan(row[name]) for name in row.keys() - known.keys())


def test_a_distribution_that_a_run_lacks_has_the_same_columns_without_values() -> None:
    """Nothing moves without moves, and one token has no time between tokens."""
    one_token = {**SMALL, "trace": "fixed:64-1"}
    runs = sterna.simulate("llumnix:migrates=false", **one_token).runs
    absent = ["migrations.downtime_s.p99", "tpot_s.mean", "prefix_reuse"]
    assert np.isnan(runs.groupby("policy")[absent].mean()).all(axis=None)
    assert not {"migrations.downtime_s", "tpot_s"} & set(runs.columns)


def test_the_papers_runs_have_its_policy() -> None:
    few = {"trace": "fixed:64-64", "rate": 2.0, "requests": 3}
    assert list(sterna.simulate(paper=True, **few).runs.policy) == ["llumnix"]


class MovesAny(Fewest):
    def victims(self, instance: Any) -> Any:
        return sorted(instance.running, key=lambda each: each.num_output_tokens)


class WantsHalves(Fewest):
    def num_instances(self, instances: Any, num_starting: Any, scaling: Any) -> Any:
        return 2.5


def test_what_a_server_would_not_carry_out_ends_the_simulation() -> None:
    """There the rules of the base would decide, so that another policy would serve."""
    crowded = SMALL | {"rate": 30.0, "requests": 300}
    with pytest.raises(ConfigurationError, match=r"victims: request \S+ cannot move: "):
        sterna.simulate(MovesAny, **crowded)
    with pytest.raises(ConfigurationError, match=r"must be an integer, not 2\.5"):
        sterna.simulate(WantsHalves, **SMALL, auto_scaling="1:6")


def test_there_is_a_row_for_each_request_of_each_run() -> None:
    result = sterna.simulate("llumnix", Fewest, **SMALL, seed=[1, 2])
    assert list(result.runs.policy) == ["llumnix", "llumnix", "Fewest", "Fewest"]
    requests = result.requests
    assert len(requests) == 4 * 60
    means = requests.groupby(["policy", "seed"]).ttft_s.mean()
    for run in result.runs.to_dict("records"):
        assert means[run["policy"], run["seed"]] == pytest.approx(run["ttft_s.mean"])
    assert (requests.request_s >= requests.ttft_s).all()
    assert np.isnan(requests.tpot_s).equals(requests.output_tokens <= 1)


def test_requests_join_the_runs_of_a_recorded_trace_which_has_no_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,64,8\n1,64,8\n")
    result = sterna.simulate("llumnix", Fewest, trace=str(trace), requests=2)
    assert result.runs.rate.isna().all()
    joined = result.runs.merge(result.requests, on=[*KEYS])
    assert list(joined.policy) == ["llumnix", "llumnix", "Fewest", "Fewest"]


def test_settings_are_a_mapping_and_hold_for_classes_too() -> None:
    slow = {"step_time.decode_s": 0.5}
    result = sterna.simulate("llumnix", Fewest, **SMALL)
    slower = sterna.simulate("llumnix", Fewest, **SMALL, set=slow)
    assert (slower.runs["tpot_s.mean"] > 5 * result.runs["tpot_s.mean"]).all()


class Unclassed(Fewest):
    base = "sterna"
    settings: ClassVar[dict[str, Any]] = {"has_priorities": False}


def test_a_class_has_the_engine_that_a_server_has_with_its_settings() -> None:
    """Without priorities vLLM preempts another request."""
    crowded = {"trace": "L-L", "rate": 2.0, "requests": 150, "instances": 2}
    crowded["profile"] = "rtx4090-llama-3.1-8b"
    few_blocks = {"engine.num_blocks": 700}
    by_its_settings = sterna.simulate(Unclassed, **crowded, set=few_blocks)
    last_admitted = {**few_blocks, "engine.preemption": "last-admitted"}
    expected = sterna.simulate(Unclassed, **crowded, set=last_admitted)
    assert expected.runs.preemptions.sum() > 0
    assert by_its_settings.requests.equals(expected.requests)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rte": 7},
            "rte is no option of sterna.simulate(*policies, **options); did you mean rate?",
        ),
        ({"rate": [1, 2]}, "argument --rate: invalid positive number value: '[1, 2]'"),
        ({"policy": "llumnix"}, "policy is no option of sterna.simulate(*policies, **options)"),
        ({"rate": "fast"}, "argument --rate: invalid positive number value"),
        ({"json": True}, "json is no option of sterna.simulate"),
        ({"set": {"policy.nothing": 1}}, "there is no setting"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        sterna.simulate(**options)


@pytest.mark.parametrize("policy", [Fewest(), Path, ["llumnix", "sterna"]])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    message = f"a class derived from sterna.policy.own.Policy, not {policy!r}"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        sterna.simulate(policy, **SMALL)


@pytest.mark.parametrize("seeds", [range(2), (0, 1), np.arange(2)])
def test_seeds_may_be_any_sequence(seeds: Any) -> None:
    assert list(sterna.simulate("llumnix", **SMALL, seed=seeds).runs.seed) == [0, 1]
    assert list(sterna.simulate("llumnix", **SMALL, seed="10").runs.seed) == [10], "no letters"


def test_a_class_runs_in_one_process() -> None:
    with pytest.raises(ConfigurationError, match="a policy that is a class runs in this process"):
        sterna.simulate(Fewest, **SMALL, processes=2)


def test_a_class_does_not_have_the_papers_rules() -> None:
    with pytest.raises(ConfigurationError, match="Fewest has rules of its own: leave paper out"):
        sterna.simulate(Fewest, paper=True, rate=1.0, requests=10)


def test_two_classes_of_one_name_are_refused() -> None:
    """As in a loop over a parameter: one would take the place of the other."""
    policies = [type("Mine", (Fewest,), {"limit": limit}) for limit in (1, 2)]
    with pytest.raises(ConfigurationError, match="two policies are called Mine: give each class"):
        sterna.simulate(*policies, **SMALL)


def test_the_pages_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, example = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "nearest_prefix.py").write_text(policy)
    monkeypatch.syspath_prepend(tmp_path)
    quick = example.replace("rate=8.0", "rate=8.0, requests=50").replace("[1, 2, 3]", "[1]")
    assert quick.count("requests=50") == 1
    exec(compile(quick, "page", "exec"), {})
