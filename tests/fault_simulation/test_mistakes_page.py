"""docs/internals/fault_simulation.md: what shows that a known mistake is not made here is there."""

import re

import pytest

from fault_simulation.planted import MISTAKES
from tests.collected import ROOT, selection_of

PAGE = (ROOT / "docs" / "internals" / "fault_simulation.md").read_text("utf-8")
SECTION = PAGE.partition("\n## Mistakes of earlier implementations\n")[2].partition("\n## ")[0]
ROWS = [row.strip("| ").split(" | ") for row in SECTION.partition("\n|---")[2].splitlines()[1:]]


def test_the_section_is_read() -> None:
    assert len(ROWS) >= 12
    assert all(len(row) == 2 for row in ROWS)


@pytest.mark.parametrize("shown_by", [row[1] for row in ROWS], ids=[row[0][:40] for row in ROWS])
def test_what_is_planted_is_there_and_commands_take_tests(shown_by: str) -> None:
    commands = re.findall(r"`(pytest [^`]*)`", shown_by)
    planted = re.findall(r'"([^"]*)"', re.sub(r"`[^`]*`", "", shown_by))
    assert commands or shown_by.startswith("By no test, and ")
    assert set(planted) <= {each.name for each in MISTAKES}
    assert ("planted: " in shown_by) == bool(planted)
    for command in commands:
        assert selection_of(command).functions(), f"this takes no test: {command}"
