"""docs/operations.md: what it says shows something is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIM = re.compile(r"`((?:process|emulated)/test_\w+\.py)(?: -k (\w+))?`")


def test_every_row_of_what_dies_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    section = page.partition("## What happens when ... dies")[2].partition("\n## ")[0]
    rows = section.partition("|---")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(rows) >= 12
    for row in rows:
        claims = CLAIM.findall(row.split("|")[-2])
        assert claims, f"no test is named: {row}"
        for path, words in claims:
            names = re.findall(
                r"def (test_\w+)", (ROOT / "tests" / "serve" / path).read_text("utf-8")
            )
            assert any(words in name for name in names), f"{path} has no test of {words}"
