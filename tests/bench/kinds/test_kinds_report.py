"""Rows of `sterna bench kinds`, and what is written into pages from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.common import results_io
from bench.common.pages import END, begin_mark
from bench.kinds.__main__ import COMMAND, NAME, PAGE, README, _write, measured, read
from bench.kinds.cases import CASES
from bench.kinds.findings import Found, Move, Recovery
from bench.kinds.report import (
    has_right_tokens,
    in_words,
    line_of,
    models_table,
    readme_table,
    row_of,
)
from bench.migration.samples import Sample
from sterna.errors import InstanceStartError

RECOVERIES = {
    "llama": Recovery.OTHER,
    "gemma3": Recovery.SAME,
    "deepseek": Recovery.AS_RECOMPUTED,
}
FULL, WINDOW = "FullAttentionSpec", "SlidingWindowSpec"


def move(downtime_ms: float, *stage_bytes: int) -> Move:
    sample = Sample(
        downtime_ms=downtime_ms,
        phases_ms=(),
        suspended_ms=1.0,
        migration_ms=50.0,
        stages=9,
        steps_ms=(4.0, 6.0),
        migrating_steps_ms=(),
    )
    return Move(sample, stage_bytes)


MOVED = Found(
    "gemma3_text",
    (WINDOW, WINDOW, FULL),
    moves=(move(3.0, 8192, 1024), move(7.0, 2048), move(5.0, 8192, 4096, 512)),
    is_same=True,
    recovery=Recovery.SAME,
    num_neighbours=2,
    foreign_cores=0.043,
)
REFUSED = Found("llama", (FULL,), reason="speculative decoding")


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-11-25T00:00:00+00:00",
        "hardware": {"cpu": "a processor", "num_cores": 2},
        "config": {"transport": "shm"},
        "rows": [{**row, "commit": "abc"} for row in rows],
    }


def row(kind: str, found: Found = MOVED) -> dict[str, Any]:
    return row_of(kind, found)


def test_a_row_has_the_largest_of_all_moves_as_the_data_planes_counted_them() -> None:
    assert row("gemma3") == {
        "kind": "gemma3",
        "model_type": "gemma3_text",
        "groups": [WINDOW, WINDOW, FULL],
        "moves": True,
        "reason": None,
        "token_identical": True,
        "recovered_identical": True,
        "recovery": "same",
        "stages": 3,
        "downtime_ms": {"median": 5.0, "p99": 6.96},
        "decode_step_ms": {"median": 5.0, "p99": 6.0},
        "last_stage_bytes": 2048,
        "n": 3,
        "neighbours": 2,
        "foreign_cores": 0.04,
        "commit": results_io.measured_commit(),
    }


def test_a_row_of_what_does_not_move_has_its_reason_and_no_measurement() -> None:
    found = row("ngram", REFUSED)
    assert (found["moves"], found["reason"], found["n"]) == (False, "speculative decoding", 0)
    measured = ("token_identical", "recovered_identical", "stages", "downtime_ms")
    assert [found[name] for name in (*measured, "last_stage_bytes")] == [None] * 5


def test_groups_of_a_kind_are_counted_together_and_unknown_ones_keep_vllms_name() -> None:
    assert in_words((WINDOW, FULL, WINDOW)) == "2 sliding window, full"
    assert in_words(("RingSpec",)) == "RingSpec"


def test_the_readme_has_what_moves_with_which_tokens() -> None:
    text = readme_table(document(row("gemma3"), row("granite4", REFUSED), row("ngram")))
    lines = text.splitlines()
    assert lines[1] == "| --- | --- | --- | --- | --- | ---: |"
    assert lines[2:4] == [
        "| Gemma 3 | 2 sliding window, full | yes | the same | the same | 5.0 ms |",
        "| Granite 4 | full | no: speculative decoding |  |  |  |",
    ]
    assert "n-gram" not in text


def test_tokens_that_differ_stand_out() -> None:
    other = replace(MOVED, is_same=False)
    assert "| yes | **others** | the same |" in readme_table(document(row("gemma3", other)))
    lost = replace(MOVED, recovery=Recovery.OTHER)
    assert "| yes | the same | **others** |" in readme_table(document(row("gemma3", lost)))
    assert "tokens **others**, after a death the same;" in line_of(row("gemma3", other))


def test_tokens_of_a_recompute_are_vllms_own_and_no_failure() -> None:
    found = row("deepseek", replace(MOVED, recovery=Recovery.AS_RECOMPUTED))
    assert found["recovered_identical"] is False
    assert has_right_tokens(found)
    assert "| yes | the same | those of vLLM's recompute |" in readme_table(document(found))


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (MOVED, True),
        (REFUSED, True),
        (replace(MOVED, is_same=False), False),
        (replace(MOVED, recovery=Recovery.OTHER), False),
    ],
)
def test_other_tokens_are_a_failure(found: Found, is_right: bool) -> None:
    assert has_right_tokens(row("gemma3", found)) is is_right


def test_the_page_has_costs_and_reasons() -> None:
    text = models_table(document(row("gemma3"), row("granite4_ngram", REFUSED)))
    assert text.startswith("Measured on 2026-11-25 at commit abc: a processor, 2 cores, ")
    assert (
        "| Gemma 3 (`gemma3_text`) | 2 sliding window, full | 3 | the same | the same | 3 | 2 KiB "
        "| 5.0 | 7.0 | 5.0 | 2 |" in text
    )
    assert "| Granite 4, n-gram drafts | speculative decoding |" in text
    assert "quiet" not in text


def test_a_machine_that_was_not_quiet_is_named() -> None:
    text = models_table(document(row("gemma3", replace(MOVED, foreign_cores=0.7))))
    assert "Not a quiet machine: other programs kept up to 0.7 cores busy." in text


@pytest.mark.parametrize("table", [readme_table, models_table])
def test_kinds_without_a_row_are_said_to_be_not_measured(table: Any) -> None:
    rows = [row(kind) for kind in CASES if kind not in ("llama", "granite4")]
    assert table(document(*rows)).endswith("\n\nNot measured yet: Llama; Granite 4.")
    assert "Not measured" not in table(document(*map(row, CASES)))


@pytest.mark.parametrize("table", [readme_table, models_table])
def test_without_results_nothing_is_measured(table: Any) -> None:
    text = table(None)
    assert text.startswith("Not measured yet: Llama; ")
    assert "|" not in text


def test_rows_of_other_kinds_are_kept_in_the_order_of_the_cases(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    for kind, n in (("gemma3", 1), ("llama", 2), ("gemma3", 3)):
        _write({**row(kind), "n": n}, tmp_path)
    found = results_io.read(NAME, tmp_path)
    assert [(each["kind"], each["n"]) for each in found["rows"]] == [("llama", 2), ("gemma3", 3)]


@pytest.mark.parametrize(("page", "table"), [(README, readme_table), (PAGE, models_table)])
def test_the_pages_have_what_was_measured(page: Path, table: Any) -> None:
    """`sterna bench kinds --report` writes them again, after a change of the cases."""
    _, text = page.read_text("utf-8").split(begin_mark(COMMAND))
    written, _ = text.split(END, maxsplit=1)
    assert written.strip() == table(read(results_io.RESULTS))


def test_a_kind_that_fails_is_named_and_the_next_one_is_measured(tmp_path: Path) -> None:
    said: list[str] = []

    def measure_one(kind: str) -> dict[str, Any]:
        if kind == "llama4":
            raise InstanceStartError("vLLM refuses its options: no such dtype")
        if kind == "granite4":
            raise TimeoutError
        return row(kind, replace(MOVED, recovery=RECOVERIES[kind]))

    kinds = ("llama4", "llama", "granite4", "gemma3", "deepseek")
    assert measured(kinds, measure_one, tmp_path, said.append) == [
        "llama4 is not measured: vLLM refuses its options: no such dtype",
        "llama has other tokens",
        "granite4 is not measured: TimeoutError",
    ]
    assert said[0] == "llama4 is not measured: vLLM refuses its options: no such dtype"
    found = results_io.read(NAME, tmp_path)
    assert [each["kind"] for each in found["rows"]] == ["llama", "gemma3", "deepseek"]
