"""The files of --priority-classes and --api-keys, and what they change."""

import argparse
import json
from argparse import Namespace
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.cli.serve.priority_options import (
    read_api_keys,
    read_classes,
    settle_classes,
    with_classes,
    with_target_load,
)
from sterna.cli.simulate.simulate_command import configuration
from sterna.cli.simulate.simulate_options import add_simulate_options
from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.engine.emulated.profiles import A10_LLAMA_7B, PROFILES, profile
from sterna.engine.profiling.profile_file import document, write
from sterna.errors import ConfigurationError
from sterna.policy.own import Policy
from sterna.policy.presets import preset
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey, PriorityClasses
from tests.engine.profiling.test_profile_file import MEASUREMENT

CLASSES = """
- {name: gold, rank: 2, target_load: 900}
- {name: quick, rank: 1, execution_rank: 0}
- {name: normal, rank: 0}
- {name: batch, rank: -1}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path


def options(**changes: Any) -> Namespace:
    defaults = {
        "policy": "sterna",
        "scheduling_policy": None,
        "api_key": None,
    }
    return Namespace(**{**defaults, **changes})


def test_classes_are_read_from_yaml_and_from_json(tmp_path: Path) -> None:
    classes = read_classes(written(tmp_path, CLASSES))
    assert [
        (each.name, each.scheduling_priority, each.execution_priority, each.target_load_tokens)
        for each in classes.classes
    ] == [
        ("gold", 2, 2, 900),
        ("quick", 1, 0, None),
        ("normal", 0, 0, None),
        ("batch", -1, -1, None),
    ]
    rows = [{"name": "normal", "rank": 0}, {"name": "high", "rank": 1, "target_load": None}]
    assert read_classes(written(tmp_path, json.dumps(rows))).highest.name == "high"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: normal, rank: 0}\n- {name: a, rank: 0}", "have the same rank, 0"),
        ("- {name: normal, rank: 0, load: 5}", "unknown field `load`"),
        ("- {name: normal, rank: low}", "Expected `int`, got `str`"),
        ("- {name: normal}", "missing required field `rank`"),
        ("normal: 0", "Expected `array`"),
        ("- {name: normal", "is neither YAML nor JSON (line 1)"),
        ("", "Expected `array`, got `null`"),
    ],
)
def test_a_file_of_classes_that_cannot_work_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as refused:
        read_classes(path)
    assert str(refused.value).startswith(f"--priority-classes {path}")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        read_classes(tmp_path / "nothing.yaml")


def test_the_table_gives_the_policy_its_target_loads(tmp_path: Path) -> None:
    classes = read_classes(written(tmp_path, CLASSES + "- {name: high, rank: 3}"))
    policy = with_classes(preset("sterna"), classes)
    # A class that gives none has the policy's for high: 1,600 tokens (Section 6.4).
    assert dict(policy.target_load_tokens) == {2: 900, 3: 1600}
    assert with_classes(preset("sterna"), DEFAULT_CLASSES) == preset("sterna")


@pytest.mark.parametrize(
    ("target_load", "settings", "found"),
    [
        ({}, {}, {1: 1600}),
        ({}, {"target_load_tokens": {1: 800}}, {1: 800}),
        ({}, {"target_load_tokens": {}}, {}),
        ({"target_load": 700}, {"target_load_tokens": {1: 800}}, {1: 700}),
    ],
)
def test_a_custom_class_keeps_its_target_load_unless_the_option_gives_one(
    target_load: dict[str, int], settings: dict[str, Any], found: dict[int, int]
) -> None:
    own = type("Own", (Policy,), {"settings": settings})
    rules = with_classes(own().as_config(), DEFAULT_CLASSES)
    config = ClusterConfig(LlumletConfig(rules), TransportConfig(), FrontendConfig())
    emulated = SimpleNamespace(engine=A10_LLAMA_7B.engine)
    args = options(
        classes=DEFAULT_CLASSES, emulated=emulated, profile=A10_LLAMA_7B.name, **target_load
    )
    policy = with_target_load(config, args, None).llumlet.policy
    assert dict(policy.target_load_tokens) == found


def simulated(*options: str) -> dict[int, int]:
    """The target loads in `sterna simulate`."""
    parser = argparse.ArgumentParser()
    add_simulate_options(parser)
    args = parser.parse_args(["--policy", "sterna", *options])
    return dict(configuration(args, args.policy[0]).policy.target_load_tokens)


def served(profile_name: str) -> dict[int, int]:
    """The target loads in `sterna serve --engine emulated`."""
    emulated = SimpleNamespace(engine=profile(profile_name).engine)
    args = options(classes=DEFAULT_CLASSES, emulated=emulated, profile=profile_name)
    config = ClusterConfig(LlumletConfig(preset("sterna")), TransportConfig(), FrontendConfig())
    return dict(with_target_load(config, args, None).llumlet.policy.target_load_tokens)


def test_an_emulated_server_and_a_simulation_have_the_target_load_of_the_profile(
    tmp_path: Path,
) -> None:
    small = replace(A10_LLAMA_7B, engine=replace(A10_LLAMA_7B.engine, num_blocks=100))
    content = document(small, MEASUREMENT)
    measured, unmeasured = tmp_path / "measured.json", tmp_path / "unmeasured.json"
    write(measured, content)
    write(unmeasured, {name: each for name, each in content.items() if name != "measurement"})
    for name, tokens in (
        (str(measured), MEASUREMENT.target_load_tokens),
        (str(unmeasured), small.engine.total_tokens // 2),
        *((name, 1600) for name in PROFILES),
    ):
        assert simulated("--profile", name) == served(name) == {1: tokens}


def test_in_a_simulation_a_setting_or_a_class_goes_before_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write(path, document(A10_LLAMA_7B, MEASUREMENT))
    own = tmp_path / "own.py"
    own.write_text(
        "from sterna.policy.own import Policy\n"
        "class Own(Policy):\n    settings = {'target_load_tokens': {1: 700}}\n"
    )
    for given in (
        ("--set", "target_load_tokens=1:700"),
        ("--policy", "sterna:target_load_tokens=1:700"),
        ("--policy", f"{own}:Own"),
    ):
        assert simulated("--profile", str(path), *given) == {1: 700}


def test_the_papers_runs_have_its_target_load_whatever_the_memory() -> None:
    assert simulated("--paper", "--policy", "llumnix", "--set", "num_blocks=100") == {1: 1600}


@pytest.mark.parametrize(
    ("policy", "given", "chosen", "are_honoured"),
    [
        ("sterna", None, "priority", True),
        ("llumnix", None, "priority", True),
        ("llumnix-base", None, "fcfs", False),
        ("sterna", "fcfs", "fcfs", False),
        ("llumnix-base", "priority", "priority", False),
    ],
)
def test_vllm_schedules_by_priority_where_the_policy_has_priorities(
    policy: str, given: str | None, chosen: str, are_honoured: bool
) -> None:
    args = options(policy=policy, scheduling_policy=given)
    settle_classes(args)
    assert (args.scheduling_policy, args.classes.are_honoured) == (chosen, are_honoured)
    assert with_classes(preset(policy), args.classes).has_priorities is are_honoured


def keys_of(folder: Path, text: str, classes: PriorityClasses = DEFAULT_CLASSES) -> list[ApiKey]:
    return read_api_keys(written(folder, text), classes)


def test_keys_are_read_with_their_highest_classes(tmp_path: Path) -> None:
    digest = sha256(b"tern").digest()
    text = f"""
    - {{name: shop, key: sk-shop, highest_class: normal}}
    - {{name: ops, key_sha256: {digest.hex()}, admin: true}}
    """
    assert keys_of(tmp_path, text) == [
        ApiKey("shop", sha256(b"sk-shop").digest(), DEFAULT_CLASSES.normal),
        ApiKey("ops", digest, None, is_admin=True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the file has no key, so no client could be admitted"),
        ("- {name: a}", "a: give either key or key_sha256"),
        ("- {name: a, key: ''}", "a: give either key or key_sha256"),
        ("- {name: a, key: s3cret, key_sha256: s3cret}", "a: give either key or key_sha256"),
        ("- {name: a, key_sha256: s3cret}", "a: key_sha256 must be 64 hexadecimal digits"),
        ("- {name: a, key_sha256: abcd}", "a: key_sha256 must be 64 hexadecimal digits"),
        ("- {name: a, key: s3cret, highest_class: gold}", "there is no priority class gold"),
        ("- {name: a, key: s3cret}\n- {name: b, key: s3cret}", "a and b have the same key"),
        ("- {name: a, key: s3cret}\n- {name: a, key: k}", "there are two keys named a"),
        ("- {name: a, key: s3cret, class: high}", "unknown field `class`"),
        ("- {name: a, key: s3cret", "is neither YAML nor JSON (line 1)"),
        ("- {name: a, key: 5}", "Expected `str | null`, got `int`"),
    ],
)
def test_a_file_of_keys_that_cannot_work_is_refused_and_no_key_is_shown(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        keys_of(tmp_path, text)
    assert message in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_keys_of_the_option_and_of_the_file_are_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    path = written(tmp_path, "- {name: shop, key: sk-shop}")
    args = options(api_keys=str(path), api_key=["own"])
    settle_classes(args)
    assert [(key.name, key.is_admin) for key in args.api_key_table] == [
        ("--api-key", True),
        ("shop", False),
    ]
    args = options()
    settle_classes(args)
    (key,) = args.api_key_table
    assert key.digest == sha256(b"from the environment").digest()
