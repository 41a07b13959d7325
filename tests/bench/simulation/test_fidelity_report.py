"""What the fidelity benchmark makes of its rows."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.paper.cells import Cell
from bench.paper.figures import figure11
from bench.paper.points import LEAST_LOSS_S, paper_points
from bench.simulation import fidelity
from bench.simulation.fidelity import _row
from bench.simulation.fidelity_report import GOALS, markdown, summaries


def a_row(
    ratio: float = 1.0, trace: str = "M-M", policy: str = "llumnix", **ratios: float
) -> dict[str, Any]:
    """A point where every column of ours is `ratio` times the paper's, but for those named."""
    row: dict[str, Any] = {"trace": trace, "rate": 7.5, "policy": policy, "n": 10_000}
    for column in figure11.METRICS:
        row[column] = {"ours": 2.0 * ratios.get(column, ratio), "paper": 2.0}
    return row


def entry(summary: list[dict[str, Any]], **labels: object) -> dict[str, Any]:
    (found,) = [each for each in summary if labels.items() <= each.items()]
    return found


def test_the_error_is_the_median_of_the_absolute_logs() -> None:
    """Half as much and twice as much are equally far; the median log tells the direction."""
    summary = summaries([a_row(0.5), a_row(2.0), a_row(1.0)])

    found = entry(summary, column="prefill_mean_s")

    assert found["n"] == 3
    assert found["median_abs_log"] == pytest.approx(math.log(2), abs=1e-4)
    assert found["median_log"] == 0


def test_policies_and_kinds_of_traces_are_summed_up_each_by_itself() -> None:
    rows = [a_row(1.1), a_row(1.5, trace="ShareGPT"), a_row(3.0, policy="infaas++")]

    summary = summaries(rows)

    errors = [
        entry(summary, column="request_mean_s", **labels)["median_abs_log"]
        for labels in (
            {"policy": "llumnix", "traces": "generated"},
            {"policy": "llumnix", "traces": "real"},
            {"policy": "infaas++", "traces": "generated"},
        )
    ]
    assert errors == pytest.approx([math.log(1.1), math.log(1.5), math.log(3)], abs=1e-4)


def test_goals_hold_for_generated_traces_only() -> None:
    summary = summaries([a_row(1.1), a_row(1.1, trace="BurstGPT")])

    assert "goal" in entry(summary, traces="generated", column="prefill_mean_s")
    assert "goal" not in entry(summary, traces="real", column="prefill_mean_s")
    assert "goal" not in entry(summary, traces="generated", column="decode_p99_s")


@pytest.mark.parametrize(("excess", "is_reached"), [(0.001, True), (-0.001, False)])
def test_a_goal_is_reached_up_to_its_very_value(excess: float, is_reached: bool) -> None:
    goal = GOALS["llumnix"]["prefill_mean_s"]
    summary = summaries([a_row(math.exp(goal - excess))])

    assert entry(summary, column="prefill_mean_s")["is_reached"] is is_reached


def test_losses_next_to_nothing_are_not_compared() -> None:
    tiny = a_row()
    tiny["preemption_loss_s"] = {"ours": 1.0, "paper": LEAST_LOSS_S / 2}

    found = entry(summaries([tiny, a_row(2.0)]), column="preemption_loss_s")

    assert found["n"] == 1
    assert found["median_abs_log"] == pytest.approx(math.log(2), abs=1e-4)


def test_missed_goals_are_named() -> None:
    rows = [a_row(1.0, prefill_mean_s=1.2)]

    text = markdown(rows, summaries(rows))

    assert "4 of the 5 goals" in text
    assert "missed: llumnix prefill mean (0.182, goal 0.12)." in text
    assert "| M-M | 7.5 | llumnix | 2 / 2 | 2 / 2 | 2 / 2 | 2.4 / 2 |" in text


def test_the_page_of_the_figure_says_the_same() -> None:
    """Both pages list the distances of the same runs."""
    points = paper_points("figure11")
    ours = [
        {**point, "n": 1}
        | {metric: 1.3 * (1 + number % 7) * point[metric] for metric in figure11.METRICS}
        for number, point in enumerate(points)
    ]

    rows = [_row(row, figure11.paper_point(row)) for row in ours]

    def numbers(text: str) -> list[str]:
        return re.findall(r"\d+\.\d{3} \([+-]\d+\.\d{3}\)", text)

    found = numbers(markdown(rows, summaries(rows)))
    assert len(found) == 5 * len(figure11.METRICS)
    assert sorted(found) == sorted(numbers(figure11.distances_table(ours)))


def test_a_part_of_the_points_does_not_replace_the_result_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_in_the_paper(name: str, cells: Sequence[Cell], *_: object) -> list[dict[str, Any]]:
        return [{**figure11.paper_point(cell.labels), **cell.labels, "n": 1} for cell in cells]

    monkeypatch.setattr(fidelity, "run_cells", as_in_the_paper)
    part = ["--trace", "M-M", "--policy", "llumnix"]
    assert fidelity.main([*part, "--folder", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "fidelity.json").read_text())["rows"]
    assert {(row["trace"], row["policy"]) for row in rows} == {("M-M", "llumnix")}

    monkeypatch.setattr(fidelity.results_io, "write", lambda *_, **__: pytest.fail("written"))
    assert fidelity.main(part) == 0
    assert "not all points: nothing is written without --folder" in capsys.readouterr().out
