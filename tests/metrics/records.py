"""Builders of what is recorded of a run."""

from collections.abc import Sequence

import numpy as np

from sterna.metrics.records import ClusterRecord, Records


def records(
    *,
    arrival_s: Sequence[float] = (),
    first_token_s: Sequence[float] = (),
    end_s: Sequence[float] = (),
    output_tokens: Sequence[int] = (),
    priority: Sequence[int] | None = None,
    num_preemptions: Sequence[float] | None = None,
    preemption_loss_s: Sequence[float] | None = None,
    queue_s: Sequence[float] | None = None,
    decode_execution_s: Sequence[float] | None = None,
    largest_gap_s: Sequence[float] | None = None,
) -> Records:
    """Records of requests; what is not given is 0, and gaps are unknown."""
    zeros = [0] * len(arrival_s)
    return Records(
        arrival_s=np.array(arrival_s, np.float64),
        first_token_s=np.array(first_token_s, np.float64),
        end_s=np.array(end_s, np.float64),
        input_tokens=np.ones(len(arrival_s), np.int64),
        output_tokens=np.array(output_tokens, np.int64),
        priority=np.array(zeros if priority is None else priority, np.int64),
        num_preemptions=np.array(zeros if num_preemptions is None else num_preemptions),
        preemption_loss_s=np.array(
            zeros if preemption_loss_s is None else preemption_loss_s, np.float64
        ),
        queue_s=np.array(zeros if queue_s is None else queue_s, np.float64),
        decode_execution_s=np.array(
            zeros if decode_execution_s is None else decode_execution_s, np.float64
        ),
        largest_gap_s=None if largest_gap_s is None else np.array(largest_gap_s, np.float64),
    )


def cluster(
    *,
    migrations: tuple[int, int, int] = (0, 0, 0),
    fragmentation: Sequence[float] = (),
    instances: Sequence[tuple[float, int]] = ((0.0, 1),),
    migrating_instance_s: float = 0.0,
    downtime_s: Sequence[float] = (),
    simulated_s: float = 10.0,
) -> ClusterRecord:
    """The record of a cluster in which nothing else happened.

    Args:
        instances: from when on there were so many.
    """
    started, committed, aborted = migrations
    return ClusterRecord(
        migrations_started=started,
        migrations_committed=committed,
        migrations_aborted=aborted,
        fragmentation_time_s=np.arange(1.0, len(fragmentation) + 1.0),
        fragmentation_proportion=np.array(fragmentation, np.float64),
        instances_time_s=np.array([since_s for since_s, _ in instances], np.float64),
        instances_num=np.array([number for _, number in instances], np.int64),
        migrating_instance_s=migrating_instance_s,
        downtime_s=np.array(downtime_s, np.float64),
        simulated_s=simulated_s,
        wall_s=0.5,
        num_steps=7,
    )
