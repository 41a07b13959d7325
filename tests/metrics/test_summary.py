"""The numbers by which a run is judged: what each of them means, on runs small enough to see."""

import json
from dataclasses import asdict, replace
from math import nan
from typing import Any

import numpy as np
import pytest

from sterna.metrics.summary import (
    Distribution,
    Objective,
    as_json,
    latencies_json,
    summarize,
    summarize_classes,
)
from sterna.types import HIGH, NORMAL
from tests.metrics.records import cluster, records


def mean(distribution: Distribution | None) -> float:
    assert distribution is not None
    return distribution.mean


def test_request_prefill_and_decode_latencies_are_the_papers() -> None:
    """Section 6.1: "We focus on request latency, in terms of end-to-end, prefill (that of the
    first generated token), and decode (that since first generated token to the last, averaged
    over all generated tokens)."
    """
    run = records(arrival_s=[1.0], first_token_s=[1.5], end_s=[3.5], output_tokens=[5])
    summary = summarize(run, cluster())
    assert mean(summary.request_s) == 2.5
    assert mean(summary.ttft_s) == 0.5
    assert mean(summary.tpot_s) == 0.5, "four tokens came in the two seconds after the first"


def test_decode_execution_leaves_out_what_a_request_waited() -> None:
    run = records(
        arrival_s=[0.0],
        first_token_s=[1.0],
        end_s=[3.0],
        output_tokens=[5],
        decode_execution_s=[1.2],
    )
    assert mean(summarize(run, cluster()).tpot_execution_s) == pytest.approx(0.3)


def test_a_request_of_one_token_has_no_decode_latency_and_spoils_no_mean() -> None:
    run = records(
        arrival_s=[0.0, 0.0], first_token_s=[1.0, 1.0], end_s=[1.0, 3.0], output_tokens=[1, 3]
    )
    summary = summarize(run, cluster())
    assert mean(summary.tpot_s) == 1.0
    assert mean(summary.request_s) == 2.0


def test_a_run_of_one_token_requests_has_no_decode_latency() -> None:
    run = records(arrival_s=[0.0], first_token_s=[1.0], end_s=[1.0], output_tokens=[1])
    summary = summarize(run, cluster())
    assert summary.tpot_s is None
    assert summary.tpot_execution_s is None


def test_percentiles_lie_between_the_values_around_their_rank() -> None:
    distribution = Distribution.of(np.arange(1001.0) + 0.5)
    assert distribution is not None
    assert asdict(distribution) == pytest.approx(
        {"mean": 500.5, "p50": 500.5, "p90": 900.5, "p99": 990.5, "p999": 999.5, "max": 1000.5}
    )
    assert Distribution.of(np.array([1.0, 2.0])) == Distribution(1.5, 1.5, 1.9, 1.99, 1.999, 2.0)


def test_preemption_loss_is_the_mean_over_all_requests() -> None:
    """Section 6.3: "the preemption loss in terms of the extra queuing and recomputing times
    (mean value of all requests)"."""
    run = records(
        arrival_s=[0.0] * 4,
        first_token_s=[1.0] * 4,
        end_s=[2.0] * 4,
        output_tokens=[2] * 4,
        num_preemptions=[0, 2, 1, 0],
        preemption_loss_s=[0.0, 3.0, 1.0, 0.0],
    )
    summary = summarize(run, cluster())
    assert mean(summary.preemption_loss_s) == 1.0
    assert summary.preempted_fraction == 0.5, "a request preempted twice is one request"


def test_average_instances_are_weighted_by_time() -> None:
    run = cluster(instances=[(0.0, 4), (2.0, 8), (6.0, 2)], simulated_s=10.0)
    assert summarize(records(), run).instances_avg == (2 * 4 + 4 * 8 + 4 * 2) / 10


def test_instances_after_the_last_request_do_not_count() -> None:
    run = cluster(instances=[(0.0, 4), (5.0, 2), (11.0, 1)], simulated_s=10.0)
    assert summarize(records(), run).instances_avg == 3.0


def test_time_with_migrations_is_a_fraction_of_all_instances_time() -> None:
    """Section 6.2: "the average fraction of time span with ongoing migration for each instance
    is only roughly 10%"."""
    run = cluster(instances=[(0.0, 4)], simulated_s=10.0, migrating_instance_s=4.0)
    assert summarize(records(), run).migrating_fraction == 0.1


def test_fragmentation_is_the_mean_of_its_samples() -> None:
    run = cluster(fragmentation=[0.0, 0.375, 0.0])
    assert summarize(records(), run).fragmentation_mean == 0.125


