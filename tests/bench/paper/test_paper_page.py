"""The page and the comparison are made of rows alone."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from bench.common.results_io import ROOT
from bench.paper import claims, compare, page
from bench.paper.catalog import EXPERIMENTS
from bench.paper.cells import Options
from bench.paper.claims import Claim, Kind
from sterna.errors import ConfigurationError
from sterna.workload.seeds import PAPER_SEED

Row = dict[str, Any]

ROWS: list[Row] = [
    {
        "policy": policy,
        "seed": PAPER_SEED,
        "fragmentation_mean": mean,
        "above_10_percent_fraction": 0.25,
        "zero_fraction": 0.5,
        "time_s": [1.0, 2.0],
        "proportion": [0.0, mean],
    }
    for policy, mean in (("INFaaS++", 0.08), ("Llumnix", 0.004))
]


def a_result(folder: Path) -> None:
    experiment = EXPERIMENTS["figure12"]
    document = {
        "commit": "abc",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"cpu": "a processor", "num_cores": 2},
        "config": experiment.config,
        "claims": [each.as_json() for each in experiment.claims(ROWS)],
        "rows": ROWS,
    }
    (folder / "figure12.json").write_text(json.dumps(document))


def test_the_page_has_claims_tables_and_plot_of_what_was_run(tmp_path: Path) -> None:
    a_result(tmp_path)

    text = page.page(
        page.load(tmp_path),
        "{{summary}}\n{{figure12.claims}}\n{{figure12.tables}}\n{{figure12.plot}}\n"
        "{{figure12.source}}\n{{figure3.claims}}{{figure3.tables}}",
    )

    lines = text.splitlines()
    assert "| fragmentation, reduction | 6.3 | −92.0 % | −95.0 % |  | reproduced |" in lines
    assert "| Llumnix | 0.4 % | 0.7 % | 25 % | 50 % |" in lines
    assert "![Figure 12: fragmentation over time](../bench/results/paper/figure12.png)" in lines
    assert lines[-1] == "*Not run: `sterna reproduce figure3`.*"


def test_the_summary_counts_verdicts(tmp_path: Path) -> None:
    a_result(tmp_path)

    lines = page.summary(page.load(tmp_path)).splitlines()

    assert lines[0] == "| figure | how | reproduced | partly | not | not judged |"
    assert lines[2].startswith("| [Figure 12: fragmentation over time](#figure-12-fragmentation-")
    assert lines[2].endswith("| simulated | 3 |  |  |  |")


def test_a_mark_that_stands_for_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        page.page({}, "{{figure99.claims}}")


def test_every_experiment_has_its_place_in_the_template() -> None:
    template = page.TEMPLATE.read_text()

    for name, experiment in EXPERIMENTS.items():
        assert f"## {experiment.title}\n" in template
        for part in ("claims", "tables", "plot", "source"):
            assert f"{{{{{name}.{part}}}}}" in template


def test_equal_rows_give_an_equal_plot(tmp_path: Path) -> None:
    draw = EXPERIMENTS["figure12"].draw
    assert draw is not None

    draw(ROWS, tmp_path / "a.png")
    draw(ROWS, tmp_path / "b.png")

    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_rule_on_the_page_has_the_numbers_of_the_code() -> None:
    part = f"{claims.PART_FACTOR:g}"
    assert re.findall(r"[\d.]*\d%?", page.rule({})) == [
        f"{claims.FULL_SHARE:.0%}",
        f"{claims.PART_SHARE:.0%}",
        "1",
        part,
        f"{claims.FULL_FACTOR:g}",
        part,
        f"{claims.BOUND_SLACK - 1:.0%}",
        part,
    ]


def test_a_verdict_that_is_not_full_stands_out() -> None:
    from bench.paper.tables import claims_table

    table = claims_table([Claim("x", "6", Kind.FACTOR, 4.0, 1.0, (1.0, 2.0))])

    assert table.splitlines()[-1] == "| x | 6 | 4.00× | 1.00× | 1.41× [1.00×, 2.00×] | **not** |"


def test_a_claim_that_some_seeds_say_nothing_of_shows_how_many_do() -> None:
    from bench.paper.tables import claim_cells

    cells = claim_cells(Claim("x", "6", Kind.FACTOR, 4.0, 4.0, (4.0, 4.0)), num_seeds=3)

    assert cells[4] == "4.00× [4.00×, 4.00×] (2 of 3)"


# ------------------------------------------------------------------------------ committed results


@pytest.mark.parametrize("name", sorted(page.load(page.RESULTS)))
def test_claims_and_tables_come_of_the_committed_rows(name: str) -> None:
    document = page.load(page.RESULTS)[name]
    experiment = EXPERIMENTS[name]

    found = experiment.claims(document["rows"])
    tables = experiment.tables(document["rows"])

    assert _rounded([each.as_json() for each in found]) == _rounded(document["claims"])
    assert tables.count("|") > 10
    assert tables in page.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(page.load(page.RESULTS)))
def test_the_plot_comes_of_the_committed_rows(name: str, tmp_path: Path) -> None:
    draw = EXPERIMENTS[name].draw
    if draw is not None:
        draw(page.load(page.RESULTS)[name]["rows"], tmp_path / "plot.png")
        drawn, committed = (
            imread(path) for path in (tmp_path / "plot.png", page.RESULTS / f"{name}.png")
        )
        assert drawn.shape == committed.shape
        # Another Matplotlib may set letters otherwise; lines that are not there are more.
        assert np.isclose(drawn, committed, atol=0.1).all(axis=2).mean() > 0.98


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    text = page.page(page.load(page.RESULTS), page.TEMPLATE.read_text())
    assert page.PAGE.read_text() == text


# --------------------------------------------------------------------------------- comparison


def test_a_comparison_says_how_much_better_this_checkout_is_at_each_point() -> None:
    def row(rate: float, seed: int, prefill_s: float) -> Row:
        return {"trace": "M-M", "request_rate": rate, "seed": seed, "prefill_p99_s": prefill_s}

    ours = [row(7.4, 1, 1.0), row(7.4, 2, 1.0), row(7.5, 1, 2.0)]
    theirs = [row(7.4, 1, 4.0), row(7.4, 2, 1.0), row(7.5, 1, 2.0)]

    table = compare.table_of(EXPERIMENTS["figure11"], ours, theirs, "HEAD~1")

    names, ratios = (list(column.cells) for column in table.columns)
    assert names == ["M-M 7.4", "M-M 7.5", "geometric mean"]
    assert ratios == ["2.000", "1.000", "1.587"]


def test_a_comparison_keeps_priorities_apart() -> None:
    def row(priority: str, prefill_s: float) -> Row:
        return {"gamma_cv": 2.0, "seed": 1, "priority": priority, "prefill_p99_s": prefill_s}

    ours, theirs = [row("high", 2.0), row("normal", 1.0)], [row("high", 1.0), row("normal", 2.0)]

    table = compare.table_of(EXPERIMENTS["figure13"], ours, theirs, "HEAD~1")

    names, ratios = (list(column.cells) for column in table.columns)
    assert list(zip(names, ratios, strict=True))[:2] == [
        ("2.0 high", "0.500"),
        ("2.0 normal", "2.000"),
    ]


def test_what_has_nothing_to_compare_is_refused_before_anything_runs() -> None:
    def run(_: Options) -> list[Row]:
        raise AssertionError("it ran")

    one = replace(EXPERIMENTS["figure5"], rows=run)

    with pytest.raises(ConfigurationError, match=r"figure5 has nothing to compare; .* figure11"):
        compare.show(Console(), [one], Options(), "HEAD")


def test_what_is_compared_has_metrics_and_what_has_metrics_is_compared() -> None:
    documents = page.load(page.RESULTS)
    assert documents.keys() == EXPERIMENTS.keys()

    with_metrics = {
        name
        for name, document in documents.items()
        if any(all(metric in row for row in document["rows"]) for metric in compare.METRICS)
    }

    assert with_metrics == set(compare.COMPARED)


def test_an_unknown_revision_is_refused_in_one_line() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")

    with (
        pytest.raises(ConfigurationError, match="no revision 'no-such-revision'"),
        compare.worktree("no-such-revision"),
    ):
        pass


def _rounded(value: Any) -> Any:
    """With the digits on which processors agree: numpy adds in an order of their own."""
    return json.loads(json.dumps(value), parse_float=lambda text: f"{float(text):.9g}")
