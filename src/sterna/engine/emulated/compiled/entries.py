"""Entry points from Python: the compiled functions, with the tables given by their addresses.

Passing eight arrays takes Python several microseconds, longer than most of these functions run.
So it passes one array of integers with the addresses and sizes of the others.

The compiled code of these functions is cached for later processes; all other functions are
compiled into them.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit
from numpy.typing import NDArray

from sterna.engine.emulated.compiled import moves, prefixes, reports, stepping
from sterna.engine.emulated.compiled.pointers import tables_at
from sterna.engine.emulated.compiled.tables import Tables
from sterna.folders import users_folder
from sterna.types import MAX_ENDED, OUTPUT_LENGTHS


def _source() -> int:
    """Checksum of the sources of all compiled functions, and of constants that they import."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "durations.py"]
    constants = repr((OUTPUT_LENGTHS, MAX_ENDED)).encode()
    return zlib.crc32(b"".join([constants, *[source.read_bytes() for source in sources]]))


SOURCE = _source()
"""Default argument of every function here, which invalidates numba's cache when a source changes.
Its key contains the file of a function, not the files of functions compiled into it, and the types
of the arguments, which include the value of an omitted default."""


def places_of(tables: Tables) -> NDArray[np.int64]:
    """Addresses and sizes of the tables; valid as long as the tables exist."""
    rows, running, reported = tables.rows, tables.running, tables.reports
    sizes = (
        len(rows),
        len(tables.requests),
        running.shape[1],
        tables.remainders.shape[1],
        tables.counts.shape[1],
        reported.shape[2],
        len(tables.notes),
    )
    return np.array([*(each.ctypes.data for each in tables), *sizes], np.int64)


def _compiled(function: Callable[..., Any]) -> Any:
    """Decorator: numba compiles the function, and caches it in the temporary folder if neither the
    package's folder nor the user's can be written to."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:
        config.CACHE_DIR = str(users_folder("compiled"))
        return njit(cache=True)(function)


@_compiled
def advance(places: Any, until_s: float, source: int = SOURCE) -> None:
    """See `stepping.advance`."""
    stepping.advance(tables_at(places), until_s)


@_compiled
def advance_and_list(places: Any, until_s: float, listed: Any, source: int = SOURCE) -> int:
    """See `stepping.advance`, then `reports.list_changed`."""
    tables = tables_at(places)
    stepping.advance(tables, until_s)
    return reports.list_changed(tables, listed)


@_compiled
def advance_to_notice(
    places: Any, until_s: float, room_blocks: int, growth_steps: float, source: int = SOURCE
) -> tuple[int, float]:
    """See `stepping.advance_to_notice`."""
    return stepping.advance_to_notice(tables_at(places), until_s, room_blocks, growth_steps)


@_compiled
def has_room(
    places: Any, r: int, num_blocks: int, growth_steps: float, source: int = SOURCE
) -> bool:
    """See `reports.has_room`."""
    return reports.has_room(tables_at(places), r, num_blocks, growth_steps)


@_compiled
def advance_row(places: Any, r: int, until_s: float, source: int = SOURCE) -> None:
    """See `stepping.advance_row`."""
    stepping.advance_row(tables_at(places), r, until_s)


@_compiled
def begin_step(places: Any, r: int, now_s: float, source: int = SOURCE) -> bool:
    """See `stepping.begin_step`."""
    return stepping.begin_step(tables_at(places), r, now_s)


@_compiled
def add(
    places: Any, r: int, index: int, dispatch_number: int, now_s: float, source: int = SOURCE
) -> None:
    """See `stepping.add`."""
    stepping.add(tables_at(places), r, index, dispatch_number, now_s)


@_compiled
def take_report(places: Any, which: int, r: int, source: int = SOURCE) -> None:
    """See `reports.take_report`."""
    reports.take_report(tables_at(places), which, r)


@_compiled
def list_requests(places: Any, r: int, listed: Any, source: int = SOURCE) -> int:
    """See `reports.list_requests`."""
    return reports.list_requests(tables_at(places), r, listed)


@_compiled
def sample_memory(
    places: Any, listed: Any, source: int = SOURCE
) -> tuple[int, int, int, int, int, int]:
    """See `reports.sample_memory`."""
    return reports.sample_memory(tables_at(places), listed)


@_compiled
def progress_of(
    places: Any, r: int, index: int, source: int = SOURCE
) -> tuple[bool, bool, int, int, bool]:
    """See `reports.progress_of`."""
    return reports.progress_of(tables_at(places), r, index)


@_compiled
def drain(places: Any, r: int, index: int, source: int = SOURCE) -> None:
    """See `moves.drain`."""
    moves.drain(tables_at(places), r, index)


@_compiled
def resume(places: Any, r: int, index: int, source: int = SOURCE) -> None:
    """See `moves.resume`."""
    moves.resume(tables_at(places), r, index)


@_compiled
def adopt(places: Any, r: int, index: int, num_blocks: int, source: int = SOURCE) -> None:
    """See `moves.adopt`."""
    moves.adopt(tables_at(places), r, index, num_blocks)


@_compiled
def forget(places: Any, r: int, source: int = SOURCE) -> None:
    """See `prefixes.forget`."""
    prefixes.forget(tables_at(places), r)


@_compiled
def list_coming(places: Any, index: int, listed: Any, source: int = SOURCE) -> None:
    """See `prefixes.list_coming`."""
    prefixes.list_coming(tables_at(places), index, listed)


@_compiled
def leave(places: Any, r: int, held: Any, source: int = SOURCE) -> int:
    """See `prefixes.leave`."""
    return prefixes.leave(tables_at(places), r, held)


@_compiled
def keep_prefix(
    places: Any, r: int, index: int, first_block: int, listed: Any, source: int = SOURCE
) -> int:
    """See `prefixes.keep_prefix`."""
    return prefixes.keep_prefix(tables_at(places), r, index, first_block, listed)


@_compiled
def adopt_prefix(
    places: Any,
    r: int,
    index: int,
    first_block: int,
    num_blocks: int,
    listed: Any,
    source: int = SOURCE,
) -> None:
    """See `prefixes.adopt_prefix`."""
    prefixes.adopt_prefix(tables_at(places), r, index, first_block, num_blocks, listed)
