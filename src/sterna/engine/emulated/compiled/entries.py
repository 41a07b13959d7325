"""Entry points from Python: the compiled functions, with the tables given by their addresses.

Passing a dozen arrays takes Python several microseconds, longer than most of these functions run.
So it passes one array of integers with the addresses and sizes of the others.

The compiled code of these functions is cached for later processes; all other functions are
compiled into them.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from sterna.engine.emulated.compiled import moves, prefixes, reports, stepping
from sterna.engine.emulated.compiled.tables import (
    CACHED,
    ENGINE,
    REQUEST,
    SETTINGS,
    Tables,
)


def _source() -> int:
    """Checksum of the sources of all compiled functions."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "durations.py"]
    return zlib.crc32(b"".join(source.read_bytes() for source in sources))


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
        len(tables.preempted),
        len(tables.totals),
        len(tables.hashes),
        tables.cached.shape[1],
        tables.buckets.shape[1],
    )
    return np.array([*(each.ctypes.data for each in tables), *sizes], np.int64)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """A pointer to this address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit
def _tables(places: Any) -> Tables:
    """The tables at these places."""
    num_rows, num_requests, max_num_seqs = places[14], places[15], places[16]
    block_size, num_priorities, report_size = places[17], places[18], places[19]
    num_hashes, num_cached, num_buckets = places[22], places[23], places[24]
    return Tables(
        carray(_pointer(places[0]), (num_rows,), ENGINE),
        carray(_pointer(places[1]), (num_requests,), REQUEST),
        carray(_pointer(places[2]), (num_rows, max_num_seqs), np.int64),
        carray(_pointer(places[3]), (num_rows, block_size), np.int64),
        carray(_pointer(places[4]), (num_rows, num_priorities), np.int64),
        carray(_pointer(places[5]), (3, num_rows, report_size), np.int64),
        carray(_pointer(places[6]), (places[20],), np.int64),
        carray(_pointer(places[7]), (places[21],), np.int64),
        carray(_pointer(places[8]), (1,), SETTINGS),
        carray(_pointer(places[9]), (num_hashes,), np.int64),
        carray(_pointer(places[10]), (num_hashes,), np.int32),
        carray(_pointer(places[11]), (num_rows, num_cached), CACHED),
        carray(_pointer(places[12]), (num_rows, num_buckets), np.int32),
        carray(_pointer(places[13]), (max_num_seqs,), np.int64),
    )


@njit(cache=True)
def advance(places: Any, until_s: float, source: int = SOURCE) -> None:
    """See `stepping.advance`."""
    stepping.advance(_tables(places), until_s)


@njit(cache=True)
def advance_and_list(places: Any, until_s: float, listed: Any, source: int = SOURCE) -> int:
    """See `stepping.advance`, then `reports.list_changed`."""
    tables = _tables(places)
    stepping.advance(tables, until_s)
    return reports.list_changed(tables, listed)


@njit(cache=True)
def advance_to_turn(places: Any, until_s: float, source: int = SOURCE) -> int:
    """See `stepping.advance_to_turn`."""
    return stepping.advance_to_turn(_tables(places), until_s)


@njit(cache=True)
def advance_row(places: Any, r: int, until_s: float, source: int = SOURCE) -> None:
    """See `stepping.advance_row`."""
    stepping.advance_row(_tables(places), r, until_s)


@njit(cache=True)
def begin_step(places: Any, r: int, now_s: float, source: int = SOURCE) -> bool:
    """See `stepping.begin_step`."""
    return stepping.begin_step(_tables(places), r, now_s)


@njit(cache=True)
def add(
    places: Any, r: int, index: int, dispatch_number: int, now_s: float, source: int = SOURCE
) -> None:
    """See `stepping.add`."""
    stepping.add(_tables(places), r, index, dispatch_number, now_s)


@njit(cache=True)
def take_report(places: Any, which: int, r: int, source: int = SOURCE) -> None:
    """See `reports.take_report`."""
    reports.take_report(_tables(places), which, r)


@njit(cache=True)
def list_requests(places: Any, r: int, listed: Any, source: int = SOURCE) -> int:
    """See `reports.list_requests`."""
    return reports.list_requests(_tables(places), r, listed)


@njit(cache=True)
def list_blocking(places: Any, listed: Any, source: int = SOURCE) -> tuple[int, int, int, int]:
    """See `reports.list_blocking`."""
    return reports.list_blocking(_tables(places), listed)


@njit(cache=True)
def progress_of(
    places: Any, r: int, index: int, source: int = SOURCE
) -> tuple[bool, bool, int, int, bool]:
    """See `reports.progress_of`."""
    return reports.progress_of(_tables(places), r, index)


@njit(cache=True)
def drain(places: Any, r: int, index: int, source: int = SOURCE) -> None:
    """See `moves.drain`."""
    moves.drain(_tables(places), r, index)


@njit(cache=True)
def resume(places: Any, r: int, index: int, source: int = SOURCE) -> None:
    """See `moves.resume`."""
    moves.resume(_tables(places), r, index)


@njit(cache=True)
def adopt(places: Any, r: int, index: int, num_blocks: int, source: int = SOURCE) -> None:
    """See `moves.adopt`."""
    moves.adopt(_tables(places), r, index, num_blocks)


@njit(cache=True)
def take(places: Any, r: int, num_blocks: int, source: int = SOURCE) -> None:
    """See `prefixes.take`."""
    prefixes.take(_tables(places), r, num_blocks)


@njit(cache=True)
def leave(places: Any, r: int, held: Any, source: int = SOURCE) -> int:
    """See `prefixes.leave`."""
    return prefixes.leave(_tables(places), r, held)
