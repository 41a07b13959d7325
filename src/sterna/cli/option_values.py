"""What options' values may be; argparse names these in "invalid ... value"."""

from sterna.workload.seed import MAX_SEED


def positive(text: str) -> float:
    """The number that the text names.

    Raises:
        ValueError: it is none, or not positive, or infinite.
    """
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1.

    Raises:
        ValueError: it is none.
    """
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def count(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        ValueError: it is none.
    """
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def seed(text: str) -> int:
    """What numpy takes for a seed, also in hexadecimal.

    Raises:
        ValueError: it is none.
    """
    value = int(text, 0)
    if not 0 <= value <= MAX_SEED:
        raise ValueError
    return value


def bounds(text: str) -> tuple[int, int]:
    """Two counts with a colon between them.

    Raises:
        ValueError: it is something else.
    """
    low, _, high = text.partition(":")
    return count(low), count(high)


positive.__name__, fraction.__name__ = "positive number", "fraction (0 to 1)"
count.__name__, seed.__name__ = "count (1 or more)", "seed (0 to 2^32 - 1)"
bounds.__name__ = "MIN:MAX"
