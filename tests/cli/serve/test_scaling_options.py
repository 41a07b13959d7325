"""How many instances there are, as the command line says it."""

import argparse
from pathlib import Path

import pytest

from sterna.cli.options.option_tables import add_options
from sterna.cli.serve.scaling_options import (
    INSTANCES,
    SCALING,
    num_instances,
    scaling_config,
    wants_fork_server,
)
from sterna.config import ScalingConfig
from sterna.errors import ConfigurationError


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for table in (INSTANCES, SCALING):
        add_options(parser, table)
    return parser.parse_args(options)


def test_without_a_maximum_the_number_stays_as_it_is() -> None:
    args = parsed("--instances", "3")
    assert scaling_config(args) is None
    assert num_instances(args, None) == 3


def test_two_instances_are_the_default() -> None:
    assert num_instances(parsed(), None) == 2


def test_a_maximum_turns_auto_scaling_on_and_begins_with_the_minimum() -> None:
    args = parsed("--max-instances", "8", "--min-instances", "2")
    scaling = scaling_config(args)
    assert scaling == ScalingConfig(min_instances=2, max_instances=8, cooldown_s=30.0)
    assert num_instances(args, scaling) == 2
    assert num_instances(parsed("--instances", "5"), scaling) == 5


def test_every_option_of_auto_scaling_has_its_place() -> None:
    args = parsed(
        *("--max-instances", "8", "--scale-up-freeness", "100", "--scale-down-freeness", "900"),
        *("--scaling-period", "5", "--scaling-cooldown", "7"),
    )
    assert scaling_config(args) == ScalingConfig(
        min_instances=1,
        max_instances=8,
        low_freeness_steps=100.0,
        high_freeness_steps=900.0,
        period_s=5.0,
        cooldown_s=7.0,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--min-instances", "2"], "--min-instances is for auto-scaling: give --max-instances"),
        (["--scaling-period", "5"], "--scaling-period is for auto-scaling: give --max-instances"),
        (
            ["--min-instances", "4", "--max-instances", "2"],
            r"--max-instances must be at least --min-instances \(4\), not 2",
        ),
        (
            ["--max-instances", "2", "--scale-up-freeness", "900", "--scale-down-freeness", "100"],
            r"--scale-up-freeness must be below --scale-down-freeness \(100.0\), not 900.0",
        ),
        (["--max-instances", "2", "--min-instances", "0"], "--min-instances must be at least 1"),
        (["--max-instances", "2", "--scaling-period", "0"], "--scaling-period must be positive"),
    ],
)
def test_options_that_contradict_are_refused_by_their_names(options: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        scaling_config(parsed(*options))


@pytest.mark.parametrize(
    ("content", "typed", "expected"),
    [
        ("fork-server: true", [], True),
        ("no_fork_server: true", [], False),
        ("fork-server: false", [], False),
        ("fork_server: false", ["--fork-server"], True),
        ("fork-server: true", ["--no_fork_server"], False),
        ("no-fork-server: true", ["--fork-server"], True),
        ("fork-server: true", ["--no-fork-server"], False),
        ("port: 8001", ["--fork-server"], True),
    ],
)
@pytest.mark.parametrize("is_one_word", [True, False])
def test_the_fork_server_may_be_chosen_in_a_config_file(
    content: str, typed: list[str], expected: bool, is_one_word: bool, tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    config = [f"--config={path}"] if is_one_word else ["--config", str(path)]
    assert wants_fork_server([*config, *typed]) is expected
    assert wants_fork_server([*typed, *config]) is expected


def test_a_config_file_that_cannot_be_read_is_left_to_who_reads_the_options(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    assert wants_fork_server(["--config", str(path), "--fork-server"])
    path.write_text("[: not yaml")
    assert wants_fork_server(["--config", str(path), "--fork-server"])
    assert wants_fork_server(["--fork-server", "--config"])
