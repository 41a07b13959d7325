"""Options of `sterna serve` for priorities: what the files that they name change."""

import argparse
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.cli.serve.priority_options import (
    settle_classes,
    with_classes,
    with_target_load,
)
from sterna.cli.simulate.simulate_command import configuration
from sterna.cli.simulate.simulate_options import add_simulate_options
from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.engine.emulated.profiles import A10_LLAMA_7B, PROFILES, profile
from sterna.engine.profiling.profile_file import document, write
from sterna.policy.own import Policy
from sterna.policy.presets import preset
from sterna.priority_classes import DEFAULT_CLASSES
from sterna.priority_files import KeyFile, read_classes
from tests.engine.profiling.test_profile_file import MEASUREMENT
from tests.test_priority_files import CLASSES, written


def options(**changes: Any) -> Namespace:
    defaults = {
        "policy": "sterna",
        "scheduling_policy": None,
        "api_key": None,
    }
    return Namespace(**{**defaults, **changes})


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


def test_front_ends_find_the_file_of_keys_wherever_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link stays one, since Kubernetes has it lead to another file when a Secret changes."""
    written(tmp_path, "- {name: shop, key: sk-shop}")
    (tmp_path / "keys.yaml").symlink_to("file.yaml")
    monkeypatch.chdir(tmp_path)
    args = options(api_keys="keys.yaml")
    settle_classes(args)
    assert args.api_key_file.path == tmp_path / "keys.yaml"


def test_keys_from_a_pipe_are_read_once(tmp_path: Path) -> None:
    """As from `<(vault ...)`: front ends would wait for another writer, or find no such file."""
    path = tmp_path / "keys"
    os.mkfifo(path)
    args = options(api_keys=str(path))
    with ThreadPoolExecutor(1) as writer:
        writer.submit(path.write_text, "- {name: shop, key: sk-shop}")
        settle_classes(args)
    assert [each.name for each in args.api_key_table] == ["shop"]
    assert args.api_key_file is None


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
    assert args.api_key_file == KeyFile(path, args.classes, args.api_key_table[:1])
    args = options()
    settle_classes(args)
    assert args.api_key_file is None
    (key,) = args.api_key_table
    assert key.digest == sha256(b"from the environment").digest()
