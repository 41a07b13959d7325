"""Values of options: types for argparse, each of which parses a text, and files to be written."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sterna.errors import ConfigurationError
from sterna.workload.seeds import MAX_SEED

Value = TypeVar("Value")


def positive(text: str) -> float:
    """Return a positive, finite number."""
    return _value("positive number", text, float, lambda value: 0 < value < math.inf)


def fraction(text: str) -> float:
    """Return a number from 0 to 1."""
    return _value("fraction (0 to 1)", text, float, lambda value: 0 <= value <= 1)


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    return _value("count (1 or more)", text, int, lambda value: value >= 1)


def seed(text: str) -> int:
    """Return a seed in the range of numpy; the text may be hexadecimal."""
    return _value(
        "seed (0 to 2^32 - 1)",
        text,
        lambda text: int(text, 0),
        lambda value: 0 <= value <= MAX_SEED,
    )


def bounds(text: str) -> tuple[int, int]:
    """Return two counts, separated by a colon."""
    return _value("MIN:MAX", text, _pair, lambda pair: min(pair) >= 1)


def require_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written behind a long run.

    Raises:
        ConfigurationError: it cannot be opened; the message names the option.
    """
    # Those of pathlib raise where a folder above may not be entered.
    if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise ConfigurationError(f"{option} {path}: there is no folder {path.parent}")
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigurationError(f"{option} {path} cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()


def _pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high)


def _value(
    kind: str, text: str, read: Callable[[str], Value], is_valid: Callable[[Value], bool]
) -> Value:
    """Raises ArgumentTypeError: the text is no such value."""
    try:
        value = read(text)
    except ValueError:
        pass
    else:
        if is_valid(value):
            return value
    raise argparse.ArgumentTypeError(f"invalid {kind} value: {text!r}")
