"""How soon an instance that comes up has its share of the load, by the samples of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.serving.observer import ClusterSample
from bench.serving.records import counted_until
from bench.serving.timeline import RUNNING

SHARE = 0.5
"""Of the mean batch of the other instances."""


@dataclass(frozen=True, slots=True)
class Filling:
    """One instance that began to serve during a run.

    Attributes:
        ready_s: when it was first seen to serve.
        filled_s: from then until its batch was SHARE of the others' at least; None where it never
            was, or no other instance had a request.
        migrations: that ended in the cluster until then, or in all its life; None where they are
            not told.
    """

    instance: str
    ready_s: float
    filled_s: float | None
    migrations: int | None


def fillings_of(samples: Sequence[ClusterSample]) -> list[Filling]:
    """Those of all instances that served later but not at first, in the order of their coming."""
    if not samples:
        return []
    moved = counted_until(samples, lambda each: each.migrations_committed)
    begun: dict[str, int] = {}
    for index, sample in enumerate(samples):
        for each in sample.instances:
            if each.state == RUNNING:
                begun.setdefault(each.id, index)
    return [_filling(samples, moved, name, index) for name, index in begun.items() if index > 0]


def _filling(
    samples: Sequence[ClusterSample], moved: Sequence[int | None], name: str, ready: int
) -> Filling:
    serving = range(ready, len(samples))
    filled = next((index for index in serving if _is_filled(samples[index], name)), None)
    until = max(
        (index for index in serving if _batch(samples[index], name) is not None), default=ready
    )
    # What had ended when it was first seen may have ended just before.
    before, after = moved[ready - 1], moved[until if filled is None else filled]
    return Filling(
        name,
        round(samples[ready].time_s, 2),
        None if filled is None else round(samples[filled].time_s - samples[ready].time_s, 2),
        None if before is None or after is None else after - before,
    )


def _is_filled(sample: ClusterSample, name: str) -> bool:
    batch = _batch(sample, name)
    others = [e.running for e in sample.instances if e.id != name and e.state == RUNNING]
    return batch is not None and any(others) and batch >= SHARE * fmean(others)


def _batch(sample: ClusterSample, name: str) -> int | None:
    return next(
        (each.running for each in sample.instances if each.id == name and each.state == RUNNING),
        None,
    )
