"""Text in a page that a benchmark writes: between two marks, and replaced as a whole."""

from pathlib import Path

END = "<!-- end of what is written -->"


def begin_mark(command: str) -> str:
    """The line that the text of this command begins after."""
    return f"<!-- written by `{command}` -->"


def write_marked(page: Path, command: str, text: str) -> None:
    """Put the text between the marks of the page.

    Raises:
        ValueError: the page, which is left alone, has no such marks.
    """
    begin = begin_mark(command)
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"{page} needs the marks {begin} and {END}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}")
