"""Values that all parts share."""

from sterna.types import earliest


def test_the_earliest_deadline_is_the_first_that_there_is() -> None:
    assert earliest([None, 2.0, 1.0, None]) == 1.0
    assert earliest([0.0, 1.0]) == 0.0
    assert earliest([None, None]) is None
    assert earliest([]) is None
