"""Links between the pages: each relative link has its file, and each anchor its heading."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "bench", "src", "fault_simulation", "models", "tests")
TEMPLATE = ROOT / "bench" / "paper" / "evaluation_template.md"
"""Its links are those of docs/evaluation.md, which is written from it and checked here."""

PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
    }
    - {TEMPLATE}
)

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^()\s]*(?:\([^()]*\))?[^()\s]*)\)")
ATTRIBUTE = re.compile(r"<[^<>]*?\b(?:src|srcset|href)=\"([^\"]*)\"")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def targets(text: str) -> list[str]:
    """The page's links, in order; what stands in code is none."""
    prose = CODE.sub("", FENCE.sub("", text))
    return [*LINK.findall(prose), *ATTRIBUTE.findall(prose)]


def anchors(text: str) -> set[str]:
    """What GitHub names the page's headings."""
    named: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{named[slug]}" if named[slug] else slug)
        named[slug] += 1
    return found


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text("utf-8"))


def broken(page: Path, text: str) -> list[str]:
    """The links of the page's text that lead nowhere."""
    found = []
    for target in targets(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            found.append(target)
    return found


def test_the_pages_are_found() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md"} <= names
    assert {"docs/operations/failures.md", "docs/internals/bugs.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](test_links.py) [b](../README.md#two-commands)", []),
        ("[a](nothing.md)", ["nothing.md"]),
        ("[a](../README.md#no-such-heading)", ["../README.md#no-such-heading"]),
        ('<img src="no.svg">', ["no.svg"]),
        ("![a](no.png)", ["no.png"]),
        ("[`code`](no.md)", ["no.md"]),
        ("`[a](no.md)`\n\n```\n[a](no.md)\n```\n", []),
        ("[a](https://example.org/no.md)", []),
    ],
)
def test_a_broken_link_is_found(text: str, found: list[str]) -> None:
    assert broken(Path(__file__), text) == found


def test_headings_are_named_as_github_names_them() -> None:
    text = "# A `b` c\n## What happens when ... dies\n## Same\n## Same\n```\n# no heading\n```\n"
    assert anchors(text) == {"a-b-c", "what-happens-when--dies", "same", "same-1"}


QUOTED = re.compile(r"`([\w./*]*/[\w*]+\.(?:py|pml|sh))`")
"""A file of the project, as pages name it."""

BASES = (ROOT, ROOT / "src" / "sterna", ROOT / "fault_simulation", ROOT / "tests" / "serve")
"""The folders from which pages count."""


def missing(text: str) -> list[str]:
    """The files that the text names and that are in none of the folders."""
    return [name for name in QUOTED.findall(text) if not any([*base.glob(name)] for base in BASES)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    assert missing(page.read_text("utf-8")) == []


def test_a_file_that_is_missing_is_found() -> None:
    assert missing("`policy/pairing.py`, `tests/policy/test_*.py` and `policy/none.py`") == [
        "policy/none.py"
    ]
