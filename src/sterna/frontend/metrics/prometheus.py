"""Sterna's own metrics of instances and of priority classes, beside vLLM's on `/metrics`, and the
increments of those of vLLM's metrics that come from the instances."""

import math
import warnings
from collections import Counter as Counted
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sterna.frontend.metrics.allocated_files import forget_series
from sterna.frontend.metrics.latencies import Observed
from sterna.frontend.metrics.metric_table import (
    DOWNTIME,
    FRAGMENTATION,
    HELD,
    INSTANCE_STATES,
    INSTANCES,
    LATENCIES,
    MIGRATIONS,
    PRESENT,
    REQUESTS,
    RUNNING,
    SCALING,
    SENT_AGAIN,
    STAGES,
    USAGE,
    WANTED,
    Metric,
)
from sterna.messages.actors import ClusterStats, InstanceStats, Membership, MigrationEnd
from sterna.metrics.summary import fragmentation_proportion
from sterna.types import NORMAL, InstanceId, Priority

GONE_FACTOR = 16
"""Files are written anew when one of as many instances has gone, or begins to be emptied: that
takes 10 µs a series, and no stream goes on meanwhile."""

_Series = tuple[str, str]
"""The name of a gauge, and an instance."""


class FrontendMetrics:
    """Metrics of requests by class, and of the last `ClusterStats` and `Membership`.

    The gauges of instances that have gone disappear, and so do those that are not finite, as the
    freeness of one that is emptied; among many instances they are NaN until there are some more
    (`GONE_FACTOR`). Those of a process that has ended go with its file
    (prometheus_client's `mark_process_dead`), its counts and times stay.

    Args:
        class_names: of the classes that are known from the start.
    """

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, class_names: Iterable[str] = ()
    ) -> None:
        self._gauges = {each.name: _gauge(each, registry) for each in INSTANCES}
        self._held, self._fragmentation, self._running, self._usage = (
            _gauge(each, registry) for each in (HELD, FRAGMENTATION, RUNNING, USAGE)
        )
        self._wanted, self._present = (_gauge(each, registry) for each in (WANTED, PRESENT))
        self._requests, self._sent_again, self._scaling, self._migrations = (
            Counter(each.name.removesuffix("_total"), each.text, each.labels, registry=registry)
            for each in (REQUESTS, SENT_AGAIN, SCALING, MIGRATIONS)
        )
        self._downtime, self._stages = (_histogram(each, registry) for each in (DOWNTIME, STAGES))
        self._latencies = {each.latency: _histogram(each, registry) for each in LATENCIES}
        # A series that begins with its first observation has no rate for that one.
        for histogram in self._latencies.values():
            for name in class_names:
                histogram.labels(name)
        self._shown: set[_Series] = set()
        # Those that are shown no longer, and are in this process's files.
        self._in_files: set[_Series] = set()
        self._priorities: set[Priority] = {NORMAL}

    def count(self, num_by_class: Mapping[str, int]) -> None:
        """Add these numbers of requests to the counts of the classes."""
        for name, num_requests in num_by_class.items():
            self._requests.labels(name).inc(num_requests)

    def count_sent_again(self, num_requests: int) -> None:
        """Add this number of requests that were sent to another instance."""
        self._sent_again.inc(num_requests)

    def observe(self, observed: Observed) -> None:
        """Add these times of requests to the histograms of their classes."""
        for (latency, class_name), times_s in observed.items():
            histogram = self._latencies[latency].labels(class_name)
            for time_s in times_s:
                histogram.observe(time_s)

    def count_migrations(self, ended: Iterable[MigrationEnd]) -> None:
        """Count these migrations; of those that committed, also their downtimes and stages."""
        for each in ended:
            self._migrations.labels(each.outcome, each.cause).inc()
            if each.is_committed:
                self._downtime.observe(each.suspended_s)
                self._stages.observe(each.stages)

    def count_scaling(self, num_up: int, num_down: int) -> None:
        """Add these numbers of instances that auto-scaling has asked for, and that it has ended."""
        self._scaling.labels("up").inc(num_up)
        self._scaling.labels("down").inc(num_down)

    def show(self, stats: ClusterStats) -> None:
        """Set every gauge of every instance, and those of the cluster."""
        self._held.set(stats.num_held)
        self._fragmentation.set(_fragmentation(stats))
        running: Counted[Priority] = Counted()
        usage: Counted[Priority] = Counted()
        for each in stats.instances:
            running.update(dict(each.num_by_priority))
            usage.update(dict(each.usage_by_priority))
        # A priority of which no request runs any longer has a series still.
        self._priorities |= running.keys()
        for priority in self._priorities:
            self._running.labels(str(int(priority))).set(running[priority])
            self._usage.labels(str(int(priority))).set(usage[priority])
        values = _values_of(stats.instances)
        self._hide(self._shown - values.keys(), len(stats.instances))
        self._shown = set(values)
        for (name, instance_id), value in values.items():
            self._gauges[name].labels(instance_id).set(value)

    def show_members(self, membership: Membership) -> None:
        """Set the number of instances that are wanted, and of those in each state."""
        self._wanted.set(membership.num_wanted)
        states = Counted(each.state for each in membership.absent)
        for each in membership.instances:
            states["terminating" if each.is_terminating else "running"] += 1
        for state in INSTANCE_STATES:
            self._present.labels(state).set(states[state])

    def _hide(self, gone: Set[_Series], num_living: int) -> None:
        """Take these gauges of instances away."""
        for name, instance_id in gone:
            gauge = self._gauges[name]
            # Until the series is out of the file, it is not a number.
            gauge.labels(instance_id).set(math.nan)
            with warnings.catch_warnings():
                # prometheus_client warns that it does not take it out.
                warnings.simplefilter("ignore", UserWarning)
                gauge.remove(instance_id)
        self._in_files |= gone
        num_gone = len({instance_id for _, instance_id in self._in_files})
        if num_gone and GONE_FACTOR * num_gone >= num_living:
            is_done = forget_series("instance", self._in_files)
            self._in_files = set() if is_done else self._in_files


