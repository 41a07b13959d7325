"""Numbers that the figures compute from rows, on rows that are easily checked by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.common.tables import number
from bench.paper import __main__ as command
from bench.paper.catalog import ALL, EXPERIMENTS
from bench.paper.cells import NUM_REQUESTS, Options, ratios
from bench.paper.experiment import Experiment
from bench.paper.figures import (
    figure5,
    figure10,
    figure11,
    figure13,
    figure14,
    figure15,
    scheduling_costs,
    sensitivity,
    stress,
)
from bench.paper.points import paper_points
from sterna.errors import ConfigurationError
from sterna.policy.presets import PRESETS
from sterna.simulator.config import Report
from sterna.workload.seeds import PAPER_SEED

Row = dict[str, Any]


def serving_row(trace: str, rate: float, policy: str, **metrics: float) -> Row:
    return {"trace": trace, "request_rate": rate, "policy": policy, "seed": PAPER_SEED, **metrics}


def test_gains_are_taken_at_equal_points() -> None:
    rows = [
        serving_row("M-M", 7.4, "Llumnix", prefill_p99_s=2.0),
        serving_row("M-M", 7.5, "Llumnix", prefill_p99_s=4.0),
        serving_row("M-M", 7.5, "INFaaS++", prefill_p99_s=8.0),
        serving_row("M-M", 7.4, "INFaaS++", prefill_p99_s=20.0),
        serving_row("ShareGPT", 7.4, "INFaaS++", prefill_p99_s=99.0),
    ]

    assert sorted(figure11.gains(rows, ("M-M",), "prefill_p99_s", "INFaaS++")) == [2.0, 10.0]
    assert figure11.most(("M-M",), "prefill_p99_s", "INFaaS++")(rows) == 10.0
    assert figure11.typical(("M-M",), "prefill_p99_s", "INFaaS++")(rows) == pytest.approx(20**0.5)


def test_an_idle_source_has_no_steps_while_its_only_request_is_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such rows are shown where nothing was measured with busy instances."""
    step_ms = {"median": 40.0}
    row = {"tokens": 256, "busy": False, "n": 3, "downtime_ms": step_ms, "decode_step_ms": step_ms}
    measured = [
        row | {"mode": "live", "transport": "tcp", "decode_step_migrating_ms": step_ms},
        row | {"mode": "recompute", "transport": None, "decode_step_migrating_ms": None},
    ]
    (tmp_path / "migration.json").write_text(json.dumps({"rows": measured}))
    monkeypatch.setattr(figure10, "RESULTS", tmp_path)

    found = figure10.rows(Options())

    assert [each["decode_step_migrating_ms"] for each in found] == [40.0, None]
    assert figure10.slowdown(found) == 0.0


def test_a_baseline_of_zero_gives_no_ratio() -> None:
    rows = [serving_row("M-M", 7.4, "Llumnix", x=0.0), serving_row("M-M", 7.4, "INFaaS++", x=1.0)]

    assert ratios(rows, "x", {"policy": "INFaaS++"}, {"policy": "Llumnix"}, ("trace",)) == []


def test_a_preemption_loss_that_is_gone_is_a_gain_and_a_whole_cut() -> None:
    loss = "preemption_loss_s"
    rows = [
        serving_row("M-M", 7.4, "Llumnix", **{loss: 0.0}),
        serving_row("M-M", 7.4, "INFaaS++", **{loss: 0.5}),
        serving_row("M-M", 7.5, "Llumnix", **{loss: 0.1}),
        serving_row("M-M", 7.5, "INFaaS++", **{loss: 0.0}),
    ]

    gains = ratios(rows, loss, {"policy": "INFaaS++"}, {"policy": "Llumnix"}, ("request_rate",))

    assert gains == pytest.approx([500.0, 0.01])
    assert figure11.loss_cut(("M-M",), "INFaaS++")(rows) == 1.0


