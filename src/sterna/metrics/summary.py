"""Summaries: the numbers by which a run is judged (Section 6.1, key metrics). Pure.

"We focus on request latency, in terms of end-to-end, prefill (that of the first generated
token), and decode (that since first generated token to the last, averaged over all generated
tokens)."

Missing numbers are None, and none is ever NaN: a run without requests has no latencies, one whose
requests all have one token has no decode latency, and one whose fragmentation was not sampled has
no mean of it; a real run lacks the numbers that could not be observed. A request of a real run that
never ended counts as a request, but is in no distribution that needs its end.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from sterna.metrics.records import ClusterRecord, Records
from sterna.types import HIGH, NORMAL, Priority

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, percentiles and maximum of some values, in their unit.

    A percentile lies between the two values around its rank, in proportion (numpy's "linear").
    """

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, values: Values) -> "Distribution | None":
        """The distribution of these values, or None when there are none."""
        if len(values) == 0:
            return None
        p50, p90, p99, p999 = map(float, np.percentile(values, (50.0, 90.0, 99.0, 99.9)))
        return cls(float(values.mean()), p50, p90, p99, p999, float(values.max()))


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to in order to count: a service level objective.

    Attributes:
        ttft_s: its time to first token at most.
        tpot_s: its time per output token at most; a request of one token has none.
    """

    ttft_s: float
    tpot_s: float


OBJECTIVES = (Objective(1.0, 0.2), Objective(10.0, 0.05))
"""The two corners: a quick first token, as in a chat, and a quick stream, as for an agent."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept to an objective.

    Attributes:
        fraction: of all requests; None without any.
        requests_per_s: until the last request ended; None for a run without duration.
    """

    objective: Objective
    fraction: float | None
    requests_per_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One run, or one class of its requests.

    Attributes:
        num_requests: all requests, whether they ended or not.
        num_completed: the requests that ended.
        request_s: from arrival to the last token.
        ttft_s: from arrival to the first token: the paper's prefill latency.
        tpot_s: from the first token to the last, over the number of tokens after the first:
            the paper's decode latency. Requests of one token have none.
        tpot_execution_s: the same without the request's waits in between (Section 6.4, "the average
            decode computation time").
        queue_s: from arrival to the first step that computes the request.
        preemption_loss_s: the "extra queuing and recomputing times (mean value of all
            requests)" that preemptions cost (Section 6.3); 0 for a request that was never
            preempted.
        largest_gap_s: each client's longest wait from one token to the next.
        interactivity: the tokens of an answer over the request latency, in tokens a second.
        goodput: for each of `OBJECTIVES`.
        preempted_fraction: fraction of the requests that were preempted at least once.
        num_preemptions: preemptions of all requests together.
        prefix_reuse: the tokens that prefix caches had, as a fraction of those that one cache would
            have had that knows all earlier requests and forgets nothing.
        migrations_started: migrations begun by their sources.
        migrations_committed: those of them after which the destination had the request.
        migrations_aborted: those of them after which the source kept it.
        downtime_s: downtimes of the committed migrations.
        migrating_fraction: fraction of the instances' time with a migration in flight
            (Section 6.2, "the average fraction of time span with ongoing migration for each
            instance").
        fragmentation_mean: mean fragmented memory over the total memory (Section 6.3).
        imbalance_mean: the largest memory in use on an instance over the mean of all, a mean over
            time in which a moment counts by the memory in use: when nearly all requests have ended,
            the last ones are in few places.
        instances_avg: mean number of instances, weighted by time: the cost of the run
            (Section 6.5).
        simulated_s: when the last request ended.
        wall_s: duration of the run.
        num_steps: steps of all engines.
    """

    num_requests: int
    num_completed: int
    request_s: Distribution | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    tpot_execution_s: Distribution | None
    queue_s: Distribution | None
    preemption_loss_s: Distribution | None
    largest_gap_s: Distribution | None
    interactivity: Distribution | None
    goodput: tuple[Goodput, ...]
    preempted_fraction: float | None
    num_preemptions: int | None
    prefix_reuse: float | None
    migrations_started: int | None
    migrations_committed: int | None
    migrations_aborted: int | None
    downtime_s: Distribution | None
    migrating_fraction: float | None
    fragmentation_mean: float | None
    imbalance_mean: float | None
    instances_avg: float | None
    simulated_s: float
    wall_s: float
    num_steps: int | None


DISTRIBUTIONS = frozenset(
    name for name, hint in get_type_hints(Summary).items() if hint == Distribution | None
)
"""The fields of `Summary`, and of what `as_json` makes of it, that are distributions."""


