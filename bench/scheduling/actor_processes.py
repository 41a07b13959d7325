"""The scheduler between other processes: how long a front end waits for an answer, and how much of
a core load reports take.

Three processes talk over mailboxes as in a served cluster: the scheduler's own actor without Ray,
all instances, which report, and a front end, which asks. The instances' process and the scheduler's
are children of this one.

    python -m bench.scheduling.actor_processes scheduler POLICY
    python -m bench.scheduling.actor_processes instances NUMBER SEED SCHEDULER INTERVAL_S
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import uvloop

from bench.common.results_io import ROOT
from bench.common.tables import Row, rounded
from bench.scheduling.made_cluster import FRONTEND, MadeCluster
from sterna.errors import ConfigurationError
from sterna.instance.llumlet import spread_interval_s
from sterna.messages.actors import (
    AddRequest,
    CopyPrefix,
    Dispatched,
    PrefixDone,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox
from sterna.policy.presets import preset
from sterna.runtime.processes.process import collect_garbage_seldom
from sterna.scheduler.shell import Scheduler
from sterna.types import RequestId

REPORT_INTERVAL_S = 0.05
"""That of an instance among few whose loads change all the time (`LlumletConfig`)."""

RATE = 500.0
"""Requests a second."""

WARM_UP_S = 3.0
"""Until all instances have reported and both sides are connected."""

LOOPBACK = "127.0.0.1"
ANSWER_TIMEOUT_S = 30.0


def waits_row(policy_name: str, num_instances: int, num_requests: int, seed: int) -> Row:
    """The wait from a front end's question to the moment at which it has sent the request on."""
    with _cluster(policy_name, num_instances, seed) as cluster:
        waits_s = uvloop.run(_asked(*cluster, num_instances, num_requests, seed))
    median, p99 = np.percentile(waits_s, (50, 99))
    return {
        "instances": num_instances,
        "policy": policy_name,
        "seed": seed,
        "n": num_requests,
        "rate": RATE,
        "p50_ms": rounded(1_000 * median),
        "p99_ms": rounded(1_000 * p99),
    }


def reports_row(policy_name: str, num_instances: int, duration_s: float, seed: int) -> Row:
    """The share of a core that the scheduler needs for load reports and rounds alone."""
    with _cluster(policy_name, num_instances, seed) as (scheduler, _):
        time.sleep(WARM_UP_S)
        process = psutil.Process(scheduler.pid)
        begun_s, used_s = time.monotonic(), sum(process.cpu_times()[:2])
        time.sleep(duration_s)
        share = (sum(process.cpu_times()[:2]) - used_s) / (time.monotonic() - begun_s)
    return {
        "instances": num_instances,
        "policy": policy_name,
        "seed": seed,
        "report_interval_s": spread_interval_s(REPORT_INTERVAL_S, num_instances),
        "reports_cores": rounded(share),
    }


class _Child(subprocess.Popen[str]):
    """A process of this module that has printed the address of its mailbox.

    Raises:
        ConfigurationError: it ended at once.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            [sys.executable, "-m", __spec__.name, *map(str, arguments)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.stdout is not None
        self.address = self.stdout.readline().strip()
        if not self.address:
            raise ConfigurationError(f"a process of the benchmark ended: {arguments[0]}")


@contextlib.contextmanager
def _cluster(policy_name: str, num_instances: int, seed: int) -> Iterator[tuple[_Child, str]]:
    """The scheduler's process and the address of the instances; both end with the context."""
    scheduler = _Child("scheduler", policy_name)
    try:
        interval_s = spread_interval_s(REPORT_INTERVAL_S, num_instances)
        instances = _Child("instances", num_instances, seed, scheduler.address, interval_s)
        try:
            yield scheduler, instances.address
        finally:
            instances.kill()
            instances.wait()
    finally:
        scheduler.kill()
        scheduler.wait()


async def _asked(
    scheduler: _Child, instances: str, num_instances: int, num_requests: int, seed: int
) -> list[float]:
    """Ask at the rate; the waits in seconds."""
    mailbox = Mailbox(LOOPBACK)
    cluster = MadeCluster(num_instances, seed, (mailbox.address, instances))
    asked_s: dict[RequestId, float] = {}
    waits_s: list[float] = []
    is_done = asyncio.Event()

    def on_message(message: WireMessage, _: list[bytes]) -> None:
        if not isinstance(message, Dispatched):
            return
        request_id = message.request_id
        add = AddRequest(FRONTEND, request_id, message.dispatch_number)
        mailbox.send(instances, add, [b"request"])
        waits_s.append(time.perf_counter() - asked_s.pop(request_id))
        if len(waits_s) == num_requests:
            is_done.set()

    delivery = asyncio.create_task(mailbox.deliver(on_message))
    try:
        mailbox.send(scheduler.address, cluster.membership(2))
        for report in cluster.caches():
            mailbox.send(scheduler.address, report)
        await asyncio.sleep(WARM_UP_S)
        requests = [cluster.request() for _ in range(num_requests)]
        draws, begun_s, due_s = np.random.default_rng(seed), time.perf_counter(), 0.0
        for request in requests:
            due_s += float(draws.exponential(1 / RATE))
            delay_s = begun_s + due_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            asked_s[request.request_id] = time.perf_counter()
            mailbox.send(scheduler.address, request)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await is_done.wait()
    finally:
        delivery.cancel()
        mailbox.close()
    return waits_s


async def _be_scheduler(policy_name: str) -> None:
    collect_garbage_seldom()
    mailbox = Mailbox(LOOPBACK)
    print(mailbox.address, flush=True)
    await Scheduler(preset(policy_name), mailbox).run()


async def _be_instances(num_instances: int, seed: int, scheduler: str, interval_s: float) -> None:
    """Report forever, each instance once in an interval; reports show the requests so far."""
    mailbox = Mailbox(LOOPBACK)
    last_dispatch = 0

    def on_message(message: WireMessage, _: list[bytes]) -> None:
        nonlocal last_dispatch
        if isinstance(message, AddRequest):
            last_dispatch = message.dispatch_number
        elif isinstance(message, CopyPrefix):
            mailbox.send(scheduler, PrefixDone(message.request_id))

    delivery = asyncio.create_task(mailbox.deliver(on_message))
    cluster = MadeCluster(num_instances, seed, ("", mailbox.address))
    print(mailbox.address, flush=True)
    mailbox.send(scheduler, cluster.membership())
    num_sent, begun_s = 0, time.monotonic()
    while not delivery.done():
        num_due = int((time.monotonic() - begun_s) / interval_s * num_instances)
        while num_sent < num_due:
            mailbox.send(scheduler, cluster.next_load(last_dispatch))
            num_sent += 1
        await asyncio.sleep(interval_s / 10)


def main(arguments: Sequence[str]) -> None:
    """Be one of the processes."""
    what, *rest = arguments
    with contextlib.suppress(KeyboardInterrupt):
        if what == "scheduler":
            uvloop.run(_be_scheduler(rest[0]))
        else:
            number, seed, scheduler, interval_s = rest
            uvloop.run(_be_instances(int(number), int(seed), scheduler, float(interval_s)))


if __name__ == "__main__":
    main(sys.argv[1:])
