"""What an interrupted benchmark of migration goes on with."""

from pathlib import Path

import pytest

from bench.migration import plan
from bench.migration.plan import Unfinished

CONFIG = {"num_samples": 20}
ROWS = [{"mode": "live", "tokens": 256}]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a file of what is measured, and one of what measures."""
    for folder in ("src/sterna", "bench"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "code.py").write_text("pass\n")
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    return tmp_path


def unfinished(
    folder: Path, *, quick: bool = False, resume: bool = False, **changes: int
) -> Unfinished:
    return Unfinished(folder / "cache", {**CONFIG, **changes}, quick=quick, resume=resume)


def test_a_run_goes_on_with_its_rows_until_it_has_ended(checkout: Path) -> None:
    assert unfinished(checkout).rows() == []
    unfinished(checkout).keep(ROWS)
    assert unfinished(checkout).rows() == ROWS
    unfinished(checkout).forget()
    assert unfinished(checkout).rows() == []


def test_rows_of_other_options_are_of_another_run(checkout: Path) -> None:
    unfinished(checkout).keep(ROWS)
    assert unfinished(checkout, num_samples=30).rows() == []
    assert unfinished(checkout, num_samples=30, resume=True).rows() == ROWS


@pytest.mark.parametrize("folder", ["src/sterna", "bench"])
def test_rows_of_other_code_are_of_another_run(folder: str, checkout: Path) -> None:
    """Code that measures otherwise gives other numbers, too."""
    unfinished(checkout).keep(ROWS)
    (checkout / folder / "code.py").write_text("...\n")
    assert unfinished(checkout).rows() == []
    assert unfinished(checkout, resume=True).rows() == ROWS


def test_a_quick_run_leaves_the_rows_of_an_interrupted_one_alone(checkout: Path) -> None:
    unfinished(checkout).keep(ROWS)
    quick = unfinished(checkout, quick=True, num_samples=3)
    assert quick.rows() == []
    quick.keep([{"mode": "recompute"}])
    quick.forget()
    assert unfinished(checkout).rows() == ROWS