def test_a_request_that_never_ended_is_counted_and_is_in_no_distribution_of_ends() -> None:
    run = records(
        arrival_s=[0.0, 0.0, 0.0],
        first_token_s=[1.0, 2.0, nan],
        end_s=[4.0, nan, nan],
        output_tokens=[4, 4, 4],
        queue_s=[0.5, 0.5, nan],
    )
    summary = summarize(run, cluster())
    assert (summary.num_requests, summary.num_completed) == (3, 1)
    assert mean(summary.request_s) == 4.0
    assert mean(summary.tpot_s) == 1.0
    assert mean(summary.ttft_s) == 1.5
    assert mean(summary.queue_s) == 0.5


def test_a_class_is_summarized_by_its_requests_alone() -> None:
    run = records(
        arrival_s=[0.0, 0.0, 0.0],
        first_token_s=[1.0, 2.0, 3.0],
        end_s=[1.0, 2.0, 3.0],
        output_tokens=[1, 1, 1],
        priority=[0, 1, 0],
    )
    classes = summarize_classes(run, cluster())
    assert list(classes) == ["high", "normal"]
    assert classes["high"] == summarize(run, cluster(), priority=HIGH)
    assert mean(classes["high"].ttft_s) == 2.0
    assert mean(classes["normal"].ttft_s) == 2.0
    assert classes["normal"].num_requests == 2


def test_a_run_of_one_class_has_no_classes_to_tell_apart() -> None:
    run = records(arrival_s=[0.0], first_token_s=[1.0], end_s=[1.0], output_tokens=[1])
    assert summarize_classes(run, cluster()) == {}


def test_a_class_without_requests_has_nothing_rather_than_nan() -> None:
    run = records(arrival_s=[0.0], first_token_s=[1.0], end_s=[1.0], output_tokens=[1])
    summary = summarize(run, cluster(), priority=HIGH)
    assert summary.num_requests == 0
    assert summary.preempted_fraction is None
    assert latencies_json(summary) == {
        "requests": 0,
        "completed": 0,
        "request_s": None,
        "ttft_s": None,
        "tpot_s": None,
        "tpot_execution_s": None,
        "queue_s": None,
        "preemption_loss_s": None,
        "largest_gap_s": None,
        "interactivity": None,
        "goodput": [
            {"ttft_s": 1.0, "tpot_s": 0.2, "fraction": None, "requests_per_s": 0.0},
            {"ttft_s": 10.0, "tpot_s": 0.05, "fraction": None, "requests_per_s": 0.0},
        ],
        "preempted_fraction": None,
        "preemptions": 0,
        "prefix_reuse": None,
    }


def test_prefix_reuse_is_a_fraction_of_what_an_endless_cache_would_have() -> None:
    run = replace(
        records(
            arrival_s=[0.0, 1.0, 2.0],
            first_token_s=[1.0, 2.0, 3.0],
            end_s=[1.0, 2.0, 3.0],
            output_tokens=[1, 1, 1],
            priority=[NORMAL, HIGH, NORMAL],
        ),
        cached_tokens=np.array([0, 48, 16]),
        reusable_tokens=np.array([0, 64, 64]),
    )
    assert summarize(run, cluster()).prefix_reuse == 0.5
    assert summarize(run, cluster(), priority=HIGH).prefix_reuse == 0.75
    nothing = replace(run, reusable_tokens=np.zeros(3, np.int64))
    assert summarize(nothing, cluster()).prefix_reuse is None


def test_goodput_counts_the_requests_that_keep_to_both_limits() -> None:
    """The first one is quick at both, the second late, the third slow, the fourth never ends, and
    the fifth has one token."""
    run = records(
        arrival_s=[0.0, 0.0, 0.0, 0.0, 2.0],
        first_token_s=[0.5, 4.0, 1.0, 0.5, 2.5],
        end_s=[0.9, 4.4, 2.2, nan, 2.5],
        output_tokens=[11, 11, 11, 11, 1],
    )
    summary = summarize(run, cluster(simulated_s=10.0))
    quick_start, quick_stream = summary.goodput
    assert (quick_start.fraction, quick_start.requests_per_s) == (0.6, 0.3)
    assert (quick_stream.fraction, quick_stream.requests_per_s) == (0.6, 0.3)
    assert quick_stream.objective == Objective(10.0, 0.05)


