"""Which words are values of options, and what the others are called."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from sterna.cli.options.option_values import bounds, count, fraction, positive, seed


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (positive, "0.5", 0.5),
        (positive, "1e-9", 1e-9),
        (fraction, "0", 0.0),
        (fraction, "0.5", 0.5),
        (fraction, "1", 1.0),
        (count, "1", 1),
        (count, "12", 12),
        (seed, "0", 0),
        (seed, "0xff", 255),
        (seed, "4294967295", 4_294_967_295),
        (bounds, "1:1", (1, 1)),
        (bounds, "2:16", (2, 16)),
    ],
)
def test_a_value_is_read(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts", "name"),
    [
        (positive, ["0", "-1", "inf", "nan", "x", ""], "positive number"),
        (fraction, ["-0.1", "1.1", "nan", "x"], "fraction (0 to 1)"),
        (count, ["0", "-1", "1.5", "x"], "count (1 or more)"),
        (seed, ["-1", "4294967296", "1.5", "x"], "seed (0 to 2^32 - 1)"),
        (bounds, ["1", "0:1", "1:0", ":", "1:2:3", "a:b"], "MIN:MAX"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_another_word_is_refused_by_the_name_of_what_is_wanted(
    read: Callable[[str], Any], texts: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--value", type=read)
    for text in texts:
        with pytest.raises(SystemExit):
            parser.parse_args([f"--value={text}"])
        assert f"argument --value: invalid {name} value: '{text}'" in capsys.readouterr().err
