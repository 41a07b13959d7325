"""The reference pages follow the code."""

import re

import pytest

from scripts.reference_pages import FOLDER, GROUPS, pages
from sterna.cli.serve.serve_options import TABLES

PAGES = pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_reference_page_is_that_of_the_code(name: str) -> None:
    written = (FOLDER / name).read_text("utf-8")
    assert written == PAGES[name], "run `python -m scripts.reference_pages`"


def test_every_option_of_serve_is_in_a_group() -> None:
    assert {id(table) for group in GROUPS.values() for table in group} == {*map(id, TABLES)}


def test_every_option_has_a_row_with_its_default() -> None:
    text = PAGES["options.md"]
    assert re.search(r"^\| `--instances N` \| .+ \| 2 \|$", text, re.MULTILINE)
    assert "| `--rows N` | rows of each table of a printed snapshot | 20 |" in text
    assert "%(default)" not in text


def test_every_message_has_a_heading() -> None:
    headings = re.findall(r"^### (\w+)$", PAGES["messages.md"], re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert {"TokenBatch", "SetDestination", "Reserve", "Commit", "ClusterStats"} <= set(headings)
