"""Records of a run's requests and cluster, the same for simulated and real runs. Pure."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Arrays with one entry for each request, in the order of the trace.

    Unknown values are NaN: the end of a request that failed, and, in a real run, values that its
    client cannot see.

    Attributes:
        arrival_s: float64[n], when it reached the cluster.
        first_token_s: float64[n], when its first token was ready.
        end_s: float64[n], when its last token was ready.
        input_tokens: int64[n].
        output_tokens: int64[n].
        priority: int64[n], execution priority.
        num_preemptions: int64[n]; float64[n] of NaN if they were not counted.
        preemption_loss_s: float64[n], the sum over its preemptions of the time until its next
            token beyond that of one decode step (Section 3: "the extra queuing time and the
            recomputing for previous KV cache").
        queue_s: float64[n], from arrival to the first step that computes it.
        decode_execution_s: float64[n], the sum of the steps that computed its tokens but the
            first, without the waits in between (Section 6.4).
        largest_gap_s: float64[n], its client's longest wait from one token to the next; None if it
            was not measured.
        cached_tokens: int64[n], the tokens of its prompt that the prefix cache had when it was
            admitted first; None without prefix caching, or if they were not counted.
        reusable_tokens: int64[n], the tokens of its prompt that one cache would have had that knows
            all earlier requests; None like `cached_tokens`.
    """

    arrival_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    priority: NDArray[np.int64]
    num_preemptions: NDArray[np.int64] | NDArray[np.float64]
    preemption_loss_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    decode_execution_s: NDArray[np.float64]
    largest_gap_s: NDArray[np.float64] | None = None
    cached_tokens: NDArray[np.int64] | None = None
    reusable_tokens: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_proportions() -> NDArray[np.float64]:
    return np.zeros(0, np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class ClusterRecord:
    """Records of the cluster as a whole.

    Unknown values of a real cluster are None, or arrays without entries.

    Attributes:
        migrations_started: migrations begun by their sources.
        migrations_committed: those of them after which the destination had the request.
        migrations_aborted: those of them after which the source kept it.
        fragmentation_time_s: float64[k], when the fragmentation was sampled.
        fragmentation_proportion: float64[k], fragmented memory over the cluster's total memory
            at these times (Section 6.3).
        instances_time_s: float64[m], when the number of instances changed, the first at 0.
        instances_num: int64[m], instances from that time on, starting and terminating ones
            included.
        migrating_instance_s: sum over the instances of the time with a migration in flight; in a
            real run, by the samples in which they had one.
        downtime_s: float64[c], for each committed migration of a running request, the time from the
            drain to the adoption. A queuing request has no downtime.
        simulated_s: when the last request ended, from the beginning of the run; also in a real run.
        wall_s: duration of the run.
        num_steps: steps of all engines.
        free_tokens: int64[k], free memory of all instances when the fragmentation was sampled.
        total_tokens: int64[k], memory of all instances at these times.
        blocked_demands_tokens: at each of these times, the demands of the requests at the heads
            of their lines that do not fit on their instances, in the order of the instances; then
            that of the first in line at the scheduler, if it fits on none (not in real runs).
        room_tokens: int64[k], the free memory less each instance's watermark, into which requests
            may be admitted. The fragmented memory is a part of this.
        num_preemptions: preemptions of all requests together, if they are not counted by request.
        imbalance: float64[k], at these times the memory in use on the instance that uses most, over
            the mean of all instances; NaN while none is in use.
        prefixes_copied: prefixes that were copied for a request that was sent to another instance.
    """

    migrations_started: int | None
    migrations_committed: int | None
    migrations_aborted: int | None
    fragmentation_time_s: NDArray[np.float64]
    fragmentation_proportion: NDArray[np.float64]
    instances_time_s: NDArray[np.float64]
    instances_num: NDArray[np.int64]
    migrating_instance_s: float | None
    downtime_s: NDArray[np.float64]
    simulated_s: float
    wall_s: float
    num_steps: int | None
    free_tokens: NDArray[np.int64] = field(default_factory=_none)
    total_tokens: NDArray[np.int64] = field(default_factory=_none)
    blocked_demands_tokens: tuple[tuple[int, ...], ...] = ()
    room_tokens: NDArray[np.int64] = field(default_factory=_none)
    num_preemptions: int | None = None
    imbalance: NDArray[np.float64] = field(default_factory=_no_proportions)
    prefixes_copied: int | None = None
