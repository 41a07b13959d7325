"""Texts that benchmarks write into pages."""

from pathlib import Path

import pytest

from bench.common.pages import END, begin_mark, write_marked

BEGIN = begin_mark("sterna bench it")
ROOT = Path(__file__).parents[3]


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    other = f"{begin_mark('sterna bench other')}\nother\n{END}\n"
    page.write_text(f"# Title\n\n{other}{BEGIN}\nold\n{END}\n\nMore.\n")

    write_marked(page, "sterna bench it", "new")

    assert page.read_text() == f"# Title\n\n{other}{BEGIN}\n\nnew\n\n{END}\n\nMore.\n"


@pytest.mark.parametrize("text", ["# Title\n", f"{BEGIN}\nno end\n", f"{END}\n{BEGIN}\n"])
def test_a_page_without_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)

    with pytest.raises(ValueError, match="needs the marks"):
        write_marked(page, "sterna bench it", "new")
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("docs/benchmarks.md", "sterna bench autoscaling"),
        ("docs/benchmarks.md", "sterna bench chaos"),
        ("docs/benchmarks.md", "sterna bench draining"),
        ("docs/benchmarks.md", "sterna bench instance-start"),
        ("docs/benchmarks.md", "sterna bench migration"),
        ("docs/benchmarks.md", "sterna bench priorities"),
        ("README.md", "sterna bench kinds"),
        ("docs/models.md", "sterna bench kinds"),
        ("docs/internals/fault_simulation.md", "python -m bench.simulation.sim_soak --planted"),
        ("docs/internals/fidelity.md", "sterna bench fidelity"),
        ("docs/internals/parts.md", "python -m bench.parts"),
        ("docs/simulation.md", "sterna bench simulator"),
    ],
)
def test_the_projects_pages_have_the_marks(page: str, command: str) -> None:
    """Each pair once, with no other one in between, which would be replaced, too."""
    _, text = (ROOT / page).read_text().split(begin_mark(command))
    written, _ = text.split(END, maxsplit=1)
    assert "<!--" not in written
