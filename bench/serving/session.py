"""One run: a workload sent to a server, with samples of its instances."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.serving.client import ClientConfig, Outcome, replay
from bench.serving.observer import DEFAULT_INTERVAL_S, ClusterSample, Observer
from bench.serving.records import cluster_of, records_of
from bench.serving.target import Target
from sterna.metrics.records import ClusterRecord, Records
from sterna.metrics.summary import Summary, summarize
from sterna.types import Priority
from sterna.workload.trace import Trace

LEAD_S = 0.1
"""Time between the beginning and the first request, so that it can be sent when it is due."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedRun:
    """One finished run on a real server.

    Attributes:
        outcomes: of the trace's requests, in its order.
        samples: of the server's instances; the first is from before the run, the last from after
            it. None for a server that does not report them.
    """

    target: Target
    trace: Trace
    outcomes: Sequence[Outcome]
    samples: Sequence[ClusterSample]
    records: Records
    cluster: ClusterRecord

    def summary(self, priority: Priority | None = None) -> Summary:
        """The run's numbers, or those of one class of its requests."""
        return summarize(self.records, self.cluster, priority=priority)

    def errors(self) -> Counter[str]:
        """The number of failed requests for each reason, the most frequent first."""
        found = Counter(each.error for each in self.outcomes if each.error is not None)
        return Counter(dict(found.most_common()))

    def instances(self) -> int | None:
        """The number of instances at the start, where it is known."""
        numbers = self.cluster.instances_num
        return int(numbers[0]) if len(numbers) else None


async def run_trace(
    target: Target,
    trace: Trace,
    config: ClientConfig,
    *,
    interval_s: float = DEFAULT_INTERVAL_S,
    on_ended: Callable[[], None] | None = None,
    is_settled: Callable[[ClusterSample], bool] | None = None,
    settle_timeout_s: float = 0.0,
) -> ServedRun:
    """Send the trace's requests to the server when they are due; returns when all have ended.

    Cancelled, it closes all streams, which ends their requests on the server.

    Args:
        interval_s: time between two samples of the instances.
        on_ended: called whenever a request has ended, well or not.
        is_settled: whether the cluster has its final state. After the last request it is watched
            until then, or for `settle_timeout_s`.

    Raises:
        ConfigurationError: the server needs another key.
    """
    loop = asyncio.get_running_loop()
    observer = Observer(target, interval_s)
    async with observer.session() as session:
        begin_s = loop.time()
        is_watched = await observer.look(session, begin_s)
        # The first sample counts as from the beginning, when the first request is due.
        begin_s = loop.time() + LEAD_S
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(observer.watch(session, begin_s)) if is_watched else None
            outcomes = await replay(target, trace, config, begin_s=begin_s, on_ended=on_ended)
            end_s = loop.time() - begin_s
            if watching is not None:
                if is_settled is not None:
                    await _until(is_settled, observer, interval_s, settle_timeout_s)
                watching.cancel()
        if is_watched:
            # By then the instances have reported their last events.
            await asyncio.sleep(interval_s)
            await observer.look(session, begin_s)
    samples = tuple(observer.samples)
    cluster = cluster_of(samples, end_s, wall_s=loop.time() - begin_s)
    return ServedRun(target, trace, outcomes, samples, records_of(trace, outcomes), cluster)


async def _until(
    is_settled: Callable[[ClusterSample], bool],
    observer: Observer,
    interval_s: float,
    timeout_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not (observer.samples and is_settled(observer.samples[-1])):
        left_s = deadline_s - loop.time()
        if left_s <= 0.0:
            return
        await asyncio.sleep(min(interval_s, left_s))
