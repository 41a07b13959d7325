"""Time until a new instance has its share of the load, from the samples of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.serving.observer import ClusterSample
from bench.serving.records import counted_until
from bench.serving.timeline import RUNNING

SHARE = 0.5
"""Fraction of the other instances' mean batch at which an instance counts as filled."""


@dataclass(frozen=True, slots=True)
class Filling:
    """One instance that began to serve during a run.

    Attributes:
        ready_s: the time of the first sample in which it serves.
        filled_s: from then until its batch was at least SHARE of the others'; None where it never
            was, or no other instance had a request.
        migrations: number that ended in the cluster until then, or in all its life; None where the
            server does not report them.
    """

    instance: str
    ready_s: float
    filled_s: float | None
    migrations: int | None


def fillings_of(samples: Sequence[ClusterSample]) -> list[Filling]:
    """The fillings of all instances that did not serve at first, in the order of their start."""
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
    # Migrations of the first sample may have ended just before it.
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
