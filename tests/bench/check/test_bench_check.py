"""The check of ratios against committed results."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.check import __main__ as program
from bench.check.values import CHECKS, Check, Value, Verdict, table
from bench.common import results_io

BETTER, SMALLER = Value("gain", lambda rows: None, True), Value("cost", lambda rows: None, False)


@pytest.mark.parametrize(
    ("value", "committed", "measured", "loss", "is_lost"),
    [
        (BETTER, 1.0, 0.9, 1 / 0.9, False),
        (BETTER, 1.0, 0.8, 1.25, True),
        (BETTER, 1.0, 2.0, 0.5, False),
        (SMALLER, 2.0, 2.3, 1.15, False),
        (SMALLER, 2.0, 2.5, 1.25, True),
        (BETTER, None, 1.0, None, True),
        (BETTER, 1.0, None, None, True),
    ],
)
def test_a_ratio_is_lost_if_it_is_a_fifth_worse_or_missing(
    value: Value, committed: float | None, measured: float | None, loss: float | None, is_lost: bool
) -> None:
    verdict = Verdict(value, committed, measured)
    assert verdict.loss == (None if loss is None else pytest.approx(loss))
    assert verdict.is_lost == is_lost


def test_the_table_says_what_is_lost() -> None:
    lines = table([Verdict(BETTER, 1.0, 0.5), Verdict(SMALLER, 1.0, 0.5), Verdict(BETTER, None, 1)])
    assert "| gain | 1 | 0.5 | **2.00 times as bad** |" in lines
    assert "| cost | 1 | 0.5 | as good |" in lines
    assert "| gain |  | 1 | **nothing committed** |" in lines


@pytest.mark.parametrize(("measured", "is_lost"), [(0.1, False), (None, True)])
def test_what_is_committed_on_another_processor_is_measured_and_not_compared(
    measured: float | None, is_lost: bool
) -> None:
    verdict = Verdict(BETTER, 1.0, measured, "another")
    assert (verdict.loss, verdict.is_lost) == (None, is_lost)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.file)
def test_the_committed_results_have_the_values(check: Any) -> None:
    rows = results_io.read(check.file)["rows"]
    for value in check.values:
        found = value.of(rows)
        assert found is not None, value.name
        assert 0 < found < 1_000


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.file)
def test_results_without_a_row_have_no_value(check: Any) -> None:
    assert all(value.of([]) is None for value in check.values)


MEASURES = """
import json, pathlib, sys
*_, folder = sys.argv
name, gain = sys.argv[1:3]
if name != "none":
    pathlib.Path(folder, name + ".json").write_text(json.dumps({"rows": [{"gain": float(gain)}]}))
"""


ELSEWHERE = "not compared: committed on another processor"


def gains_check(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Make the command run one program, and compare with the results of the folder."""
    (folder / "measures_gain.py").write_text(MEASURES)
    value = Value("gain", lambda rows: rows[0]["gain"] if rows else None, True)
    check = Check("gains", ("measures_gain", *arguments), (value,))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(results_io, "RESULTS", folder)
    monkeypatch.setattr(results_io, "hardware", lambda: {"cpu": "here"})
    monkeypatch.setattr(program, "CHECKS", (check,))


@pytest.mark.parametrize(
    ("wrote", "gain", "committed_on", "code", "says"),
    [
        ("gains", 0.9, "here", 0, "| gain | 1 | 0.9 | 1.11 times as bad |"),
        ("gains", 0.7, "here", 1, "| gain | 1 | 0.7 | **1.43 times as bad** |"),
        ("none", 0.9, "here", 1, "| gain | 1 |  | **not measured** |"),
        ("gains", 0.7, "there", 0, f"| gain | 1 | 0.7 | {ELSEWHERE} (there) |"),
        ("gains_cuda", 0.7, "here", 0, f"| gain |  | 0.7 | {ELSEWHERE} (no CUDA device) |"),
        ("gains", 0.9, None, 1, "| gain |  | 0.9 | **nothing committed** |"),
    ],
)
def test_a_benchmark_that_lost_makes_the_command_fail(
    wrote: str,
    gain: float,
    committed_on: str | None,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if committed_on is not None:
        document = {"hardware": {"cpu": committed_on}, "rows": [{"gain": 1.0}]}
        (tmp_path / "gains.json").write_text(json.dumps(document))
    gains_check(tmp_path, monkeypatch, wrote, str(gain))
    assert program.main([]) == code
    printed = capsys.readouterr()
    assert says in printed.out
    assert ("1 of 1 were not compared" in printed.err) == (ELSEWHERE in says)


def test_a_benchmark_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gains_check(tmp_path, monkeypatch, "gains", "0.9")
    (tmp_path / "measures_gain.py").write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setattr(program, "TIMEOUT_S", 0.1)
    assert program.main([]) == 1
    assert "gains took longer than 0.1 s: ended" in capsys.readouterr().err