def _values_of(instances: Iterable[InstanceStats]) -> dict[_Series, float]:
    """The gauges of these instances. Minus infinity, the freeness of one that is emptied, is left
    out: sums and averages of all instances would be infinite."""
    return {
        (metric.name, each.instance_id): value
        for each in instances
        for metric in INSTANCES
        if math.isfinite(value := getattr(each, str(metric.field)))
    }


def _fragmentation(stats: ClusterStats) -> float:
    """The proportion of Section 6.3, without the watermark that instances keep free, which they do
    not report."""
    total_tokens = sum(each.total_tokens for each in stats.instances)
    if total_tokens == 0:
        return 0.0
    free = {each.instance_id: each.total_tokens - each.used_tokens for each in stats.instances}
    blocked = [
        each.head_demand_tokens
        for each in stats.instances
        if each.head_demand_tokens > free[each.instance_id]
    ]
    # The line of the scheduler is one more, and all instances are its.
    if stats.head_demand_tokens > max(free.values()):
        blocked.append(stats.head_demand_tokens)
    return fragmentation_proportion(sum(free.values()), blocked, total_tokens)


def _gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(
        metric.name,
        metric.text,
        metric.labels,
        registry=registry,
        multiprocess_mode="livemostrecent",
    )


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        metric.name, metric.text, metric.labels, registry=registry, buckets=metric.buckets
    )


class EngineGrowth(NamedTuple):
    """The sums of what all engines have counted in some time.

    Attributes:
        prefix_counts: tokens that were looked up in prefix caches, and those that were found.
        external_counts, draft_counts: see `InstanceView`.
    """

    prefix_counts: tuple[int, ...] = (0, 0)
    external_counts: tuple[int, ...] = (0, 0)
    draft_counts: tuple[int, ...] = ()


class EngineCounts:
    """The last counts of each instance's engine that one front end has seen.

    The counters of all front ends are added up, so that only one of them may count, the first of
    the membership. The others keep the counts, and one of them goes on from there when it is gone.
    """

    def __init__(self) -> None:
        self._counts: dict[InstanceId, tuple[int, ...]] = {}
        self._has_begun = False

    def take(self, instances: Iterable[InstanceStats]) -> EngineGrowth:
        """Return what all engines have counted since the last call.

        The first instances are a beginning: a predecessor may have counted what they have. Smaller
        counts than the last are those of a new engine. An instance that is missing, because a new
        scheduler has not heard of it yet, is remembered.
        """
        grown: tuple[int, ...] = 0, 0, 0, 0
        for each in instances:
            prefix = each.num_prefix_tokens, each.num_prefix_hits
            now = *prefix, *each.external_counts, *each.draft_counts
            before = self._counts.get(each.instance_id, () if self._has_begun else now)
            growth = _summed(now, [-count for count in before])
            grown = _summed(grown, now if min(growth) < 0 else growth)
            self._counts[each.instance_id] = now
        self._has_begun = self._has_begun or bool(self._counts)
        return EngineGrowth(grown[:2], grown[2:4], grown[4:])

    def keep_only(self, instance_ids: Iterable[InstanceId]) -> None:
        """Forget all instances but these, which live."""
        living = set(instance_ids)
        self._counts = {name: each for name, each in self._counts.items() if name in living}


def _summed(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(some, others, fillvalue=0)))
