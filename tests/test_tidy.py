"""Plain technical English in code and pages, as far as a test can check it.

Module docstrings begin with the thing that they describe, and some words of an older dialect of
this project do not come back. CONTRIBUTING.md, Style, has the rule; docs/glossary.md the terms.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOURCES = sorted(
    path
    for folder in ("src/sterna", "fault_simulation", "bench", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")]
)

NO_BEGINNINGS = {
    "which",
    "what",
    "who",
    "whoever",
    "whose",
    "how",
    "whether",
    "when",
    "where",
    "why",
}

BANNED = re.compile(
    r"\b(whoever|nobody|somebody|everybody|so long(?! as)|so many|any more(?! than)|is had)\b",
    re.IGNORECASE,
)
"""Processes and requests are things: name them. Amounts and times have nouns."""


def text_of(source: str) -> Iterator[tuple[int, str]]:
    """The comments and strings of Python code, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def dialect_of(path: Path) -> list[str]:
    """The banned words of a file, each with its line."""
    content = path.read_text("utf-8")
    pieces = text_of(content) if path.suffix == ".py" else [(1, content)]
    return [
        f"{first + text[: found.start()].count(chr(10))}: {found.group()}"
        for first, text in pieces
        # A phrase may be broken over two lines.
        for found in BANNED.finditer(text.replace("\n", " "))
    ]


def begins_with_a_thing(source: str) -> bool:
    """Whether the module has a docstring, and it names the thing that it describes first."""
    words = re.findall(r"[\w'`-]+", ast.get_docstring(ast.parse(source)) or "")
    return bool(words) and words[0].lower() not in NO_BEGINNINGS


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_begins_with_the_thing_that_it_describes(path: Path) -> None:
    assert begins_with_a_thing(path.read_text("utf-8"))


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=name_of)
def test_code_and_pages_are_written_in_plain_words(path: Path) -> None:
    assert dialect_of(path) == []


# ---------------------------------------------------------------- the checks find what they seek


def test_the_files_are_found() -> None:
    assert {"src/sterna/types.py", "bench/common/results_io.py"} <= {*map(name_of, SOURCES)}
    assert {"README.md", "docs/architecture.md"} <= {*map(name_of, PAGES)}


@pytest.mark.parametrize(
    ("docstring", "is_thing"),
    [
        ("Rate limit for a repeated log line.", True),
        ("`sterna serve`: vLLM behind one endpoint.", True),
        ("What lasts is told of once in a while.", False),
        ("Whether it helps to start it again.", False),
        ("", False),
    ],
)
def test_a_beginning_without_a_thing_is_found(docstring: str, is_thing: bool) -> None:
    assert begins_with_a_thing(f'"""{docstring}"""') is is_thing


def test_dialect_is_found_in_comments_strings_and_over_line_ends(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        '"""Text of\n\na thing that is so\nlong."""\n# Nobody knows.\nnobody = "whoever"\n'
    )
    page = tmp_path / "page.md"
    page.write_text("As long as it runs.\nNot any\nmore.\n")
    assert dialect_of(code) == ["3: so long", "5: Nobody", "6: whoever"]
    assert dialect_of(page) == ["2: any more"]
