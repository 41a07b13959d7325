"""Cost of one migration from the arrival times of its tokens; rows of many migrations. Pure.

The downtime of a migration is the delay for its client: the gap between the last token from the
source and the first one from the destination, less the usual gap, a decode step.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from bench.common.results_io import summary

PHASES = ("drain", "copy", "adoption", "first step", "delivery")
"""Of a downtime, in order; `phases_ms` says what they are."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one request that a front end received together, on the monotonic clock."""

    time_s: float
    instance: str
    first_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Cell:
    """The conditions of the measurements of one row.

    Attributes:
        mode: "live", "stop_copy" or "recompute".
        transport: None for recompute, which copies nothing.
        tokens: length of the migrated request, prompt and output.
        busy: whether both instances run a batch besides the migrated request.
    """

    mode: str
    transport: str | None
    tokens: int
    busy: bool

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether the row belongs to this cell."""
        named = (row["mode"], row["transport"], row["tokens"], row["busy"])
        return named == (self.mode, self.transport, self.tokens, self.busy)

    def __str__(self) -> str:
        batch = "busy" if self.busy else "idle"
        return f"{self.mode} {self.transport or '-'} {self.tokens} tokens {batch}"


@dataclass(slots=True)
class Moments:
    """When one instance came to the points of its latest migration, on the monotonic clock of the
    host; None: it did not.

    Attributes:
        drained_s: source: the request had left the batch.
        commit_s: destination: Commit arrived.
        received_s: destination: the blocks of the last stage were in place.
        adopted_s: destination: the request was in the batch.
        outputs_s: when outputs were sent to the front end, by request and first token.
    """

    drained_s: float | None = None
    commit_s: float | None = None
    received_s: float | None = None
    adopted_s: float | None = None
    outputs_s: dict[tuple[str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One migration; all durations in ms.

    Attributes:
        downtime_ms: as the module's docstring defines it; noise can make it negative.
        phases_ms: its parts, as `phases_ms` returns them.
        suspended_ms: from the drain to the verdict, at the source.
        migration_ms: from the order to the first token on the destination.
        steps_ms: decode steps without a migration, of the migrated request and, on busy
            instances, of its neighbours on the source.
        migrating_steps_ms: decode steps on the source during the migration: of the
            neighbours, or, on an idle instance, of the migrated request itself until it left.
    """

    downtime_ms: float
    phases_ms: tuple[float, ...]
    suspended_ms: float
    migration_ms: float
    stages: int
    steps_ms: tuple[float, ...]
    migrating_steps_ms: tuple[float, ...]


def sample(
    request_id: str,
    arrivals: Sequence[Arrival],
    neighbours: Sequence[Sequence[Arrival]],
    moments: Mapping[str, Moments],
    *,
    begun_s: float,
    ordered_s: float,
    stages: int,
    suspended_ms: float,
) -> Sample:
    """Returns the cost of one migration.

    Args:
        arrivals: of the migrated request, on source and destination.
        neighbours: arrivals of the other requests on the source.
        moments: of source and destination, by their names.
        begun_s: earlier arrivals are ignored.
        ordered_s: when the migration was ordered.

    Raises:
        ValueError: there are too few arrivals before or after the move.
    """
    own = [arrival for arrival in _in_order(arrivals) if arrival.time_s >= begun_s]
    first = next((i for i, a in enumerate(own) if a.instance != own[0].instance), None)
    if first is None:
        raise ValueError("the request's tokens all came from one instance")
    last_s, first_s = own[first - 1].time_s, own[first].time_s
    times_s = [arrival.time_s for arrival in own]
    num_before = bisect_right(times_s, ordered_s, hi=first)
    own_steps_ms = [*_gaps_ms(times_s[:num_before]), *_gaps_ms(times_s[first:])]
    if not own_steps_ms:
        raise ValueError("there is no decode step to compare with")
    steps_ms = list(own_steps_ms)
    migrating_ms = [] if neighbours else _gaps_ms(times_s[max(num_before - 1, 0) : first])
    for neighbour in neighbours:
        times_s = [a.time_s for a in neighbour if a.time_s >= begun_s]
        begin, end = bisect_right(times_s, ordered_s), bisect_right(times_s, first_s)
        steps_ms += _gaps_ms(times_s[:begin])
        migrating_ms += _gaps_ms(times_s[max(begin - 1, 0) : end])
    step_ms = median(own_steps_ms)
    return Sample(
        downtime_ms=(first_s - last_s) * 1e3 - step_ms,
        phases_ms=phases_ms(request_id, own[first - 1], own[first], moments, step_ms),
        suspended_ms=suspended_ms,
        migration_ms=(first_s - ordered_s) * 1e3,
        stages=stages,
        steps_ms=tuple(steps_ms),
        migrating_steps_ms=tuple(migrating_ms),
    )