def test_the_papers_own_points_bear_its_text_out() -> None:
    """Section 6.3: "For prefill, the improvements are up to 7.7x for mean and 14.8x for P99." """
    paper = paper_points("figure11")

    mean = figure11.most(figure11.GENERATED, "prefill_mean_s", "INFaaS++")(paper)
    p99 = figure11.most(figure11.GENERATED, "prefill_p99_s", "INFaaS++")(paper)

    assert mean == pytest.approx(7.7, abs=0.1)
    assert p99 == pytest.approx(14.8, abs=0.1)


def test_the_papers_points_give_less_than_its_text_at_equal_latency() -> None:
    """Section 6.5: "similar P99 prefill latency (roughly 5s, the red dash line) while saving 36%
    of the cost"."""
    assert figure15.saving_at(figure15.points(), 5.0) == pytest.approx(0.21, abs=0.02)


def test_the_cost_at_a_latency_lies_on_the_line_between_two_points() -> None:
    rows = [
        {"policy": "Llumnix", "avg_instances": 12.0, "prefill_p99_s": 1.0},
        {"policy": "Llumnix", "avg_instances": 10.0, "prefill_p99_s": 100.0},
    ]

    assert figure15.cost_at(rows, "Llumnix", 10.0) == pytest.approx(11.0)
    assert math.isnan(figure15.cost_at(rows, "Llumnix", 0.5))
    assert math.isnan(figure15.cost_at(rows, "Llumnix", 200.0))


def test_harm_to_the_normal_priority_is_the_worst_one_over_the_cvs() -> None:
    rows = [
        {"priority": "normal", "gamma_cv": cv, "policy": policy, "x": value}
        for cv, policy, value in (
            (2.0, "Llumnix", 1.0),
            (2.0, "Llumnix-base", 1.0),
            (4.0, "Llumnix", 1.2),
            (4.0, "Llumnix-base", 1.0),
        )
    ]

    assert figure13.harm("x")(rows) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("free", "demands", "left"),
    [(10, [], 0), (10, [4, 6], 0), (9, [6, 4], 1), (3, [4, 6, 5], 3), (6, [6], 0)],
)
def test_as_many_blocked_heads_of_line_fit_as_the_free_memory_holds(
    free: int, demands: list[int], left: int
) -> None:
    assert figure5._num_left(free, demands) == left


def test_readers_see_names_of_the_arrivals_beside_the_papers_points() -> None:
    rows = [{**point, "seed": PAPER_SEED} for point in paper_points("figure14")]

    lines = figure14.tables(rows).splitlines()

    assert len([line for line in lines if line.startswith("| Poisson | ")]) == 12
    assert len([line for line in lines if line.startswith("| Gamma, 2 requests/s | ")]) == 10
    assert all(line.count("(1.00)") == len(figure14.METRICS) for line in lines if "Llumnix" in line)


def test_every_point_of_the_papers_grid_is_run() -> None:
    assert len(figure11.cells()) == 80
    assert {cell.labels["policy"] for cell in figure11.cells()} == {
        "INFaaS++",
        "Llumnix",
        "Round-Robin",
    }
    assert len(figure13.cells()) == 8
    assert len(figure15.cells()) == 10


def test_every_variant_changes_something() -> None:
    cells = sensitivity.cells()
    base = {c.labels["trace"]: c.config for c in cells if c.labels["value"] == sensitivity.BASE}

    same = [
        (cell.labels["assumption"], cell.labels["value"], cell.labels["trace"])
        for cell in cells
        if cell.labels["value"] != sensitivity.BASE
        and cell.config == base[cell.labels["trace"]]
        and cell.workload.num_requests == NUM_REQUESTS
    ]

    # One threshold is each trace's own.
    assert {assumption for assumption, _, _ in same} <= {
        "migration thresholds: 160 steps (M-M), 48"
    }
    assert len(same) == len(base)


def test_an_effect_above_one_is_an_improvement() -> None:
    rows = [
        {"trace": "M-M", "request_rate": 7.5, "seed": 1, "assumption": a, "value": v, "x_s": x}
        for a, v, x in (("base", "base", 2.0), ("report", "live", 1.0))
    ]

    assert sensitivity.effects(rows, "report", "live", "x_s") == [2.0]


