"""The removals of `bench.parts`: each applies to the source as it is, and what remains is code."""

import ast
from pathlib import Path

import pytest

from bench.parts import removals
from bench.parts.removals import (
    PACKAGE,
    REMOVALS,
    SHORT_TIMEOUTS,
    SOURCE,
    Change,
    Removal,
    StaleChangeError,
    copy_source,
)


@pytest.mark.parametrize(
    "removal",
    [*REMOVALS, Removal("short time-outs", SHORT_TIMEOUTS)],
    ids=lambda removal: removal.part,
)
def test_a_removal_applies_and_leaves_code(removal: Removal) -> None:
    sources: dict[str, str] = {}
    for change in removal.changes:
        before = sources.get(change.file) or (SOURCE / PACKAGE / change.file).read_text("utf-8")
        sources[change.file] = change.applied(before)
        assert sources[change.file] != before
    for file, source in sources.items():
        ast.parse(source, file)


@pytest.mark.parametrize("source", ["a = 2\n", "a = 1\na = 1\n"])
def test_a_change_of_another_text_is_refused(source: str) -> None:
    with pytest.raises(StaleChangeError, match=r"core\.py has [02] times, not once"):
        Change("core.py", "a = 1\n", "").applied(source)


def test_python_imports_the_changed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "origin"
    (source / PACKAGE).mkdir(parents=True)
    (source / PACKAGE / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(removals, "SOURCE", source)
    environment = copy_source(tmp_path / "copy", [Change("__init__.py", "a = 1\n", "a = 2\n")])
    copied = tmp_path / "copy" / "src"
    assert environment["PYTHONPATH"].startswith(str(copied))
    assert (copied / PACKAGE / "__init__.py").read_text() == "a = 2\n"
    assert (source / PACKAGE / "__init__.py").read_text() == "a = 1\n"
