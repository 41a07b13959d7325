"""The page's tables and the plot come from the result file alone."""

from pathlib import Path
from typing import Any

import pytest

from bench.migration.report import markdown, plot, plot_phases
from bench.migration.samples import PHASES


def a_row(mode: str, transport: str | None, tokens: int, downtime_ms: float) -> dict[str, Any]:
    return {
        "mode": mode,
        "transport": transport,
        "tokens": tokens,
        "busy": False,
        "n": 5,
        "downtime_ms": {"median": downtime_ms, "p99": downtime_ms},
        "decode_step_ms": {"median": 40.0, "p99": 45.0},
        "decode_step_migrating_ms": {"median": 41.0, "p99": 45.0},
        "stages": 2,
        "foreign_cores": 0.1,
    }


def a_document() -> dict[str, Any]:
    rows = [
        a_row("live", "tcp", 256, 5.04),
        a_row("stop_copy", "tcp", 256, 7.0),
        a_row("live", "tcp", 8192, 6.0),
        a_row("stop_copy", "tcp", 8192, 99.96),
        a_row("recompute", None, 8192, 37_338.2),
    ]
    return {
        "commit": "abc",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"cpu": "a processor", "num_cores": 2},
        "config": {
            "model": "a model",
            "num_samples": 11,
            "num_live_samples": 31,
            "num_recompute_samples": 5,
        },
        "rows": rows,
    }


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_table_has_a_line_a_length_and_a_column_a_mode_and_transport() -> None:
    lines = table_lines(markdown(a_document()))

    assert lines == [
        "| tokens | live, TCP | stop and copy, TCP | recompute |",
        "| ---: | ---: | ---: | ---: |",
        "| 256 | 5.0 | 7.0 |  |",
        "| 8,192 | 6.0 | 100.0 | 37,338 |",
    ]


def test_the_parts_of_the_downtimes_have_a_line_a_transport_and_load() -> None:
    document = a_document()
    for row in document["rows"]:
        row["phases_ms"] = {name: [rank, rank + 2.0] for rank, name in enumerate(PHASES)}
    slow = document["rows"][2] | {"busy": True}
    document["rows"].append(slow | {"phases_ms": {**slow["phases_ms"], "copy": [40.0, 40.0]}})

    lines = table_lines(markdown(document))

    assert lines[-4:] == [
        "|  | drain | copy | adoption | first step | delivery | downtime |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| TCP, idle | 1.0, 2.0 | 2.0, 3.0 | 3.0, 4.0 | 4.0, 5.0 | 5.0, 6.0 | 15.0, 20.0 |",
        "| TCP, busy | 1.0, 2.0 | 40.0, 40.0 | 3.0, 4.0 | 4.0, 5.0 | 5.0, 6.0 | 53.0, 56.9 |",
    ]


def test_the_headline_says_when_the_machine_was_not_quiet() -> None:
    quiet, noisy = a_document(), a_document()
    noisy["rows"][1]["foreign_cores"] = 1.04

    assert "quiet machine" not in markdown(quiet)
    assert "Not a quiet machine: other programs kept up to 1.0 cores busy." in markdown(noisy)


def test_a_goal_that_was_missed_says_so() -> None:
    document = a_document()
    document["rows"][2]["stages"] = 3

    missed = [line for line in markdown(document).splitlines() if "not reached" in line]

    assert missed == [
        "- stages of a live migration: 2, 3 (goal: 2 for every length; **not reached**)"
    ]


def test_the_cost_to_other_requests_has_a_table_of_its_own() -> None:
    cost = {
        "rows": [
            {
                "measure": "copy",
                "copying": "one chunk",
                "decode_step_ms": {"median": 60.4},
                "decode_step_migrating_ms": {"median": 70.2},
                "longest_step_ms": {"median": 130.0},
                "migration_ms": {"median": 400.0},
            },
            {"measure": "throughput_ratio", "enabled_to_disabled": {"median": 0.998}},
        ]
    }

    lines = markdown(a_document(), cost).splitlines()

    assert "| one chunk | 60 | 70 | 130 | 400 |" in lines
    assert lines[-3].endswith("to that without rounds: 0.998 (goal: at least 0.99)")


@pytest.mark.slow
def test_the_same_results_draw_the_same_plot(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"

    plot(a_document(), first)
    plot(a_document(), second)

    assert first.read_bytes() == second.read_bytes()
    assert b"<svg" in first.read_bytes()


@pytest.mark.slow
def test_each_phase_has_a_histogram_for_either_load(tmp_path: Path) -> None:
    document = a_document()
    for row in document["rows"]:
        row["phases_ms"] = {name: [rank, rank + 2.0] for rank, name in enumerate(PHASES)}

    plot_phases(document, tmp_path / "phases.svg")

    drawn = (tmp_path / "phases.svg").read_text()
    assert all(f"<!-- {name}, {load} -->" in drawn for name in PHASES for load in ("idle", "busy"))
