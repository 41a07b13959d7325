"""The scheduler between other processes: how long a front end waits for an answer, how much of a
core load reports take, and what it would cost to ask the instances in place of their reports.

Three processes talk over mailboxes as in a served cluster, encrypted: the scheduler's own actor
without Ray, all instances, each of which reports at a moment of its own, and a front end, which
asks. The instances' process and the scheduler's
are children of this one.

    python -m bench.scheduling.actor_processes scheduler POLICY
    python -m bench.scheduling.actor_processes instances NUMBER SEED SCHEDULER INTERVAL_S
    python -m bench.scheduling.actor_processes asker SEED DURATION_S
    python -m bench.scheduling.actor_processes answerers NUMBER ASKER
"""

import asyncio
import contextlib
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import psutil
import uvloop

from bench.common.results_io import ROOT
from bench.common.tables import Row, rounded
from bench.scheduling.made_cluster import FRONTEND, MadeCluster
from sterna.config import MailboxKeys
from sterna.errors import ConfigurationError
from sterna.instance.llumlet import spread_interval_s
from sterna.messages.actors import (
    AddRequest,
    CopyPrefix,
    Dispatched,
    InstanceMember,
    Membership,
    PrefixDone,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox, draw_keys
from sterna.policy.presets import preset
from sterna.runtime.processes.process import collect_garbage_seldom
from sterna.scheduler.shell import Scheduler
from sterna.types import InstanceId, RequestId

REPORT_INTERVAL_S = 0.05
"""That of an instance among few whose loads change all the time (`LlumletConfig`)."""

RATE = 500.0
"""Requests a second."""

WARM_UP_S = 3.0
"""Until all instances have reported and both sides are connected."""

LOOPBACK = "127.0.0.1"
ANSWER_TIMEOUT_S = 30.0

KEYS_VARIABLE = "STERNA_BENCH_MAILBOX_KEYS"
"""The environment variable in which the processes have the keys of their mailboxes."""

LEAST_PAUSE_S = 0.001
"""Reports that are due within this time are sent together."""


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


def asks_row(num_instances: int, duration_s: float, seed: int) -> Row:
    """The processor time that a scheduler would need to ask all instances how much of a prompt they
    have, and to take in their answers: of its own process, for one request after the other."""
    asker = _Child("asker", seed, duration_s)
    try:
        answerers = _Child("answerers", num_instances, asker.address)
        try:
            assert asker.stdout is not None
            num_asked, used_s = asker.stdout.readline().split()
        finally:
            answerers.kill()
            answerers.wait()
    finally:
        asker.kill()
        asker.wait()
    return {"asking_ms": rounded(1_000 * float(used_s) / int(num_asked))}


@functools.cache
def _keys() -> MailboxKeys:
    """Those of the process that started this one, or new ones."""
    if (given := os.environ.get(KEYS_VARIABLE)) is None:
        return draw_keys()
    public, secret = given.encode().split()
    return MailboxKeys(public, secret)


class _Child(subprocess.Popen[str]):
    """A process of this module that has printed the address of its mailbox.

    Raises:
        ConfigurationError: it ended at once.
    """

    def __init__(self, *arguments: object) -> None:
        keys = b" ".join((_keys().public, _keys().secret)).decode()
        super().__init__(
            [sys.executable, "-m", __spec__.name, *map(str, arguments)],
            cwd=ROOT, env=os.environ | {KEYS_VARIABLE: keys}, stdout=subprocess.PIPE, text=True,
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
    mailbox = Mailbox(LOOPBACK, _keys())
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
    mailbox = Mailbox(LOOPBACK, _keys())
    print(mailbox.address, flush=True)
    await Scheduler(preset(policy_name), mailbox).run()


async def _be_instances(num_instances: int, seed: int, scheduler: str, interval_s: float) -> None:
    """Report forever, each instance once in an interval; reports show the requests so far."""
    mailbox = Mailbox(LOOPBACK, _keys())
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
        await asyncio.sleep(max(interval_s / num_instances, LEAST_PAUSE_S))


async def _be_asker(seed: int, duration_s: float) -> None:
    """Ask all instances, once they are known, for one request after the other; prints the number of
    requests, and the processor time since the first one."""
    collect_garbage_seldom()
    mailbox, cluster = Mailbox(LOOPBACK, _keys()), MadeCluster(1, seed)
    members: asyncio.Future[Membership] = asyncio.get_running_loop().create_future()
    num_left = 0
    is_answered = asyncio.Event()

    def on_message(message: WireMessage, _: list[bytes]) -> None:
        nonlocal num_left
        if isinstance(message, Membership):
            members.set_result(message)
        elif isinstance(message, PrefixDone):
            num_left -= 1
            if num_left == 0:
                is_answered.set()

    delivery = asyncio.create_task(mailbox.deliver(on_message))
    print(mailbox.address, flush=True)
    instances = (await members).instances
    num_asked, used_s, until_s = -1, 0.0, math.inf
    while time.monotonic() < until_s:
        request = cluster.request()
        num_left = len(instances)
        is_answered.clear()
        for each in instances:
            # As large as such a question and its answer are.
            ask = CopyPrefix(request.request_id, each.instance_id, request.block_hashes, 0)
            mailbox.send(each.address, ask)
        await is_answered.wait()
        num_asked += 1
        if num_asked == 0:
            # All are connected from here on.
            used_s, until_s = -time.process_time(), time.monotonic() + duration_s
    print(num_asked, used_s + time.process_time(), flush=True)
    delivery.cancel()
    mailbox.close()


async def _be_answerers(number: int, asker: str) -> None:
    """Answer the questions of one process, each instance with a mailbox of its own."""
    mailboxes = [Mailbox(LOOPBACK, _keys()) for _ in range(number)]

    def answering(mailbox: Mailbox) -> Callable[[WireMessage, list[bytes]], None]:
        def on_message(message: WireMessage, _: list[bytes]) -> None:
            if isinstance(message, CopyPrefix):
                mailbox.send(asker, PrefixDone(message.request_id))

        return on_message

    deliveries = [asyncio.create_task(each.deliver(answering(each))) for each in mailboxes]
    members = tuple(
        InstanceMember(InstanceId(f"i{k}"), each.address) for k, each in enumerate(mailboxes)
    )
    print(len(members), flush=True)
    mailboxes[0].send(asker, Membership(1, members, (), None))
    await asyncio.gather(*deliveries)


def main(arguments: Sequence[str]) -> None:
    """Be one of the processes."""
    what, *rest = arguments
    with contextlib.suppress(KeyboardInterrupt):
        match what:
            case "scheduler":
                uvloop.run(_be_scheduler(rest[0]))
            case "instances":
                number, seed, scheduler, interval_s = rest
                uvloop.run(_be_instances(int(number), int(seed), scheduler, float(interval_s)))
            case "asker":
                uvloop.run(_be_asker(int(rest[0]), float(rest[1])))
            case "answerers":
                uvloop.run(_be_answerers(int(rest[0]), rest[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
