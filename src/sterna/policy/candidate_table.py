"""The instances in a table: what dispatch compares of all of them stands in columns. Pure.

A scheduler of a thousand instances compares all of them for each request. With one number of every
instance side by side that takes a few operations on arrays. A report of one instance changes one
row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sterna.policy.virtual_usage import Candidate
from sterna.types import InstanceId

Column = NDArray[np.float64]
"""A number of each instance. Those that count are whole, and below 2^53: they are exact."""

Order = Callable[[Candidate], float | tuple[float | InstanceId, ...]]
"""A key by which instances can be compared; a rule prefers the smallest."""

(
    IS_TERMINATING,
    NUM_REQUESTS,
    NUM_RUNNING,
    TOTAL_TOKENS,
    FREENESS,
    UNCOMPUTED_TOKENS,
    UNCOMPUTED_PAIRS,
    NUM_DISPATCHED_TOKENS,
    REAL_LOAD_TOKENS,
    VIRTUAL_LOAD_TOKENS,
    ROOM_TOKENS,
    HEADROOMS_TOKENS,
    NORMAL_FREE_TOKENS,
    BATCH_SIZE,
) = range(14)
"""The columns: properties of `Candidate` and of its load. The last but one is the load's, less the
demands in flight; the last one is what a freeness is divided by."""

NUM_COLUMNS = 14

FEW_ROWS = 32
"""Fewer rows are written one by one, which is faster then."""


class CandidateTable(Sequence[Candidate]):
    """The instances among which a decision chooses, as a sequence and in columns.

    The columns are made when one is first asked for; most rules need none.

    Args:
        candidates: in the order of the rows. Rules that settle ties by the id expect the order of
            ids.
    """

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._candidates: list[Candidate] | None = list(candidates)
        self._columns: NDArray[np.float64] | None = None
        # Rows that have changed since the columns were made.
        self._changed: set[int] = set()
        self._rows: dict[InstanceId, int] | None = None
        # The rows whose instances are still without this share of their headrooms.
        self._unshared: set[int] = set()
        self._headroom_share = 1.0
        # Of a part of another table: that table, and the rows.
        self._whole: CandidateTable | None = None
        self._part: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._every if self._part is None else self._part)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._every)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> list[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | list[Candidate]:
        if self._whole is not None and self._part is not None and isinstance(place, int):
            return self._whole[int(self._part[place])]
        if isinstance(place, int):
            return self._at(place)
        return self._every[place]

    @property
    def columns(self) -> NDArray[np.float64]:
        """All columns, for a decision that needs several: an array of numbers by instances."""
        if self._columns is None:
            self._changed.clear()
            rows = [_row(each) for each in self._every]
            self._columns = np.array(rows, np.float64).reshape(-1, NUM_COLUMNS).T.copy()
        elif self._changed:
            columns, every, changed = self._columns, self._every, self._changed
            if len(changed) < FEW_ROWS:
                for row in changed:
                    columns[:, row] = _row(every[row])
            else:
                places = list(changed)
                columns[:, places] = np.array([_row(every[row]) for row in places], np.float64).T
            changed.clear()
        return self._columns

    def column(self, name: int) -> Column:
        """One number of each instance, by the name of the column; not to be changed."""
        column: Column = self.columns[name]
        return column

    def of(self, instance_id: InstanceId) -> Candidate:
        """The instance of this id, which is in the table."""
        if self._whole is not None:
            return self._whole.of(instance_id)
        return self._at(self._row_of[instance_id])

    def find(self, instance_id: InstanceId) -> Candidate | None:
        """The instance of this id; None if it is not in the table. Not in a part of a table."""
        row = self._row_of.get(instance_id)
        return None if row is None else self._at(row)

    def spread(self, of_instances: Mapping[InstanceId, float]) -> Column:
        """A number of each instance from those that have one; 0 for the others."""
        if self._whole is not None:
            return self._whole.spread(of_instances)[self._part]
        values = np.zeros(len(self._every))
        for instance_id, value in of_instances.items():
            row = self._row_of.get(instance_id)
            if row is not None:
                values[row] = value
        return values

    def staying(self) -> "CandidateTable":
        """Those that may get requests: terminating ones only while no other exists."""
        is_terminating = self.column(IS_TERMINATING)
        num_terminating = np.count_nonzero(is_terminating)
        return self.where(is_terminating == 0) if 0 < num_terminating < len(self) else self

    def where(self, is_in: NDArray[np.bool_]) -> "CandidateTable":
        """The part of the table whose rows are marked; the table itself if all are."""
        if np.count_nonzero(is_in) == len(is_in):
            return self
        part = CandidateTable()
        part._candidates = None
        part._whole = self
        part._part = np.flatnonzero(is_in)
        part._columns = self.columns.take(part._part, axis=1)
        return part

    def put(self, candidates: Mapping[int, Candidate]) -> None:
        """Replace the instances of these rows by what is known of them now. Not in a part of a
        table."""
        every = self._every
        for row, candidate in candidates.items():
            every[row] = candidate
        self._changed.update(candidates)

    def with_headroom_share(self, share: float) -> "CandidateTable":
        """A table in which all headrooms count by this share. Not of a part of a table.

        Its columns have it at once, and its instances when they are asked for: with a thousand of
        them that is most of the time of a decision.
        """
        made = CandidateTable(self._every)
        made._rows = self._rows
        made._headroom_share = share
        made._columns = columns = self.columns.copy()
        rows = np.flatnonzero(columns[HEADROOMS_TOKENS])
        made._unshared = set(rows.tolist())
        counted_tokens = share * columns[HEADROOMS_TOKENS, rows]
        columns[VIRTUAL_LOAD_TOKENS, rows] = columns[REAL_LOAD_TOKENS, rows] + counted_tokens
        free_tokens = columns[NORMAL_FREE_TOKENS, rows] - counted_tokens
        freeness = free_tokens / columns[BATCH_SIZE, rows]
        if not self._every[0].policy.divides_overload:
            freeness = np.where(free_tokens > 0, freeness, free_tokens)
        freeness[columns[IS_TERMINATING, rows] != 0] = -np.inf
        columns[FREENESS, rows] = freeness
        return made

    @property
    def _row_of(self) -> dict[InstanceId, int]:
        if self._rows is None:
            self._rows = {each.instance_id: row for row, each in enumerate(self._every)}
        return self._rows

    @property
    def _every(self) -> list[Candidate]:
        if self._candidates is None:
            assert self._whole is not None
            assert self._part is not None
            self._candidates = [self._whole._at(row) for row in self._part.tolist()]
        for row in tuple(self._unshared):
            self._at(row)
        return self._candidates

    def _at(self, row: int) -> Candidate:
        if self._candidates is None:
            return self._every[row]
        if row in self._unshared:
            self._unshared.remove(row)
            candidate = replace(self._candidates[row], headroom_share=self._headroom_share)
            self._candidates[row] = candidate
        return self._candidates[row]


@dataclass(frozen=True, slots=True)
class Choice:
    """The instance that a rule has chosen.

    Attributes:
        eligible: those among which it chose.
        costs: of each of these, if the rule takes the one of the smallest; else None.
        order: that by which it compared them, if not by costs; None if a class has decided.
        by_headroom: whether it is for a request with a headroom, whatever the policy's rule is.
    """

    chosen: Candidate
    eligible: Sequence[Candidate]
    costs: Column | None = None
    order: Order | None = None
    by_headroom: bool = False

    @classmethod
    def first(
        cls, eligible: Sequence[Candidate], order: Order, *, by_headroom: bool = False
    ) -> "Choice":
        """The first in this order; of equal ones, the first in the sequence."""
        return cls(min(eligible, key=order), eligible, order=order, by_headroom=by_headroom)

    @property
    def instance_id(self) -> InstanceId:
        """The id of the chosen one."""
        return self.chosen.instance_id

    def next_best(self) -> Candidate | None:
        """The second in the order; None if there is none, or no order."""
        if self.order is None:
            return None
        others = [each for each in self.eligible if each is not self.chosen]
        return min(others, key=self.order, default=None)


def as_table(candidates: Iterable[Candidate]) -> CandidateTable:
    """The same instances in a table."""
    return candidates if isinstance(candidates, CandidateTable) else CandidateTable(candidates)


def _row(candidate: Candidate) -> tuple[float, ...]:
    # As the properties of `Candidate`, which compute the same sums several times.
    load, in_flight = candidate.load, candidate.in_flight
    num_requests = load.num_running + load.num_queuing
    uncomputed_tokens, uncomputed_pairs = load.uncomputed_tokens, load.uncomputed_pairs
    in_flight_tokens = 0
    batch_size = load.num_running + (1 if load.num_queuing else 0) + len(in_flight)
    if in_flight:
        num_requests += len(in_flight)
        uncomputed_tokens, uncomputed_pairs = (
            candidate.uncomputed_tokens,
            candidate.uncomputed_pairs,
        )
        in_flight_tokens = sum([request.demand_tokens for request in in_flight])
    used_tokens = load.used_tokens + load.prefill_demand_tokens
    load_tokens = used_tokens + load.queued_demand_tokens + in_flight_tokens
    headrooms_tokens = load.normal_free_tokens - load.free_tokens
    room_tokens: float = 0
    if load.num_slots is None or num_requests < load.num_slots:
        room_tokens = load.total_tokens - load_tokens
    return (
        load.is_terminating,
        num_requests,
        load.num_running,
        load.total_tokens,
        candidate.freeness,
        uncomputed_tokens,
        uncomputed_pairs,
        candidate.num_dispatched_tokens,
        load_tokens,
        load_tokens + candidate.headroom_share * headrooms_tokens,
        room_tokens,
        headrooms_tokens,
        load.normal_free_tokens - in_flight_tokens,
        batch_size or 1,
    )