def summarize(
    records: Records, cluster: ClusterRecord, *, priority: Priority | None = None
) -> Summary:
    """The numbers of a run.

    Args:
        priority: only requests of this execution priority; numbers of the cluster as a whole stay
            those of the whole run.
    """
    those = (
        np.ones(len(records), np.bool_) if priority is None else records.priority == int(priority)
    )
    num_requests = int(those.sum())
    request_s, tpot_s, tpot_execution_s = _latencies_to_the_end(records, those)
    instances_avg = _instances_avg(cluster)
    gaps_s = records.largest_gap_s
    preemptions = _known(records.num_preemptions[those])
    proportions = cluster.fragmentation_proportion
    return Summary(
        num_requests=num_requests,
        num_completed=len(request_s),
        request_s=Distribution.of(request_s),
        ttft_s=Distribution.of(_known((records.first_token_s - records.arrival_s)[those])),
        tpot_s=Distribution.of(tpot_s),
        tpot_execution_s=Distribution.of(tpot_execution_s),
        queue_s=Distribution.of(_known(records.queue_s[those])),
        preemption_loss_s=Distribution.of(_known(records.preemption_loss_s[those])),
        largest_gap_s=None if gaps_s is None else Distribution.of(_known(gaps_s[those])),
        interactivity=Distribution.of(_known(_interactivity(records)[those])),
        goodput=tuple(_goodput(records, cluster, those, each) for each in OBJECTIVES),
        preempted_fraction=float((preemptions > 0).mean()) if len(preemptions) else None,
        num_preemptions=_num_preemptions(preemptions, num_requests, cluster, priority),
        prefix_reuse=_prefix_reuse(records, those),
        migrations_started=cluster.migrations_started,
        migrations_committed=cluster.migrations_committed,
        migrations_aborted=cluster.migrations_aborted,
        downtime_s=Distribution.of(cluster.downtime_s),
        migrating_fraction=_migrating_fraction(cluster, instances_avg),
        fragmentation_mean=float(proportions.mean()) if len(proportions) else None,
        imbalance_mean=_imbalance(cluster),
        instances_avg=instances_avg,
        simulated_s=cluster.simulated_s,
        wall_s=cluster.wall_s,
        num_steps=cluster.num_steps,
    )


def summarize_classes(records: Records, cluster: ClusterRecord) -> dict[str, Summary]:
    """The numbers of each class of requests, by its name, the most urgent first.

    Empty when all requests have one priority, since `summarize` has their numbers.
    """
    present = [Priority(int(each)) for each in np.unique(records.priority)[::-1]]
    if len(present) < 2:
        return {}
    return {
        class_name(priority): summarize(records, cluster, priority=priority) for priority in present
    }


def class_name(priority: Priority) -> str:
    """The name of this priority in reports."""
    return {NORMAL: "normal", HIGH: "high"}.get(priority, f"priority {priority}")


def latencies_json(summary: Summary) -> dict[str, Any]:
    """The numbers of the requests, as documented in docs/simulation.md."""
    return {
        "requests": summary.num_requests,
        "completed": summary.num_completed,
        "request_s": _json(summary.request_s),
        "ttft_s": _json(summary.ttft_s),
        "tpot_s": _json(summary.tpot_s),
        "tpot_execution_s": _json(summary.tpot_execution_s),
        "queue_s": _json(summary.queue_s),
        "preemption_loss_s": _json(summary.preemption_loss_s),
        "largest_gap_s": _json(summary.largest_gap_s),
        "interactivity": _json(summary.interactivity),
        "goodput": [
            {
                **asdict(each.objective),
                "fraction": each.fraction,
                "requests_per_s": each.requests_per_s,
            }
            for each in summary.goodput
        ],
        "preempted_fraction": summary.preempted_fraction,
        "preemptions": summary.num_preemptions,
        "prefix_reuse": summary.prefix_reuse,
    }


def as_json(summary: Summary) -> dict[str, Any]:
    """The summary as documented in docs/simulation.md; its names are stable."""
    return {
        **latencies_json(summary),
        "migrations": {
            "started": summary.migrations_started,
            "committed": summary.migrations_committed,
            "aborted": summary.migrations_aborted,
            "downtime_s": _json(summary.downtime_s),
            "time_fraction": summary.migrating_fraction,
        },
        "fragmentation": {"mean": summary.fragmentation_mean},
        "imbalance": {"mean": summary.imbalance_mean},
        "instances_avg": summary.instances_avg,
        "simulated_s": summary.simulated_s,
        "wall_s": summary.wall_s,
        "steps": summary.num_steps,
    }


