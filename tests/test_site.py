"""The documentation site: every page is in it, and its links are settled. `make site` builds it."""

from pathlib import Path

import pytest

from scripts.site import ROOT, page_names, settled, stage

PAGE = ROOT / "docs" / "faq.md"


def test_every_page_is_in_a_section_once() -> None:
    names = list(page_names())
    pages = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(names) == sorted({*map(str, pages), "CONTRIBUTING", "CHANGELOG"})


@pytest.mark.parametrize(
    ("text", "found", "files"),
    [
        ("[a](models.md#x)", "[a](models.md#x)", set()),
        ("[a](#here) [b](https://example.org)", "[a](#here) [b](https://example.org)", set()),
        ("[a](../LICENSE)", "[a](../LICENSE)", {"LICENSE"}),
        ("see [the results](../bench/results/).", "see the results.", set()),
        ("[a](../src/sterna/workload/data/README.md)", "a", set()),
        ("[a](modles.md)", "[a](modles.md)", set()),
        ('<img src="../LICENSE">', '<img src="../LICENSE">', {"LICENSE"}),
    ],
)
def test_links_lead_to_what_the_site_has(text: str, found: str, files: set[str]) -> None:
    pages = {ROOT / "docs" / "models.md"}
    assert settled(PAGE, text, pages) == (found, {ROOT / name for name in files})


def test_the_first_page_has_the_sections(tmp_path: Path) -> None:
    images = stage(tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert text.startswith("# Sterna\n")
    assert ":caption: Operations\n\ndocs/operations/README\ndocs/operations/install\n" in text
    assert ROOT / "bench" / "results" / "downtime_light.svg" in images
