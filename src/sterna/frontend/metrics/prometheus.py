"""Sterna's own metrics of instances and of priority classes, beside vLLM's on `/metrics`, and the
increments of those of vLLM's metrics that come from the instances."""

import math
import warnings
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sterna.frontend.metrics.latencies import Latency, Observed
from sterna.messages.actors import ClusterStats, InstanceStats
from sterna.types import InstanceId

_GAUGES = {
    "sterna_instance_running_requests": ("Requests in the batch.", "num_running"),
    "sterna_instance_queuing_requests": ("Requests waiting for memory.", "num_queuing"),
    "sterna_instance_used_tokens": ("KV cache memory in use, in tokens.", "used_tokens"),
    "sterna_instance_total_tokens": ("KV cache memory, in tokens.", "total_tokens"),
    "sterna_instance_freeness_steps": (
        "Decode steps for which the batch has memory; negative when overloaded.",
        "freeness_steps",
    ),
    "sterna_instance_outgoing_migrations": ("Requests moving away.", "num_migrating_out"),
    "sterna_instance_incoming_migrations": ("Requests moving in.", "num_migrating_in"),
    "sterna_instance_committed_migrations": (
        "Requests that moved away since the instance started.",
        "num_committed",
    ),
    "sterna_instance_aborted_migrations": (
        "Requests that began to move away since the instance started, and stayed.",
        "num_aborted",
    ),
    "sterna_instance_preemptions": (
        "Times that a request's memory was taken back since the instance started.",
        "num_preemptions",
    ),
    "sterna_instance_prefix_tokens": (
        "Tokens looked up in the prefix cache since the instance started.",
        "num_prefix_tokens",
    ),
    "sterna_instance_prefix_hit_tokens": (
        "Tokens found in the prefix cache since the instance started.",
        "num_prefix_hits",
    ),
}

_HISTOGRAMS = {
    Latency.FIRST_TOKEN: (
        "sterna_time_to_first_token_seconds",
        "From when a request came to its first token, by priority class.",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
    ),
    Latency.INTER_TOKEN: (
        "sterna_inter_token_latency_seconds",
        "From one token to the next, by priority class.",
        (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    Latency.REQUEST: (
        "sterna_request_latency_seconds",
        "From when a request came to its last token, by priority class.",
        (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0),
    ),
}
"""Name, text, and upper bounds of the buckets in seconds."""


class FrontendMetrics:
    """Metrics of requests by class, and of the last `ClusterStats`.

    The gauges of instances that have gone disappear, or become NaN if several processes share their
    metrics.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._gauges = {
            attribute: Gauge(
                name, text, ["instance"], registry=registry, multiprocess_mode="mostrecent"
            )
            for name, (text, attribute) in _GAUGES.items()
        }
        self._held = Gauge(
            "sterna_held_requests",
            "Requests that wait at the scheduler for an instance.",
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._requests = Counter(
            "sterna_requests", "Requests of each priority class.", ["class"], registry=registry
        )
        self._sent_again = Counter(
            "sterna_requests_sent_again",
            "Times that a request went on elsewhere behind the tokens that its client had: its "
            "instance died, or gave it up.",
            registry=registry,
        )
        self._latencies = {
            latency: Histogram(name, text, ["class"], registry=registry, buckets=bounds_s)
            for latency, (name, text, bounds_s) in _HISTOGRAMS.items()
        }
        self._shown: set[str] = set()

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

    def show(self, stats: ClusterStats) -> None:
        """Set every gauge of every instance, and that of the scheduler."""
        self._held.set(stats.num_held)
        for instance_id in self._shown - {each.instance_id for each in stats.instances}:
            for gauge in self._gauges.values():
                # If several processes share their metrics, series cannot be removed; Prometheus
                # takes NaN for the end of a series.
                gauge.labels(instance_id).set(math.nan)
                with warnings.catch_warnings():
                    # prometheus_client warns of that at every removal.
                    warnings.simplefilter("ignore", UserWarning)
                    gauge.remove(instance_id)
        self._shown = {each.instance_id for each in stats.instances}
        for instance in stats.instances:
            self._show_instance(instance)

    def _show_instance(self, instance: InstanceStats) -> None:
        for attribute, gauge in self._gauges.items():
            gauge.labels(instance.instance_id).set(getattr(instance, attribute))


class PrefixCounts:
    """The last sums of each instance that one front end has seen.

    The counters of all front ends are added up, so that only one of them may count, the first of
    the membership. The others keep the sums, and one of them goes on from there when it is gone.
    """

    def __init__(self) -> None:
        self._sums: dict[InstanceId, tuple[int, int]] = {}

    def take(self, instances: Iterable[InstanceStats]) -> tuple[int, int]:
        """Return the tokens that were looked up since the last call, and those that were found.

        What an instance had counted before it was first seen counts; smaller sums than the last
        are those of a new engine.
        """
        num_tokens = num_hits = 0
        sums = {}
        for each in instances:
            now = each.num_prefix_tokens, each.num_prefix_hits
            before = self._sums.get(each.instance_id, (0, 0))
            if now[0] < before[0]:
                before = 0, 0
            num_tokens += now[0] - before[0]
            num_hits += now[1] - before[1]
            sums[each.instance_id] = now
        self._sums = sums
        return num_tokens, num_hits
