"""Notes about a start that takes long."""

from sterna.runtime.home.launch import COMPILES, NOTE_INTERVAL_S, StartNotes


def test_a_short_start_needs_no_note() -> None:
    notes = StartNotes(100.0, compiles=True)
    assert notes.note(100.0 + NOTE_INTERVAL_S - 0.1) is None
    notes.end()
    assert notes.note(1_000.0) is None


def test_a_long_start_says_that_it_goes_on_and_once_why() -> None:
    notes = StartNotes(100.0, compiles=True)
    assert notes.note(120.0) == f"still starting after 20 s: {COMPILES}"
    assert notes.note(139.9) is None
    assert notes.note(141.0) == "still starting after 41 s"
    assert notes.note(160.9) is None
    assert notes.note(161.0) == "still starting after 61 s"


def test_engines_that_compile_nothing_blame_nothing() -> None:
    assert StartNotes(0.0, compiles=False).note(20.0) == "still starting after 20 s"
