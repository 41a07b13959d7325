"""Result files say which sources were measured."""

import subprocess
from pathlib import Path

import pytest

from bench.common import results_io
from bench.common.results_io import commit, read, write


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def test_the_commit_is_marked_for_changed_sources_and_not_for_what_benchmarks_write(
    tmp_path: Path,
) -> None:
    assert commit(tmp_path) == "unknown"
    files = ("src/code.py", "bench/results/paper/figure1.json", "docs/page.md", "README.md")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    clean = commit(tmp_path)
    assert len(clean) == 12

    for name in files[1:]:
        (tmp_path / name).write_text("after")
    assert commit(tmp_path) == clean
    (tmp_path / files[0]).write_text("after")
    assert commit(tmp_path) == f"{clean}-dirty"


def test_a_commit_that_was_made_meanwhile_was_not_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark may take hours, and who works on meanwhile commits."""
    monkeypatch.setattr(results_io, "_BEGUN_AT", "aaaa")
    monkeypatch.setattr(results_io, "commit", lambda: "aaaa")
    write("terns", {}, [], tmp_path)
    assert read("terns", tmp_path)["commit"] == "aaaa"
    monkeypatch.setattr(results_io, "commit", lambda: "bbbb")
    write("terns", {}, [], tmp_path)
    assert read("terns", tmp_path)["commit"] == "aaaa to bbbb"


@pytest.mark.slow
def test_a_file_can_be_read_again_and_has_lists_of_numbers_on_one_line(tmp_path: Path) -> None:
    line = [1, -2.5, 3e-9, None, True]
    more = {"runs": [{"name": "a [1, 2] of text", "line": line, "none": []}]}
    path = write("terns", {"cv": 4}, [{"n": 1}], tmp_path, summary={"failed": 0}, more=more)
    found = read("terns", tmp_path)
    assert list(found)[3:] == ["config", "summary", "runs", "rows"]
    assert (found["summary"], found["runs"], found["rows"]) == (
        {"failed": 0},
        more["runs"],
        [{"n": 1}],
    )
    assert "[1, -2.5, 3e-09, null, true]" in path.read_text()
