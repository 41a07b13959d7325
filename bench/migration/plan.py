"""Cells of the migration benchmark: those of a plan, their order, and those left to measure.

A group is what one start of the instances serves; within it, the cells of one length are measured
in turns on the same requests, so that they can be compared.
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
    """What to measure.

    Attributes:
        num_samples: migrations a cell.
        num_busy_live_samples: the same for live migrations to a busy instance, which wait for
            the end of its step: anything between nothing and a step, whose median takes more
            samples to be known as well.
        num_recompute_samples: the same for recompute, of which one at 8k tokens takes half a
            minute on a CPU.
    """

    modes: Sequence[str] = MODES
    transports: Sequence[str] = TRANSPORTS
    tokens: Sequence[int] = TOKENS
    batches: Sequence[str] = BATCHES
    num_samples: int = 11
    num_busy_live_samples: int = 31
    num_recompute_samples: int = 5

    def count(self, cell: Cell) -> int:
        """How many migrations make the cell's row."""
        if cell.mode == "recompute":
            return self.num_recompute_samples
        is_waiting = cell.mode == "live" and cell.busy
        return self.num_busy_live_samples if is_waiting else self.num_samples


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that are measured on the same instances.

    Attributes:
        transport: what the instances are started with.
        cells: those to measure side by side, for each length.
    """

    transport: str
    busy: bool
    cells: tuple[tuple[Cell, ...], ...]


def cells(plan: Plan) -> Iterator[Cell]:
    """Yields the plan's cells, those of a group and of a length next to each other."""
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
    """Returns what is left to measure when these rows are there."""
    left = [cell for cell in cells(plan) if not any(cell.matches(row) for row in rows)]
    found = []
    for (transport, busy), members in groupby(left, key=lambda cell: (cell.transport, cell.busy)):
        by_length = groupby(members, key=lambda cell: cell.tokens)
        # Recompute copies nothing, so any transport will do.
        group = Group(transport or "shm", busy, tuple(tuple(each) for _, each in by_length))
        found.append(group)
    return found


def in_order(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the plan's rows that are there, in the plan's order."""
    return [row for cell in cells(plan) for row in rows if cell.matches(row)]


def turns(counts: Mapping[T, int]) -> list[T]:
    """Returns what to measure one after the other, so that each is measured so many times.

    Spread evenly, so that whatever drifts meanwhile meets all alike. Of those that are measured
    equally often the first one changes from turn to turn: a request that goes to and fro would
    else be copied always in one direction in one mode.
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
        folder: where it is.
        quick: such runs have a file of their own, and leave that of the others alone.
        resume: take the rows of any run.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, quick: bool, resume: bool
    ) -> None:
        self._path = folder / ("migration_quick.json" if quick else "migration.json")
        self._key = _key(config)
        self._resume = resume

    def rows(self) -> list[dict[str, Any]]:
        """Those of a run of the same code and options that was interrupted."""
        try:
            unfinished = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return []
        rows: list[dict[str, Any]] = unfinished["rows"]
        return rows if self._resume or self._key == unfinished["key"] else []

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep these."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"key": self._key, "rows": rows}))

    def forget(self) -> None:
        """The run has ended."""
        self._path.unlink(missing_ok=True)


def _key(config: Mapping[str, Any]) -> str:
    """Names what is measured, and how: rows under another key are of another run."""
    digest = hashlib.sha256(json.dumps(config).encode())
    for folder in ("src", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
