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
        (BETTER, None, 1.0, None, False),
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
    assert "| gain |  | 1 | nothing committed |" in lines


def committed(name: str) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = results_io.read(name)["rows"]
    except FileNotFoundError:
        pytest.skip(f"{name} has not been measured")
    return rows


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.file)
def test_the_committed_results_have_the_values(check: Any) -> None:
    for value in check.values:
        found = value.of(committed(check.file))
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


@pytest.mark.parametrize(
    ("wrote", "gain", "code", "says"),
    [
        ("gains", 0.9, 0, "| gain | 1 | 0.9 | 1.11 times as bad |"),
        ("gains", 0.7, 1, "| gain | 1 | 0.7 | **1.43 times as bad** |"),
        ("none", 0.9, 1, "| gain | 1 |  | **not measured** |"),
        ("gains_cuda", 0.7, 0, "| gain |  | 0.7 | nothing committed |"),
    ],
)
def test_a_benchmark_that_lost_makes_the_command_fail(
    wrote: str,
    gain: float,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "measures_gain.py").write_text(MEASURES)
    (tmp_path / "gains.json").write_text(json.dumps({"rows": [{"gain": 1.0}]}))
    value = Value("gain", lambda rows: rows[0]["gain"] if rows else None, True)
    check = Check("gains", ("measures_gain", wrote, str(gain)), (value,))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(results_io, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "CHECKS", (check,))
    assert program.main([]) == code
    assert says in capsys.readouterr().out
