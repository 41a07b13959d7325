"""The scheduler's core alone: processor time of a decision, of a report and of a round."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from bench.common.tables import Row, rounded
from bench.scheduling.made_cluster import RATE, MadeCluster, reports_a_decision
from sterna.messages.actors import (
    CacheReport,
    Dispatched,
    DispatchRequest,
    LoadReport,
    PrefixDone,
    WireMessage,
)
from sterna.messaging.send_effects import ToMailbox
from sterna.policy.presets import preset
from sterna.scheduler.core import SchedulerCore, SchedulerEffect
from sterna.types import InstanceId

COMPUTED_AFTER = 100
"""Number of decisions after which a prompt is in the prefix cache."""

NUM_ROUNDS = 20


def core_row(policy_name: str, num_instances: int, num_decisions: int, seed: int) -> Row:
    """Processor time of decisions, reports and rounds with this number of instances.

    Between two decisions as many instances report their loads as do so in that time on average, and
    one what its prefix cache has got; messages come encoded, as from a mailbox. The decision about
    a request that waits for its prefix takes two messages.
    """
    cluster = MadeCluster(num_instances, seed)
    core = SchedulerCore(replace(preset(policy_name), round_interval_s=1e9), now_s=0.0)
    core.on_membership(cluster.membership(), 0.0)
    reports: list[CacheReport | LoadReport] = [*cluster.caches(), *cluster.loads()]
    for report in reports:
        core.on_message(report, 0.0)
    timed = Timed(core)
    computing: deque[tuple[InstanceId, DispatchRequest]] = deque()
    decisions_s: list[float] = []
    num_a_decision = reports_a_decision(num_instances)
    number = num_reports = 0
    for index in range(1, num_decisions + 1):
        timed.now_s += 1 / RATE
        while num_reports < round(index * num_a_decision):
            timed.send(cluster.drawn_load(number))
            num_reports += 1
        if len(computing) == COMPUTED_AFTER:
            timed.send(cluster.computed(*computing.popleft()))
        request = cluster.request()
        dispatched, decision_s = decided(timed, request)
        decisions_s.append(decision_s)
        number = dispatched.dispatch_number
        computing.append((dispatched.instance_id, request))
    median, p99 = np.percentile(decisions_s, (50, 99))
    return {
        "instances": num_instances,
        "policy": policy_name,
        "seed": seed,
        "n": num_decisions,
        "reports_a_decision": rounded(num_a_decision),
        "decisions_per_s_per_core": rounded(num_decisions / sum(decisions_s)),
        "decision_median_ms": rounded(1_000 * median),
        "decision_p99_ms": rounded(1_000 * p99),
        "load_report_us": rounded(1e6 * float(np.mean(timed.durations_s[LoadReport]))),
        "cache_report_us": rounded(1e6 * float(np.mean(timed.durations_s[CacheReport] or [0.0]))),
        "round_ms": rounded(_round_ms(policy_name, cluster)),
    }


def decided(timed: "Timed", request: DispatchRequest) -> tuple[Dispatched, float]:
    """The decision about the request, and the processor time of all messages that it takes."""
    dispatched = _dispatched(timed.send(request))
    duration_s = timed.durations_s[DispatchRequest][-1]
    if dispatched is None:
        # It waits for its prefix.
        dispatched = _dispatched(timed.send(PrefixDone(request.request_id)))
        assert dispatched is not None
        duration_s += timed.durations_s[PrefixDone][-1]
    return dispatched, duration_s


class Timed:
    """Hands messages to a core; keeps the processor time of each, by its type."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)
        self.durations_s: dict[type, list[float]] = defaultdict(list)
        self.now_s = 0.0

    def send(self, message: WireMessage) -> list[SchedulerEffect]:
        """The effects of the message."""
        encoded = self._encoder.encode(message)
        begun_s = time.process_time()
        effects = self._core.on_message(self._decoder.decode(encoded), self.now_s)
        self.durations_s[type(message)].append(time.process_time() - begun_s)
        return effects


def _dispatched(effects: Iterable[SchedulerEffect]) -> Dispatched | None:
    messages = [each.message for each in effects if isinstance(each, ToMailbox)]
    return next((each for each in messages if isinstance(each, Dispatched)), None)


def _round_ms(policy_name: str, cluster: MadeCluster) -> float:
    """Processor time of a round (Section 4.4.3, migration) after all instances have reported."""
    core = SchedulerCore(preset(policy_name), now_s=0.0)
    core.on_membership(cluster.membership(), 0.0)
    durations_s, now_s = [], 0.0
    for _ in range(NUM_ROUNDS):
        for report in cluster.loads():
            core.on_message(report, now_s)
        deadline_s = core.next_deadline_s
        if deadline_s is None:
            # A policy that never moves requests has no rounds.
            break
        now_s = deadline_s
        begun_s = time.process_time()
        core.on_tick(now_s)
        durations_s.append(time.process_time() - begun_s)
    return 1_000 * float(np.median(durations_s or [0.0]))
