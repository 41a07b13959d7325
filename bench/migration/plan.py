"""Cells of the migration benchmark: those of a plan, their order, and those left to measure.

The cells of a group are measured with one start of the instances. Within it, the cells of one
length are measured in turns on the same requests, so that they can be compared.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from bench.common.results_io import ROOT
from bench.migration.samples import Cell

TOKENS = (256, 512, 1024, 2048, 4096, 8192)
MODES = ("live", "stop_copy", "recompute")
TRANSPORTS = ("gloo", "tcp", "shm")
BATCHES = ("idle", "busy")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        num_samples: migrations of each cell.
        num_live_samples: the same for live migrations, of which the longest matter as well. To a
            busy instance they wait for the end of its step, for any part of a step.
        num_recompute_samples: the same for recompute, which takes half a minute for 8k tokens on a
            CPU.
    """

    modes: Sequence[str] = MODES
    transports: Sequence[str] = TRANSPORTS
    tokens: Sequence[int] = TOKENS
    batches: Sequence[str] = BATCHES
    num_samples: int = 11
    num_live_samples: int = 31
    num_recompute_samples: int = 5

    def count(self, cell: Cell) -> int:
        """The number of migrations for the cell's row."""
        if cell.mode == "recompute":
            return self.num_recompute_samples
        return self.num_live_samples if cell.mode == "live" else self.num_samples


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that are measured on the same instances.

    Attributes:
        transport: the transport of the instances.
        cells: the cells to measure side by side, for each length.
    """

    transport: str
    busy: bool
    cells: tuple[tuple[Cell, ...], ...]


def cells(plan: Plan) -> Iterator[Cell]:
    """Yields the plan's cells, ordered by group and length."""
    copying = [mode for mode in plan.modes if mode != "recompute"]
    for batch in plan.batches:
        for transport in plan.transports if copying else ():
            for tokens in plan.tokens:
                for mode in copying:
                    yield Cell(mode, transport, tokens, batch == "busy")
    if "recompute" in plan.modes:
        for batch in plan.batches:
            for tokens in plan.tokens:
                yield Cell("recompute", None, tokens, batch == "busy")


def groups(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Returns the cells that are left to measure besides these rows."""
    left = [cell for cell in cells(plan) if not any(cell.matches(row) for row in rows)]
    found = []
    for (transport, busy), members in groupby(left, key=lambda cell: (cell.transport, cell.busy)):
        by_length = groupby(members, key=lambda cell: cell.tokens)
        # Recompute copies nothing, so the transport does not matter.
        group = Group(transport or "shm", busy, tuple(tuple(each) for _, each in by_length))
        found.append(group)
    return found


def in_order(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the existing rows of the plan, in the plan's order."""
    return [row for cell in cells(plan) for row in rows if cell.matches(row)]


def turns(counts: Mapping[T, int]) -> list[T]:
    """Returns the order of the measurements, in which each cell occurs its number of times.

    They are spread evenly, so that a drift affects all alike. Of cells with equal numbers the first
    one changes from turn to turn: otherwise a request that goes to and fro would always be copied
    in the same direction in one mode.
    """
    places = [
        ((turn + 0.5) / counts[each], rank if turn % 2 == 0 else -rank, each)
        for rank, each in enumerate(counts)
        for turn in range(counts[each])
    ]
    return [each for *_, each in sorted(places, key=lambda place: place[:2])]


class Unfinished:
    """The file that keeps the rows of an interrupted run until it has ended.

    Args:
        folder: the folder of the file.
        quick: quick runs have a file of their own.
        resume: accept the rows of any run.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, quick: bool, resume: bool
    ) -> None:
        self._path = folder / ("migration_quick.json" if quick else "migration.json")
        self._key = _key(config)
        self._resume = resume

    def rows(self) -> list[dict[str, Any]]:
        """The rows of an interrupted run of the same code and options."""
        try:
            unfinished = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return []
        rows: list[dict[str, Any]] = unfinished["rows"]
        return rows if self._resume or self._key == unfinished["key"] else []

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Save these rows."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"key": self._key, "rows": rows}))

    def forget(self) -> None:
        """Remove the file, since the run has ended."""
        self._path.unlink(missing_ok=True)


def _key(config: Mapping[str, Any]) -> str:
    """The key of a run: its code and options. Rows under another key are of another run."""
    digest = hashlib.sha256(json.dumps(config).encode())
    for folder in ("src", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