def phases_ms(
    request_id: str,
    last: Arrival,
    first: Arrival,
    moments: Mapping[str, Moments],
    step_ms: float,
) -> tuple[float, ...]:
    """Returns the parts of a downtime, whose sum it is, in the order of `PHASES`.

    - drain: from the source's last token until the request has left the batch;
    - copy: until the destination has the blocks of the last stage, and the order to adopt it;
    - adoption: until the request is in its batch, for which a step under way must end;
    - first step: until its first token, less a usual step;
    - delivery: by how much longer this token took to the front end than the last one before it.

    Args:
        last: the last token from the source.
        first: the first one from the destination.
        step_ms: a decode step.

    Raises:
        ValueError: an instance did not come to one of these points.
    """
    source, destination = moments[last.instance], moments[first.instance]
    drained_s, commit_s, adopted_s = source.drained_s, destination.commit_s, destination.adopted_s
    if drained_s is None or commit_s is None or adopted_s is None:
        raise ValueError(f"{request_id} moved without a drain, a commit or an adoption")
    sent_last_s = source.outputs_s[request_id, last.first_index]
    sent_first_s = destination.outputs_s[request_id, first.first_index]
    # Without blocks to copy there is nothing to receive.
    ready_s = max(commit_s, destination.received_s or commit_s)
    ends_s = [sent_last_s, drained_s, ready_s, adopted_s, sent_first_s]
    drain, copy, adoption, step = _gaps_ms(ends_s)
    delivery = ((first.time_s - sent_first_s) - (last.time_s - sent_last_s)) * 1e3
    return drain, copy, adoption, step - step_ms, delivery


def row(cell: Cell, samples: Sequence[Sample], foreign_cores: float) -> dict[str, Any]:
    """Returns the row of the cell.

    `foreign_cores` is the number of cores that other programs kept busy meanwhile; the row is
    reliable only well below 0.1. `stages` is the largest number of any migration. `phases_ms` has
    those of each migration. Where no step of
    the source fell into a migration, as when its only request is suspended,
    `decode_step_migrating_ms` is None.
    """
    migrating_ms = [step for s in samples for step in s.migrating_steps_ms]
    phases = zip(PHASES, zip(*(s.phases_ms for s in samples), strict=True), strict=True)
    return {
        "mode": cell.mode,
        "transport": cell.transport,
        "tokens": cell.tokens,
        "busy": cell.busy,
        "n": len(samples),
        "downtime_ms": summary([s.downtime_ms for s in samples]),
        "phases_ms": {name: [round(v, 2) for v in vs] for name, vs in phases},
        "decode_step_ms": summary([step for s in samples for step in s.steps_ms]),
        "decode_step_migrating_ms": summary(migrating_ms) if migrating_ms else None,
        "suspended_ms": summary([s.suspended_ms for s in samples]),
        "migration_ms": summary([s.migration_ms for s in samples]),
        "stages": max(s.stages for s in samples),
        "foreign_cores": round(foreign_cores, 2),
    }


def _in_order(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Arrivals in the order of the client, each when it and all before it are there."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.first_index)
    times_s = accumulate((arrival.time_s for arrival in ordered), max)
    return [replace(a, time_s=time_s) for a, time_s in zip(ordered, times_s, strict=True)]


def _gaps_ms(times_s: Sequence[float]) -> list[float]:
    return [(later - earlier) * 1e3 for earlier, later in pairwise(times_s)]