COSTS = scheduling_costs.Costs(
    local_s=(0.001, 0.0), central_s=(0.001, 0.0), dispatch_s=1e-5, report_s=1e-5
)


def test_one_scheduler_for_all_stalls_every_instance_and_llumlets_only_their_own() -> None:
    rows = {
        name: stress.stress_row(name, 50.0, COSTS, 12.0)
        for name in (stress.NO_SCHEDULING, stress.LLUMLETS, stress.CENTRALIZED)
    }

    assert rows[stress.NO_SCHEDULING]["stall_mean_ms"] == 0.0
    assert rows[stress.LLUMLETS]["stall_mean_ms"] == pytest.approx(1.0, abs=1e-3)
    assert rows[stress.CENTRALIZED]["stall_mean_ms"] > 2.0
    assert (
        rows[stress.NO_SCHEDULING]["token_mean_ms"]
        < rows[stress.LLUMLETS]["token_mean_ms"]
        < rows[stress.CENTRALIZED]["token_mean_ms"]
    )


def test_decisions_of_the_production_scheduler_are_timed() -> None:
    rows = {row["decision"]: row for row in scheduling_costs.scheduler_rows(2)}

    assert rows.keys() == {"dispatch", "report", "round"}
    assert rows["report"]["n"] == 2 * scheduling_costs.NUM_INSTANCES
    assert all(row["duration_ms"]["median"] > 0 for row in rows.values())


def test_the_papers_seed_comes_first() -> None:
    assert Options(num_seeds=2).seeds == (PAPER_SEED, 1, 2)
    assert Options().num_requests(NUM_REQUESTS) == NUM_REQUESTS
    assert Options(is_quick=True).num_requests(NUM_REQUESTS) < 1000


def test_all_means_every_figure_and_not_the_sensitivity() -> None:
    assert set(EXPERIMENTS) - set(ALL) == {"sensitivity"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.01234, "0.0123"), (7.5, "7.50"), (123.4, "123"), (12345.0, "12,345")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


# ---------------------------------------------------------------------------------- the command


def test_what_cannot_be_run_is_said_and_the_rest_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Options) -> list[Row]:
        raise ConfigurationError("its measurement is not there")

    def done(_: Options) -> list[Row]:
        return [{"source": "simulated", "x": 1.0}]

    def of(name: str, rows: Callable[[Options], list[Row]]) -> Experiment:
        return Experiment(name, name, rows, lambda _: [], lambda _: "", None, {"kind": "measured"})

    chosen = [of("one", refuse), of("another", done)]
    monkeypatch.setattr(command, "_chosen", lambda _: chosen)

    status = command.main(["all", "--results", str(tmp_path)])

    assert status == 1
    said = capsys.readouterr()
    assert "one cannot be run: its measurement is not there" in said.out
    assert "not run: one" in said.err
    assert (tmp_path / "another.json").exists()
    assert (tmp_path / "evaluation.md").exists()


@pytest.mark.parametrize("text", ["-1", "some", "1.5", ""])
def test_a_number_of_seeds_that_cannot_be_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["figure11", "--seeds", text])
    assert f"must be a whole number from 0 on, not {text!r}" in capsys.readouterr().err


def test_a_preset_is_only_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["figure11", "--policy", "sterna"]) == 1
    assert "--compare BASE --policy NAME" in capsys.readouterr().err


def test_a_preset_runs_at_every_point_as_it_ships() -> None:
    cells = figure11.cells("sterna")
    assert len(cells) == 35
    assert {cell.labels["policy"] for cell in cells} == {"sterna"}
    assert all(cell.config.policy == PRESETS["sterna"] for cell in cells)
    assert {cell.config.report for cell in cells} == {Report.LIVE}


@pytest.mark.slow
def test_a_quick_run_of_everything_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["all", "--quick", "--processes", "1"]) == 0
    assert "its numbers have no meaning" in capsys.readouterr().out
