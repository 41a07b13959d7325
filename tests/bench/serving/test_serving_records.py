"""Records of what client and observer saw: by hand."""

from math import isnan, nan
from typing import Any

import numpy as np
import pytest

from bench.serving.client import Outcome
from bench.serving.observer import ClusterSample, InstanceSample
from bench.serving.records import cluster_of, records_of
from sterna.metrics.summary import as_json, summarize
from sterna.workload.trace import Trace


def instance(name: str, **more: Any) -> InstanceSample:
    known: dict[str, Any] = {
        "state": "running",
        "total_tokens": 1000,
        "used_tokens": 0,
        "freeness": 1.0,
        "running": 0,
        "queuing": 0,
        "migrating": 0,
        "head_demand_tokens": 0,
        "preemptions": 0,
        "migrations_committed": 0,
        "migrations_aborted": 0,
    }
    return InstanceSample(id=name, **{**known, **more})


def samples(*instances: tuple[InstanceSample, ...]) -> list[ClusterSample]:
    """One a second, from shortly before the beginning on."""
    return [ClusterSample(time_s - 0.1, those) for time_s, those in enumerate(instances)]


def test_a_failed_request_has_no_end() -> None:
    zeros = np.zeros(2, np.int64)
    trace = Trace("test", np.array([1.0, 2.0]), zeros + 5, zeros + 3, zeros)
    whole = Outcome(1.1, 1.5, 3.5, 0.75, 3, None)
    cut = Outcome(2.1, 2.5, 2.75, 0.25, 2, "cut: 2 of 3 tokens came")
    records = records_of(trace, [whole, cut])
    assert records.end_s[0] == 3.5
    assert isnan(records.end_s[1])
    summary = summarize(records, cluster_of([], 4.0, 5.0))
    assert (summary.num_requests, summary.num_completed) == (2, 1)
    assert summary.request_s is not None
    assert summary.request_s.mean == 2.5, "from when it was due, not from when it was sent"
    assert summary.ttft_s is not None
    assert summary.ttft_s.mean == 0.5
    assert summary.largest_gap_s is not None
    assert summary.largest_gap_s.max == 0.75


def test_without_samples_nothing_of_the_cluster_is_known() -> None:
    trace = Trace("test", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64), np.zeros(1))
    records = records_of(trace, [Outcome(0.0, 1.0, 1.0, nan, 1)])
    document = as_json(summarize(records, cluster_of([], 1.0, 1.5)))
    assert set(document["migrations"].values()) == {None}
    assert document["fragmentation"] == {"mean": None}
    unknown = ("instances_avg", "steps", "preemptions", "preempted_fraction", "queue_s")
    assert [document[name] for name in unknown] == [None] * len(unknown)


def test_counters_count_from_the_first_sample_on() -> None:
    cluster = cluster_of(
        samples(
            (instance("i0", migrations_committed=5, migrations_aborted=1, preemptions=7),),
            (instance("i0", migrations_committed=9, migrations_aborted=3, preemptions=8),),
        ),
        2.0,
        2.0,
    )
    assert (cluster.migrations_committed, cluster.migrations_aborted) == (4, 2)
    assert cluster.migrations_started == 6
    assert cluster.num_preemptions == 1


def test_what_an_instance_has_counted_outlives_it() -> None:
    cluster = cluster_of(
        samples(
            (instance("i0"),),
            (instance("i0", migrations_committed=3), instance("i1", migrations_committed=2)),
            (instance("i1", migrations_committed=4),),
        ),
        3.0,
        3.0,
    )
    assert cluster.migrations_committed == 7


def test_a_counter_that_is_not_told_is_not_known() -> None:
    cluster = cluster_of(samples((instance("i0", preemptions=None),)), 1.0, 1.0)
    assert cluster.num_preemptions is None


def test_a_migration_in_flight_has_started_and_is_counted_on_either_side() -> None:
    ongoing = (instance("i0", migrating=1), instance("i1", migrating=1))
    cluster = cluster_of(samples((instance("i0"), instance("i1")), ongoing), 2.0, 2.0)
    assert cluster.migrations_started == 1
    assert cluster.migrations_committed == cluster.migrations_aborted == 0


def test_each_sample_stands_for_the_time_until_the_next() -> None:
    quiet, moving = instance("i0"), instance("i0", migrating=1)
    cluster = cluster_of(samples((quiet,), (moving,), (quiet,)), 3.0, 3.0)
    assert cluster.migrating_instance_s == pytest.approx(1.0)


def test_instances_are_counted_over_time_but_for_those_without_a_machine() -> None:
    i0, i1 = instance("i0"), instance("i1")
    waiting = instance("i1", state="pending")
    cluster = cluster_of(samples((i0,), (i0, waiting), (i0, i1), (i0, i1), (i0,)), 4.9, 5.0)
    assert cluster.instances_num.tolist() == [1, 2, 1]
    assert cluster.instances_time_s.tolist() == [0.0, 1.9, 3.9]


def test_what_is_sampled_after_the_last_request_counts_for_counters_only() -> None:
    before = (instance("i0", used_tokens=400),)
    after = (instance("i0", migrations_committed=1), instance("i1"))
    cluster = cluster_of(samples(before, before, after), 1.5, 2.0)
    assert cluster.migrations_committed == 1
    assert cluster.instances_num.tolist() == [1]
    assert cluster.free_tokens.tolist() == [600, 600]


def test_a_head_of_line_is_blocked_where_the_free_memory_is_elsewhere() -> None:
    """Section 6.3: "the portion of cluster free memory that could satisfy the demands of the
    head-of-line blocking requests across all instances, if no fragmentation"."""
    blocked = instance("i0", used_tokens=900, head_demand_tokens=300, queuing=1)
    fits = instance("i1", used_tokens=600, head_demand_tokens=100, queuing=1)
    cluster = cluster_of(samples((blocked, fits)), 1.0, 1.0)
    assert cluster.blocked_demands_tokens == ((300,),)
    assert cluster.fragmentation_proportion.tolist() == [300 / 2000]


def test_instances_that_have_not_reported_have_no_memory_to_speak_of() -> None:
    starting = instance("i0", state="starting", total_tokens=0)
    cluster = cluster_of(samples((starting,), (instance("i0"),)), 2.0, 2.0)
    assert cluster.total_tokens.tolist() == [1000]


def test_loads_are_even_beside_instances_that_have_not_reported() -> None:
    even = (instance("i0", used_tokens=500), instance("i1", used_tokens=500))
    warm, waiting = (
        instance(name, state=name, total_tokens=0, used_tokens=0) for name in ("warm", "pending")
    )
    cluster = cluster_of(samples(even, (*even, warm), (*even, warm, waiting)), 3.0, 3.0)
    assert cluster.imbalance.tolist() == [1.0, 1.0, 1.0]