def test_interactivity_is_the_rate_of_an_answer_with_its_wait() -> None:
    run = records(
        arrival_s=[1.0, 0.0, 3.0],
        first_token_s=[2.0, 1.0, 3.0],
        end_s=[6.0, nan, 3.0],
        output_tokens=[20, 9, 1],
    )
    interactivity = summarize(run, cluster()).interactivity
    assert interactivity is not None
    assert interactivity.mean == interactivity.max == 4.0


def test_imbalance_is_a_mean_in_which_a_moment_counts_by_the_memory_in_use() -> None:
    """By hand: 1.0 of 300 tokens and 2.0 of 100 are 1.25; nothing is in use in between."""
    run = replace(
        cluster(),
        imbalance=np.array([1.0, nan, 2.0]),
        total_tokens=np.array([500, 500, 500]),
        free_tokens=np.array([200, 500, 400]),
    )
    assert summarize(records(), run).imbalance_mean == 1.25
    empty = replace(run, imbalance=np.array([nan, nan, nan]))
    assert summarize(records(), empty).imbalance_mean is None


def test_an_empty_run_has_no_nan_either() -> None:
    summary = summarize(records(), cluster(simulated_s=0.0, instances=[(0.0, 3)]))
    assert summary.instances_avg == 3.0
    assert summary.migrating_fraction is None
    assert json.loads(json.dumps(as_json(summary), allow_nan=False))["fragmentation"] == {
        "mean": None
    }


def test_the_json_has_the_documented_names() -> None:
    run = records(arrival_s=[0.0], first_token_s=[1.0], end_s=[3.0], output_tokens=[3])
    document: dict[str, Any] = as_json(
        summarize(run, cluster(migrations=(3, 2, 1), downtime_s=[0.01, 0.03]))
    )
    assert document["requests"] == document["completed"] == 1
    for name in ("request_s", "ttft_s", "tpot_s"):
        assert list(document[name]) == ["mean", "p50", "p90", "p99", "p999", "max"]
    assert document["preemption_loss_s"]["mean"] == 0.0
    assert document["preempted_fraction"] == 0.0
    assert document["migrations"]["started"] == 3
    assert document["migrations"]["committed"] == 2
    assert document["migrations"]["aborted"] == 1
    assert document["migrations"]["downtime_s"]["mean"] == pytest.approx(0.02)
    assert document["instances_avg"] == 1.0
    assert (document["simulated_s"], document["wall_s"], document["steps"]) == (10.0, 0.5, 7)


def test_all_requests_of_one_class_are_the_whole_run() -> None:
    run = records(
        arrival_s=[0.0, 1.0], first_token_s=[1.0, 2.0], end_s=[2.0, 4.0], output_tokens=[2, 3]
    )
    assert summarize(run, cluster(), priority=NORMAL) == summarize(run, cluster())


def test_what_the_client_of_a_real_run_cannot_see_is_none() -> None:
    run = records(
        arrival_s=[0.0, 1.0],
        first_token_s=[1.0, nan],
        end_s=[3.0, nan],
        output_tokens=[3, 2],
        num_preemptions=[nan, nan],
        preemption_loss_s=[nan, nan],
        queue_s=[nan, nan],
        decode_execution_s=[nan, nan],
        largest_gap_s=[1.5, nan],
    )
    unknown = replace(
        cluster(instances=()),
        migrations_started=None,
        migrations_committed=None,
        migrations_aborted=None,
        migrating_instance_s=None,
        num_steps=None,
    )
    document = as_json(summarize(run, unknown))
    assert (document["requests"], document["completed"]) == (2, 1)
    assert document["request_s"]["mean"] == 3.0
    assert document["largest_gap_s"]["max"] == 1.5
    assert {name for name, value in document.items() if value is None} == {
        *("tpot_execution_s", "queue_s", "preemption_loss_s", "preempted_fraction"),
        *("preemptions", "prefix_reuse", "instances_avg", "steps"),
    }
    assert set(document["migrations"].values()) == {None}
    assert summarize(run, replace(unknown, num_preemptions=4)).num_preemptions == 4


def test_preemptions_counted_for_the_cluster_are_nobodys_class() -> None:
    run = records(
        arrival_s=[0.0, 1.0],
        first_token_s=[1.0, 2.0],
        end_s=[1.0, 2.0],
        output_tokens=[1, 1],
        priority=[NORMAL, HIGH],
        num_preemptions=[nan, nan],
    )
    counted = replace(cluster(), num_preemptions=4)
    assert summarize(run, counted, priority=HIGH).num_preemptions is None
    by_request = replace(run, num_preemptions=np.array([3, 1]))
    assert summarize(by_request, counted).num_preemptions == 4
    assert summarize(by_request, counted, priority=HIGH).num_preemptions == 1
