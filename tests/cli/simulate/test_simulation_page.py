"""docs/simulation.md says what is so: its commands run, and its tables are complete."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sterna.cli.main import main
from sterna.cli.simulate import simulate_command

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "simulation.md").read_text("utf-8")

COMMANDS = re.findall(r"^    sterna (simulate .*)$", PAGE, re.MULTILINE)

SMALL = ("--requests", "10", "--set", "is_fast=false", "--processes", "1")


def block(language: str) -> str:
    """The page's only block in that language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def names_in_table(after: str, before: str) -> set[str]:
    """What stands in the first column of the tables between the two headings."""
    section = PAGE.split(f"\n## {after}\n")[1].split(f"\n## {before}\n")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]*)`", cell)}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[pytest.mark.slow] if "--plot" in each or "--seed" in each else [])
        for each in COMMANDS
    ],
)
def test_the_commands_of_the_page_run(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("requests.csv").write_text(block("csv"))
    assert main([*shlex.split(command), *SMALL]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out
    for plot in re.findall(r"--plot (\S+)", command):
        assert Path(plot).stat().st_size > 0


def test_the_page_has_a_command_for_every_use() -> None:
    assert len(COMMANDS) >= 9
    for option in ("--policy", "--seed", "--plot", "--json", "--paper", "--auto-scaling", "--set"):
        assert any(option in command for command in COMMANDS), option


def test_the_tables_have_all_options_and_no_other() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    simulate_command.add_commands(commands)
    parser = commands.choices["simulate"]
    options = {option for action in parser._actions for option in action.option_strings}
    assert names_in_table("Options", "JSON") == options - {"-h", "--help"}


def test_the_table_has_all_fields_of_the_json_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--rate", "2", "--instances", "1", "--json", *SMALL]) == 0
    assert names_in_table("JSON", "From Python") == json.loads(capsys.readouterr().out).keys()


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text(block("python"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(policy, seed) for policy, seed, _ in lines] == [
        ("llumnix", "1"),
        ("llumnix", "2"),
        ("infaas++", "1"),
        ("infaas++", "2"),
    ]
    assert all(float(p99_s) > 0 for *_, p99_s in lines)
