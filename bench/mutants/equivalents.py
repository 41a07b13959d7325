"""The list of equivalent mutants, `equivalents.toml`.

An entry names mutants of one line by what does not change when other lines do: the function, the
text of the line, and the change.

    [["sterna.policy.dispatch"]]
    function = "choose"
    line = "if not candidates:"
    changes = ["not candidates -> candidates"]
    reason = "why no test can tell them from the original"
"""

import tomllib
from pathlib import Path

import msgspec

from bench.mutants.operators import Mutant

PATH = Path(__file__).with_name("equivalents.toml")


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mutants of one line that behave as the original does, but for what the reason says."""

    function: str
    line: str
    changes: tuple[str, ...]
    reason: str

    def names(self, mutant: Mutant) -> bool:
        """Whether it is about this mutant of its module."""
        is_same_place = (self.function, self.line) == (mutant.function, mutant.line)
        return is_same_place and mutant.change in self.changes


def load(path: Path = PATH) -> dict[str, tuple[Equivalent, ...]]:
    """The entries of each module.

    Raises:
        msgspec.ValidationError: an entry has not these fields.
    """
    with path.open("rb") as file:
        return msgspec.convert(tomllib.load(file), dict[str, tuple[Equivalent, ...]])


def unmatched(entries: tuple[Equivalent, ...], mutants: list[Mutant]) -> list[str]:
    """Changes of entries that are no mutants of the module: it has changed since."""
    changes = {(each.function, each.line, each.change) for each in mutants}
    return [
        f"{entry.function}: {entry.line}: {change}"
        for entry in entries
        for change in entry.changes
        if (entry.function, entry.line, change) not in changes
    ]
