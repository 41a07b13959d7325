"""Observations of client and observer, as the records of `metrics`.

Quantities that neither of them sees are unknown: queue time, the loss of a preemption, the
preempted requests, downtimes, and steps.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bench.serving.client import Outcome
from bench.serving.observer import ClusterSample, InstanceSample
from sterna.metrics.records import ClusterRecord, Records
from sterna.metrics.summary import fragmentation_proportion
from sterna.workload.trace import Trace

PENDING = "pending"
"""The state of an instance that has no machine yet, and costs nothing."""


def records_of(trace: Trace, outcomes: Sequence[Outcome]) -> Records:
    """The trace's requests. They arrived when they were due; a failed one has no end, and one whose
    session failed before it no arrival either."""
    unknown = np.full(len(trace), np.nan)
    end_s = [each.last_token_s if each.error is None else np.nan for each in outcomes]
    due_s = np.array([each.due_s for each in outcomes], np.float64)
    return Records(
        arrival_s=trace.arrival_s if trace.turns is None else due_s,
        first_token_s=np.array([each.first_token_s for each in outcomes], np.float64),
        end_s=np.array(end_s, np.float64),
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        priority=trace.priority,
        num_preemptions=unknown,
        preemption_loss_s=unknown,
        queue_s=unknown,
        decode_execution_s=unknown,
        largest_gap_s=np.array([each.largest_gap_s for each in outcomes], np.float64),
    )


def cluster_of(samples: Sequence[ClusterSample], end_s: float, wall_s: float) -> ClusterRecord:
    """The cluster as a whole.

    Args:
        samples: the first from before the run, the last from after it; none for a server that
            does not report its instances.
        end_s: when the last request ended.
        wall_s: how long the run took.
    """
    # After the last request the cluster is empty, which is no part of the run.
    during = [each for each in samples if each.time_s <= end_s]
    memory = [each for each in during if _total_tokens(each) and _tells_heads(each)]
    committed = _counted(samples, lambda each: each.migrations_committed)
    aborted = _counted(samples, lambda each: each.migrations_aborted)
    changes = _changes(during)
    return ClusterRecord(
        migrations_started=_started(samples, committed, aborted),
        migrations_committed=committed,
        migrations_aborted=aborted,
        fragmentation_time_s=np.array([max(0.0, each.time_s) for each in memory], np.float64),
        fragmentation_proportion=np.array([_fragmentation(each) for each in memory], np.float64),
        instances_time_s=np.array([time_s for time_s, _ in changes], np.float64),
        instances_num=np.array([number for _, number in changes], np.int64),
        migrating_instance_s=_migrating_instance_s(during, end_s),
        downtime_s=np.zeros(0),
        simulated_s=end_s,
        wall_s=wall_s,
        num_steps=None,
        free_tokens=np.array([sum(_rooms_tokens(each)) for each in memory], np.int64),
        total_tokens=np.array([_total_tokens(each) for each in memory], np.int64),
        blocked_demands_tokens=tuple(_blocked_demands_tokens(each) for each in memory),
        room_tokens=np.array([sum(_rooms_tokens(each)) for each in memory], np.int64),
        num_preemptions=_counted(samples, lambda each: each.preemptions),
        imbalance=np.array([_imbalance(each) for each in memory], np.float64),
    )


# ----------------------------------------------------------------------------------- counters


def counted_until(
    samples: Sequence[ClusterSample], counter: Callable[[InstanceSample], int | None]
) -> list[int | None]:
    """Growth of the counters of all instances from the first sample to each sample.

    An instance that has ended counts with its last report. None from the first sample without one.
    """
    last: dict[str, int | None] = {}
    totals: list[int | None] = []
    before = 0
    for index, sample in enumerate(samples):
        last |= {each.id: counter(each) for each in sample.instances}
        known = [count for count in last.values() if count is not None]
        if index == 0:
            before = sum(known)
        totals.append(sum(known) - before if len(known) == len(last) else None)
    return totals


def _counted(
    samples: Sequence[ClusterSample], counter: Callable[[InstanceSample], int | None]
) -> int | None:
    return counted_until(samples, counter)[-1] if samples else None


def _started(
    samples: Sequence[ClusterSample], committed: int | None, aborted: int | None
) -> int | None:
    """Migrations that ended, and those in flight at the last sample."""
    if committed is None or aborted is None:
        return None
    # Each migration is counted on both sides.
    return committed + aborted + sum(each.migrating for each in samples[-1].instances) // 2


def _migrating_instance_s(during: Sequence[ClusterSample], end_s: float) -> float | None:
    """Each sample stands for the time until the next one."""
    if not during:
        return None
    times_s = np.append([max(0.0, each.time_s) for each in during], end_s)
    counts = [sum(each.migrating > 0 for each in sample.instances) for sample in during]
    return float((np.diff(times_s) * counts).sum())


def _changes(during: Sequence[ClusterSample]) -> list[tuple[float, int]]:
    """The times at which the number of instances changed, with the new number."""
    changes: list[tuple[float, int]] = []
    for sample in during:
        number = sum(each.state != PENDING for each in sample.instances)
        if not changes or changes[-1][1] != number:
            changes.append((sample.time_s if changes else 0.0, number))
    return changes


# ------------------------------------------------------------------------------------- memory


def _tells_heads(sample: ClusterSample) -> bool:
    return all(each.head_demand_tokens is not None for each in sample.instances)


def _total_tokens(sample: ClusterSample) -> int:
    return sum(each.total_tokens for each in sample.instances)


def _rooms_tokens(sample: ClusterSample) -> list[int]:
    # Running requests may have grown into the watermark.
    return [max(0, each.total_tokens - each.used_tokens) for each in sample.instances]


def _blocked_demands_tokens(sample: ClusterSample) -> tuple[int, ...]:
    rooms_tokens = _rooms_tokens(sample)
    return tuple(
        each.head_demand_tokens
        for each, room_tokens in zip(sample.instances, rooms_tokens, strict=True)
        if each.head_demand_tokens is not None and each.head_demand_tokens > room_tokens
    )


def _imbalance(sample: ClusterSample) -> float:
    # Those that are up: others have not reported their memory.
    used_tokens = [each.used_tokens for each in sample.instances if each.total_tokens > 0]
    return max(used_tokens) * len(used_tokens) / sum(used_tokens) if any(used_tokens) else np.nan


def _fragmentation(sample: ClusterSample) -> float:
    return fragmentation_proportion(
        sum(_rooms_tokens(sample)), _blocked_demands_tokens(sample), _total_tokens(sample)
    )
