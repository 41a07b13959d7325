"""Results that are there already when a benchmark runs again."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.common import results_io
from bench.common.tables import Row
from bench.serving.comparing import add_round_options, rows_in_rounds
from sterna.errors import ConfigurationError

NAME = "terns"


def run(folder: Path, *arguments: str) -> None:
    """A benchmark whose every run adds a row."""

    def measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
        rows.append({"round": len(rows) + 1})
        results_io.write(NAME, {}, rows, folder)

    def report(rows: Sequence[Row]) -> str:
        return f"{len(rows)} rows"

    parser = argparse.ArgumentParser()
    add_round_options(parser, quick="as a check")
    rows_in_rounds(NAME, parser.parse_args(["--results", str(folder), *arguments]), measure, report)


def rows(folder: Path) -> list[Mapping[str, Any]]:
    return results_io.read(NAME, folder)["rows"]


def test_rows_are_kept_with_continue_alone(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, "--continue")
    assert rows(tmp_path) == [{"round": 1}, {"round": 2}]
    run(tmp_path)
    assert rows(tmp_path) == [{"round": 1}]


@pytest.mark.parametrize("option", ["--continue", "--report"])
def test_without_results_there_is_nothing_to_go_on_with(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no .*terns\.json yet"):
        run(tmp_path, option)


def test_results_of_another_machine_are_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = results_io.hardware()
    run(tmp_path)
    more = {**here, "memory_bytes": here["memory_bytes"] + 4096}
    monkeypatch.setattr(results_io, "hardware", lambda: more)
    run(tmp_path, "--continue")
    monkeypatch.setattr(results_io, "hardware", lambda: {**more, "cpu": "a Kittiwake"})
    with pytest.raises(ConfigurationError, match=r"of another.* \(cpu .*, now a Kittiwake\)"):
        run(tmp_path, "--continue")
    run(tmp_path, "--report")
    assert capsys.readouterr().out.splitlines()[-1] == "2 rows"
