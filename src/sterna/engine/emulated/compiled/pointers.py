"""Tables by their addresses, in compiled functions."""

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from sterna.engine.emulated.compiled.tables import (
    CACHED,
    ENGINE,
    REQUEST,
    SETTINGS,
    Contents,
    Tables,
)


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """A pointer to this address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit
def tables_at(places: Any) -> Tables:
    """The tables at the addresses of `entries.places_of`."""
    num_rows, num_requests, max_num_seqs, block_size = places[8], places[9], places[10], places[11]
    num_priorities, report_size = places[12], places[13]
    return Tables(
        carray(pointer(places[0]), (num_rows,), ENGINE),
        carray(pointer(places[1]), (num_requests,), REQUEST),
        carray(pointer(places[2]), (num_rows, max_num_seqs), np.int64),
        carray(pointer(places[3]), (num_rows, block_size), np.int64),
        carray(pointer(places[4]), (num_rows, num_priorities), np.int64),
        carray(pointer(places[5]), (3, num_rows, report_size), np.int64),
        carray(pointer(places[6]), (places[14],), np.int64),
        carray(pointer(places[7]), (1,), SETTINGS),
    )


@njit
def contents_of(tables: Tables) -> Contents:
    """The tables of the prefix caches."""
    rule, num_rows = tables.settings[0], tables.rows.shape[0]
    return Contents(
        carray(pointer(rule.hashes_at), (rule.num_hashes,), np.int64),
        carray(pointer(rule.held_at), (rule.num_hashes,), np.int32),
        carray(pointer(rule.cached_at), (num_rows, rule.num_cached), CACHED),
        carray(pointer(rule.buckets_at), (num_rows, rule.num_buckets), np.int32),
    )
