"""The scheduler between other processes: how long a front end waits for an answer, how much of a
core load reports take, and what it would cost to ask the instances in place of their reports.

Three processes talk over mailboxes as in a served cluster, encrypted: the scheduler's own actor
without Ray, all instances, each of which has a mailbox of its own and reports at a moment of its
own, and a front end, which asks. The instances' process and the scheduler's are children of this
one. The scheduler's counts the reports that arrive: fewer than are due are a sender that is late.

    python -m bench.scheduling.actor_processes scheduler POLICY
    python -m bench.scheduling.actor_processes instances NUMBER SEED SCHEDULER
    python -m bench.scheduling.actor_processes caches NUMBER SEED SCHEDULER
    python -m bench.scheduling.actor_processes asker SEED DURATION_S
    python -m bench.scheduling.actor_processes answerers NUMBER ASKER
"""

import asyncio
import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import uvloop

from bench.common.results_io import ROOT
from bench.common.tables import Row, rounded
from bench.scheduling.made_cluster import (
    FRONTEND,
    RATE,
    MadeCluster,
    report_interval_s,
    reports_a_decision,
)
from bench.serving.client import NUM_SPARE_FILES, allow_files
from sterna.config import MailboxKeys, PolicyConfig
from sterna.errors import ConfigurationError
from sterna.messages.actors import (
    AddRequest,
    CacheReport,
    CopyPrefix,
    Dispatched,
    InstanceMember,
    LoadReport,
    Membership,
    PrefixDone,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox, draw_keys
from sterna.policy.presets import preset
from sterna.runtime.processes.process import collect_garbage_seldom
from sterna.scheduler.shell import Scheduler
from sterna.types import InstanceId, RequestId

WARM_UP_S, CONNECTED_PER_S = 3.0, 200.0
"""The time until all instances have reported and all sides are connected, and how many instances
are so in each further second."""

FIRST_S = 1.0
"""The time until the scheduler has the first state of all instances, which comes from one
mailbox."""

FILES_OF_A_MAILBOX = 16
"""Upper bound of the open files of a mailbox with two connections."""

LOOPBACK = "127.0.0.1"
ANSWER_TIMEOUT_S = 30.0

KEYS_VARIABLE = "STERNA_BENCH_MAILBOX_KEYS"
"""The environment variable in which the processes have the keys of their mailboxes."""

LEAST_PAUSE_S = 0.001
"""Reports that are due within this time are sent together."""


class Counts(NamedTuple):
    """Reports of loads and of prefix caches that have arrived at a scheduler, and the processor
    time that its process has used, so far."""

    num_loads: int
    num_caches: int
    cpu_s: float

    def since(self, earlier: "Counts") -> "Counts":
        """Those that are new since the earlier ones."""
        return Counts(
            self.num_loads - earlier.num_loads,
            self.num_caches - earlier.num_caches,
            self.cpu_s - earlier.cpu_s,
        )


def waits_row(policy_name: str, num_instances: int, num_requests: int, seed: int) -> Row:
    """The wait from a front end's question to the moment at which it has sent the request on, and
    the load reports a second that arrived at the scheduler meanwhile."""
    with _cluster(policy_name, num_instances, seed) as (scheduler, addresses):
        asked = _asked(scheduler, addresses, num_requests, seed)
        waits_s, reports_per_s = uvloop.run(asked)
    median, p99 = np.percentile(waits_s, (50, 99))
    return {
        "instances": num_instances,
        "policy": policy_name,
        "seed": seed,
        "n": num_requests,
        "rate": RATE,
        "p50_ms": rounded(1_000 * median),
        "p99_ms": rounded(1_000 * p99),
        "asked_reports_per_s": rounded(reports_per_s),
    }


def reports_row(policy_name: str, num_instances: int, duration_s: float, seed: int) -> Row:
    """The share of a core that the scheduler needs for load reports and rounds alone, the reports
    that arrive and those that are due, a second."""
    with _cluster(policy_name, num_instances, seed) as (scheduler, _):
        time.sleep(_warm_up_s(num_instances))
        counts, elapsed_s = _counted(scheduler, duration_s)
    return {
        "instances": num_instances,
        "policy": policy_name,
        "seed": seed,
        "report_interval_s": report_interval_s(num_instances),
        "reports_due_per_s": rounded(RATE * reports_a_decision(num_instances)),
        "reports_per_s": rounded(counts.num_loads / elapsed_s),
        "reports_cores": rounded(counts.cpu_s / elapsed_s),
    }


def cache_reports_row(policy_name: str, num_instances: int, duration_s: float, seed: int) -> Row:
    """The processor time of the scheduler's process for the report of what an instance's prefix
    cache has got with a prompt, without load reports. There are `RATE` prompts a second."""
    _allow_mailboxes(num_instances)
    with (
        _running("scheduler", policy_name) as scheduler,
        _running("caches", num_instances, seed, scheduler.address),
    ):
        time.sleep(_warm_up_s(num_instances))
        counts, _ = _counted(scheduler, duration_s)
    return {"reporting_ms": rounded(1_000 * counts.cpu_s / counts.num_caches)}


def asks_row(num_instances: int, duration_s: float, seed: int) -> Row:
    """The processor time that a scheduler would need to ask all instances how much of a prompt they
    have, and to take in their answers: of its own process, for one request after the other."""
    with (
        _running("asker", seed, duration_s) as asker,
        _running("answerers", num_instances, asker.address),
    ):
        num_asked, used_s = asker.line().split()
    return {"asking_ms": rounded(1_000 * float(used_s) / int(num_asked))}


def _warm_up_s(num_instances: int) -> float:
    return WARM_UP_S + num_instances / CONNECTED_PER_S


def _allow_mailboxes(num_instances: int) -> None:
    """Let this process and its children have as many mailboxes."""
    allow_files(FILES_OF_A_MAILBOX * num_instances + NUM_SPARE_FILES)


@functools.cache
def _keys() -> MailboxKeys:
    """Those of the process that started this one, or new ones."""
    if (given := os.environ.get(KEYS_VARIABLE)) is None:
        return draw_keys()
    public, secret = given.encode().split()
    return MailboxKeys(public, secret)


class _Child(subprocess.Popen[str]):
    """A process of this module that has printed the address of its mailbox, or of all of them.

    Raises:
        ConfigurationError: it ended at once.
    """

    def __init__(self, *arguments: object) -> None:
        keys = b" ".join((_keys().public, _keys().secret)).decode()
        super().__init__(
            [sys.executable, "-m", __spec__.name, *map(str, arguments)],
            cwd=ROOT, env=os.environ | {KEYS_VARIABLE: keys}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self.line()
        if not self.address:
            raise ConfigurationError(f"a process of the benchmark ended: {arguments[0]}")

    def line(self) -> str:
        """The next line that it prints."""
        assert self.stdout is not None
        return self.stdout.readline().strip()

    def counts(self) -> Counts:
        """Those of a scheduler."""
        self.send_signal(signal.SIGUSR1)
        num_loads, num_caches, cpu_s = self.line().split()
        return Counts(int(num_loads), int(num_caches), float(cpu_s))


@contextlib.contextmanager
def _running(*arguments: object) -> Iterator[_Child]:
    """A process of this module, which ends with the context."""
    child = _Child(*arguments)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _cluster(
    policy_name: str, num_instances: int, seed: int
) -> Iterator[tuple[_Child, Sequence[str]]]:
    """The scheduler's process and the addresses of the instances; all end with the context."""
    _allow_mailboxes(num_instances)
    with (
        _running("scheduler", policy_name) as scheduler,
        _running("instances", num_instances, seed, scheduler.address) as instances,
    ):
        yield scheduler, instances.address.split()


def _counted(scheduler: _Child, duration_s: float) -> tuple[Counts, float]:
    """What a scheduler counts in this time, and the time that it was."""
    before, begun_s = scheduler.counts(), time.monotonic()
    time.sleep(duration_s)
    return scheduler.counts().since(before), time.monotonic() - begun_s


async def _asked(
    scheduler: _Child, instances: Sequence[str], num_requests: int, seed: int
) -> tuple[list[float], float]:
    """Ask at the rate; the waits in seconds, and the load reports a second meanwhile."""
    mailbox = Mailbox(LOOPBACK, _keys())
    cluster = MadeCluster(len(instances), seed, mailbox.address, instances)
    membership = cluster.membership(2)
    addresses = {each.instance_id: each.address for each in membership.instances}
    asked_s: dict[RequestId, float] = {}
    waits_s: list[float] = []
    is_done = asyncio.Event()

    def on_message(message: WireMessage, _: list[bytes]) -> None:
        if not isinstance(message, Dispatched):
            return
        request_id = message.request_id
        add = AddRequest(FRONTEND, request_id, message.dispatch_number)
        mailbox.send(addresses[message.instance_id], add, [b"request"])
        waits_s.append(time.perf_counter() - asked_s.pop(request_id))
        if len(waits_s) == num_requests:
            is_done.set()

    delivery = asyncio.create_task(mailbox.deliver(on_message))
    try:
        mailbox.send(scheduler.address, membership)
        for report in cluster.caches():
            mailbox.send(scheduler.address, report)
        for address in instances:
            # So that all are connected before the first question.
            mailbox.send(address, AddRequest(FRONTEND, RequestId("none"), 0), [b"request"])
        await asyncio.sleep(_warm_up_s(len(instances)))
        requests = [cluster.request() for _ in range(num_requests)]
        before = scheduler.counts()
        draws, begun_s, due_s = np.random.default_rng(seed), time.perf_counter(), 0.0
        for request in requests:
            due_s += float(draws.exponential(1 / RATE))
            delay_s = begun_s + due_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            asked_s[request.request_id] = time.perf_counter()
            mailbox.send(scheduler.address, request)
        try:
            await asyncio.wait_for(is_done.wait(), ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigurationError(
                f"the scheduler did not answer all questions within {ANSWER_TIMEOUT_S:g} s after "
                "the last: this machine is too slow for as many instances and questions a second"
            ) from error
        num_reports = scheduler.counts().since(before).num_loads
        reports_per_s = num_reports / (time.perf_counter() - begun_s)
    finally:
        delivery.cancel()
        mailbox.close()
    return waits_s, reports_per_s


class _CountingScheduler(Scheduler):
    """Counts the reports that arrive; prints its counts on SIGUSR1."""

    def __init__(self, policy: PolicyConfig, mailbox: Mailbox) -> None:
        super().__init__(policy, mailbox)
        self._num_loads = self._num_caches = 0
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._print)

    def on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        self._num_loads += isinstance(message, LoadReport)
        self._num_caches += isinstance(message, CacheReport)
        super().on_message(message, frames)

    def _print(self) -> None:
        print(self._num_loads, self._num_caches, time.process_time(), flush=True)


async def _be_scheduler(policy_name: str) -> None:
    collect_garbage_seldom()
    mailbox = Mailbox(LOOPBACK, _keys())
    scheduler = _CountingScheduler(preset(policy_name), mailbox)
    print(mailbox.address, flush=True)
    await scheduler.run()


async def _be_instances(num_instances: int, seed: int, scheduler: str) -> None:
    """Report forever, each instance once in an interval; a report shows the requests that the
    instance has got so far."""
    last_dispatches = [0] * num_instances

    def on_message(number: int, message: WireMessage) -> None:
        if isinstance(message, AddRequest):
            last_dispatches[number] = message.dispatch_number
        elif isinstance(message, CopyPrefix):
            mailboxes[number].send(scheduler, PrefixDone(message.request_id))

    async with asyncio.TaskGroup() as group:
        mailboxes = _mailboxes(num_instances, group, on_message)
        addresses = [each.address for each in mailboxes]
        cluster = MadeCluster(num_instances, seed, "", addresses)
        print(*addresses, flush=True)
        mailboxes[0].send(scheduler, cluster.membership())
        num_sent = 0
        async for num_due in _due(RATE * reports_a_decision(num_instances)):
            # Those that are late by more than an interval are left out: the next ones are due.
            num_sent = max(num_sent, num_due - num_instances)
            while num_sent < num_due:
                number = num_sent % num_instances
                report = cluster.load_of(number, last_dispatches[number])
                mailboxes[number].send(scheduler, report)
                num_sent += 1


async def _be_caches(num_instances: int, seed: int, scheduler: str) -> None:
    """Report forever what a prefix cache has got, at the rate of requests, of one that had a part
    of the prompt already where there is one."""
    async with asyncio.TaskGroup() as group:
        mailboxes = _mailboxes(num_instances, group, lambda *_: None)
        cluster = MadeCluster(num_instances, seed, "", [each.address for each in mailboxes])
        members = cluster.membership().instances
        of_instance = dict(zip((each.instance_id for each in members), mailboxes, strict=True))
        print(len(members), flush=True)
        mailboxes[0].send(scheduler, cluster.membership())
        first: list[WireMessage] = [*cluster.caches(), *cluster.loads()]
        for report in first:
            mailboxes[0].send(scheduler, report)
        # Other connections do not wait for these.
        await asyncio.sleep(FIRST_S)
        num_sent = 0
        async for num_due in _due(RATE):
            while num_sent < num_due:
                request = cluster.request()
                holder = cluster.holder(request)
                of_instance[holder].send(scheduler, cluster.computed(holder, request))
                num_sent += 1


def _mailboxes(
    number: int, group: asyncio.TaskGroup, on_message: Callable[[int, WireMessage], None]
) -> list[Mailbox]:
    """A mailbox for each instance; what arrives is handed on with the instance's number."""
    mailboxes = [Mailbox(LOOPBACK, _keys()) for _ in range(number)]

    def of(index: int) -> Callable[[WireMessage, list[bytes]], None]:
        return lambda message, _: on_message(index, message)

    for index, mailbox in enumerate(mailboxes):
        group.create_task(mailbox.deliver(of(index)))
    return mailboxes


async def _due(per_s: float) -> AsyncIterator[int]:
    """The number of events at this rate that are due so far, forever."""
    begun_s = time.monotonic()
    while True:
        yield int((time.monotonic() - begun_s) * per_s)
        await asyncio.sleep(max(1 / per_s, LEAST_PAUSE_S))


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

    def on_message(index: int, message: WireMessage) -> None:
        if isinstance(message, CopyPrefix):
            mailboxes[index].send(asker, PrefixDone(message.request_id))

    async with asyncio.TaskGroup() as group:
        mailboxes = _mailboxes(number, group, on_message)
        members = tuple(
            InstanceMember(InstanceId(f"i{k}"), each.address) for k, each in enumerate(mailboxes)
        )
        print(len(members), flush=True)
        mailboxes[0].send(asker, Membership(1, members, (), None))


def main(arguments: Sequence[str]) -> None:
    """Be one of the processes."""
    what, *rest = arguments
    with contextlib.suppress(KeyboardInterrupt):
        match what:
            case "scheduler":
                uvloop.run(_be_scheduler(rest[0]))
            case "instances" | "caches":
                number, seed, scheduler = rest
                be = _be_instances if what == "instances" else _be_caches
                uvloop.run(be(int(number), int(seed), scheduler))
            case "asker":
                uvloop.run(_be_asker(int(rest[0]), float(rest[1])))
            case "answerers":
                uvloop.run(_be_answerers(int(rest[0]), rest[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
