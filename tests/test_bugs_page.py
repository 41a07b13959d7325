"""docs/internals/bugs.md is true: each of its commands takes tests, and its commits are there."""

import re
import subprocess

import pytest

from tests.collected import ROOT, selection_of

PAGE = (ROOT / "docs" / "internals" / "bugs.md").read_text("utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.partition("\n|---")[2].splitlines()[1:]]

MAX_FUNCTIONS = 5
"""A command that takes more shows a bug only to who knows which of them does."""


def commands(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]*)`", row[2])


def git(*arguments: str, given: str = "") -> str:
    """What git says; without it, or without the whole history, the test is skipped."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, input=given, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout of git's")
    return done.stdout


def test_the_page_is_read() -> None:
    assert len(ROWS) >= 37
    assert all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3])
def test_every_command_of_a_row_takes_tests_and_few(row: list[str]) -> None:
    assert commands(row), "no command is named"
    for command in commands(row):
        taken = selection_of(command).functions()
        assert taken, f"this takes no test: {command}"
        assert len(taken) <= MAX_FUNCTIONS, f"be more precise than {command}"


def test_every_commit_is_there() -> None:
    """Those that mended a bug, and those at which a seed showed it."""
    if git("rev-parse", "--show-toplevel").strip() != str(ROOT):
        pytest.skip("this checkout is part of another one")
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the checkout has not all of the history")
    for row in ROWS:
        assert re.fullmatch(r"[0-9a-f]{7}(, [0-9a-f]{7})*", row[3])
    text = " ".join(cell for row in ROWS for cell in (row[1], row[3]))
    names = sorted(set(re.findall(r"\b[0-9a-f]{7}\b", text)))
    assert len(names) > len({row[3] for row in ROWS})
    answers = git("cat-file", "--batch-check=%(objecttype)", given="\n".join(names)).splitlines()
    kinds = dict(zip(names, answers, strict=True))
    assert [name for name, kind in kinds.items() if kind != "commit"] == []
