"""Selections of tests by commands of the documentation, as pytest reads them."""

import re
import subprocess
import sys

import pytest

from tests.collected import ROOT, Selection, selection_of


def names(command: str) -> list[str]:
    """The functions that the command takes."""
    return [each.node_id.rpartition("::")[2] for each in selection_of(command).functions()]


def test_a_word_is_looked_for_in_the_names_of_tests_files_and_folders() -> None:
    (taken,) = names("pytest tests/supervisor/test_fleet.py -k NOT_called_off")
    assert "not_called_off" in taken
    assert names("pytest tests/runtime/supervisor/test_ray_errors.py") == names(
        "pytest tests/runtime -k Ray_Errors.py"
    )
    assert names("pytest tests/fault_simulation") == names(
        'pytest tests/fault_simulation -k "fault_simulation and not sterna"'
    )


def test_a_word_is_looked_for_in_the_ids_of_parameters() -> None:
    (taken,) = names("pytest -m slow tests/fault_simulation/test_planted.py -k unknown")
    assert taken == "test_every_planted_mistake_is_found"
    (taken,) = names('pytest -m slow tests/migration/test_model.py -k "break and has_no_lease"')
    assert taken == "test_a_rule_that_is_left_out_is_missed"


def test_state_machines_are_tests() -> None:
    assert names("pytest tests/supervisor/test_fleet_world.py -k UnderWeather") == ["runTest"]
    assert names("pytest tests/engine/emulated/test_conservation.py -k TwoEngines") == ["runTest"]


@pytest.mark.parametrize(
    "command",
    [
        "pytest tests/supervisor/test_fleet.py -k no_test_has_this_in_its_name",
        'pytest tests/supervisor/test_fleet.py -k "not_called_off and a_warm_instance"',
        # Slow: by itself, by its file in two ways, by its folder, by its class.
        "pytest tests/fault_simulation/test_planted.py -k unknown",
        "pytest tests/engine/test_vllm_scheduler.py -k kv_connector",
        "pytest tests/deploy/test_dashboard.py",
        "pytest tests/serve/api/test_answers.py",
        "pytest tests/engine/emulated/test_conservation.py -k AtLength",
        # Not slow.
        "pytest -m slow tests/supervisor/test_fleet.py",
        "make test-slow ARGS=tests/supervisor/test_fleet.py",
        # Neither: they take very long.
        "make test-slow ARGS=tests/serve/emulated/test_soak.py",
    ],
)
def test_nothing_is_taken(command: str) -> None:
    assert names(command) == []


def test_targets_are_commands_of_pytest() -> None:
    assert names("make sim-test") == names("pytest tests/fault_simulation")
    slow = "tests/serve/process/test_deaths.py -k of_every_kind"
    assert names(f'make test-slow ARGS="{slow}"') == names(f"pytest -m slow {slow}") != []
    fast = "tests/supervisor/test_lease.py -k acts"
    assert names(f'make test ARGS="{fast}"') == names(f"pytest {fast}") != []
    soak = "tests/serve/emulated/test_soak.py"
    assert names("make soak") == names(f"pytest -m soak {soak}") != []


def test_what_is_no_command_for_tests_is_refused() -> None:
    for command in (
        "make model-check",
        "make no-such-target",
        "python -m bench.simulation.sim_soak",
    ):
        with pytest.raises(ValueError):
            selection_of(command)
    with pytest.raises(FileNotFoundError):
        names("pytest tests/test_no_such_file.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("marks", ["", "not slow and not soak"])
def test_all_that_pytest_collects_is_read(marks: str) -> None:
    """Where all that tests need is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", marks],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if re.search(r"\d+ skipped", done.stdout):
        pytest.skip("something is not installed")
    collected = {
        line.partition("[")[0]
        for line in done.stdout.splitlines()
        if line.startswith("tests/") and "::" in line
    }
    assert {each.node_id for each in Selection(("tests",), "", marks).functions()} == collected