def _json(distribution: Distribution | None) -> dict[str, float] | None:
    return None if distribution is None else asdict(distribution)


def _known(values: NDArray[Any]) -> Values:
    known: Values = values[~np.isnan(values)]
    return known


def _num_preemptions(
    known: Values, num_requests: int, cluster: ClusterRecord, priority: Priority | None
) -> int | None:
    """The sum over the requests if they were counted one by one, or the cluster's number."""
    if len(known) == num_requests:
        return int(known.sum())
    return cluster.num_preemptions if priority is None else None


def _prefix_reuse(records: Records, those: NDArray[np.bool_]) -> float | None:
    if records.cached_tokens is None or records.reusable_tokens is None:
        return None
    num_reusable = int(records.reusable_tokens[those].sum())
    return int(records.cached_tokens[those].sum()) / num_reusable if num_reusable else None


def _migrating_fraction(cluster: ClusterRecord, instances_avg: float | None) -> float | None:
    instances_s = (instances_avg or 0.0) * cluster.simulated_s
    if cluster.migrating_instance_s is None or not instances_s:
        return None
    return cluster.migrating_instance_s / instances_s


def _latencies_to_the_end(
    records: Records, those: NDArray[np.bool_]
) -> tuple[Values, Values, Values]:
    """Request latency, decode latency and decode execution a token, of the ended requests."""
    ended = those & ~np.isnan(records.end_s)
    request_s = (records.end_s - records.arrival_s)[ended]
    decoded = ended & (records.output_tokens > 1)
    num_intervals = records.output_tokens[decoded] - 1
    tpot_s = (records.end_s - records.first_token_s)[decoded] / num_intervals
    return request_s, tpot_s, _known(records.decode_execution_s[decoded] / num_intervals)


def _imbalance(cluster: ClusterRecord) -> float | None:
    is_used = ~np.isnan(cluster.imbalance)
    if not is_used.any():
        return None
    used_tokens = cluster.total_tokens - cluster.free_tokens
    return float(np.average(cluster.imbalance[is_used], weights=used_tokens[is_used]))


def _interactivity(records: Records) -> Values:
    """Tokens a second of each request; NaN for one that never ended, or took no time."""
    request_s = records.end_s - records.arrival_s
    rates: Values = records.output_tokens / np.where(request_s > 0.0, request_s, np.nan)
    return rates


def _goodput(
    records: Records, cluster: ClusterRecord, those: NDArray[np.bool_], objective: Objective
) -> Goodput:
    # Comparisons with NaN do not hold: a request that never ended does not count.
    num_intervals = np.maximum(1, records.output_tokens - 1)
    tpot_s = (records.end_s - records.first_token_s) / num_intervals
    is_quick = records.first_token_s - records.arrival_s <= objective.ttft_s
    num_good = int((those & is_quick & (tpot_s <= objective.tpot_s)).sum())
    return Goodput(
        objective,
        num_good / int(those.sum()) if those.any() else None,
        num_good / cluster.simulated_s if cluster.simulated_s > 0.0 else None,
    )


def _instances_avg(cluster: ClusterRecord) -> float | None:
    """The mean number of instances, weighted by time, until the last request ended."""
    end_s, begins_s, counts = cluster.simulated_s, cluster.instances_time_s, cluster.instances_num
    if len(begins_s) == 0:
        return None
    if end_s <= begins_s[0]:
        return float(counts[0])
    # Instances may still end after the last request, which no longer counts.
    bounds_s = np.minimum(np.append(begins_s, end_s), end_s)
    durations_s = np.diff(bounds_s)
    return float((durations_s * counts).sum() / durations_s.sum())


def fragmentation_proportion(
    free_tokens: int, demands_tokens: Iterable[int], total_tokens: int
) -> float:
    """Fragmented memory over the cluster's total memory, at one moment.

    "We define the fragmented memory at each moment as the portion of cluster free memory that
    could satisfy the demands of the head-of-line blocking requests across all instances, if no
    fragmentation." The largest number of these requests counts as satisfied: the smallest
    first.

    Args:
        free_tokens: free memory of all instances together, less the watermark that each of them
            keeps free when it admits a request: a single instance could not give that either.
        demands_tokens: demands of the requests at the heads of their lines that do not fit on their
            instances. The scheduler's line, of those that wait there for memory, is one more, with
            all instances.
        total_tokens: memory of all instances together.
    """
    fragmented_tokens = 0
    for demand_tokens in sorted(demands_tokens):
        if fragmented_tokens + demand_tokens > free_tokens:
            break
        fragmented_tokens += demand_tokens
    return fragmented_tokens / total_tokens
