"""Stress test: instances whose iterations are scheduled before they are computed (Figure 16)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.common.tables import Row, rounded
from bench.paper.figures.scheduling_costs import NUM_INSTANCES, NUM_TOKENS, Costs
from sterna.engine.emulated.durations import StepTime
from sterna.instance.llumlet import spread_interval_s
from sterna.simulator.paper import paper_config
from sterna.workload.seeds import PAPER_SEED

LLUMLETS, CENTRALIZED, NO_SCHEDULING = "llumlets", "centralized", "none"
WARM_UP_S = 10.0
REPORT_INTERVAL_S = 0.05


@dataclass(slots=True)
class _Instance:
    num_waiting: int = 0
    num_prefilling: int = 0
    """Prompts of the current step."""
    running: list[tuple[int, float]] = field(default_factory=list)
    """Remaining tokens of each request, and the time of its first token."""
    is_idle: bool = True


class StressTest:
    """Instances whose iterations are scheduled before they are computed."""

    def __init__(
        self, architecture: str, costs: Costs, step_time: StepTime, num_instances: int
    ) -> None:
        self._architecture = architecture
        self._costs = costs
        self._step_time = step_time
        self._instances = [_Instance() for _ in range(num_instances)]
        self._num_requests = np.zeros(num_instances, np.int64)
        self._central_free_s = 0.0
        self._global_free_s = 0.0
        self._ends: list[tuple[float, int]] = []
        self.stalls_s: list[float] = []
        self.steps_s: list[float] = []
        self.token_latencies_s: list[float] = []
        self.dispatch_delays_s: list[float] = []

    def run(self, arrivals_s: Sequence[float]) -> None:
        """Run until the last arrival."""
        for arrival_s in arrivals_s:
            while self._ends and self._ends[0][0] <= arrival_s:
                self._end_step(*heapq.heappop(self._ends))
            at_s = self._dispatched_s(arrival_s)
            index = int(self._num_requests.argmin())
            self._num_requests[index] += 1
            instance = self._instances[index]
            instance.num_waiting += 1
            if instance.is_idle:
                self._begin_step(index, at_s)

    def _dispatched_s(self, arrival_s: float) -> float:
        """The time at which the request has its instance. The same scheduler processes the reports
        of all instances: their share of its time slows it down for requests."""
        if self._architecture == NO_SCHEDULING:
            return arrival_s
        if self._architecture == CENTRALIZED:
            # It is part of the iteration that the one scheduler plans.
            return arrival_s
        num_instances = len(self._instances)
        interval_s = spread_interval_s(REPORT_INTERVAL_S, num_instances)
        share = num_instances * self._costs.report_s / interval_s
        begun_s = max(arrival_s, self._global_free_s)
        self._global_free_s = begun_s + self._costs.dispatch_s / max(1e-3, 1 - share)
        if arrival_s > WARM_UP_S:
            self.dispatch_delays_s.append(self._global_free_s - arrival_s)
        return self._global_free_s

    def _begin_step(self, index: int, now_s: float) -> None:
        """Schedule the next iteration, then compute it: all new prompts, or one token of each."""
        instance = self._instances[index]
        begun_s = self._scheduled_s(int(self._num_requests[index]), now_s)
        num_new = instance.num_prefilling = instance.num_waiting
        instance.num_waiting = 0
        if num_new:
            num_tokens = num_new * NUM_TOKENS
            step_s = self._step_time.duration_s(num_tokens, num_new * NUM_TOKENS**2, 0, 0)
        else:
            num_tokens = sum(2 * NUM_TOKENS - left for left, _ in instance.running)
            step_s = self._step_time.duration_s(0, 0, len(instance.running), num_tokens)
        instance.is_idle = False
        heapq.heappush(self._ends, (begun_s + step_s, index))
        if now_s > WARM_UP_S:
            self.stalls_s.append(begun_s - now_s)
            self.steps_s.append(step_s)

    def _scheduled_s(self, batch_size: int, now_s: float) -> float:
        """The time at which the iteration's plan is ready."""
        match self._architecture:
            case "centralized":
                constant_s, request_s = self._costs.central_s
                begun_s = max(now_s, self._central_free_s)
                self._central_free_s = begun_s + constant_s + request_s * batch_size
                return self._central_free_s
            case "llumlets":
                constant_s, request_s = self._costs.local_s
                return now_s + constant_s + request_s * batch_size
        return now_s

    def _end_step(self, now_s: float, index: int) -> None:
        instance = self._instances[index]
        if instance.num_prefilling:
            instance.running += [(NUM_TOKENS - 1, now_s)] * instance.num_prefilling
            instance.num_prefilling = 0
        else:
            going = []
            for left, first_s in instance.running:
                if left > 1:
                    going.append((left - 1, first_s))
                elif now_s > WARM_UP_S:
                    self.token_latencies_s.append((now_s - first_s) / (NUM_TOKENS - 1))
            self._num_requests[index] -= len(instance.running) - len(going)
            instance.running = going
        if self._num_requests[index]:
            self._begin_step(index, now_s)
        else:
            instance.is_idle = True


def stress_row(
    architecture: str,
    rate: float,
    costs: Costs,
    duration_s: float,
    num_instances: int = NUM_INSTANCES,
) -> Row:
    """One rate with one architecture."""
    draws = np.random.default_rng(PAPER_SEED)
    gaps_s = draws.exponential(1 / rate, size=int(rate * duration_s))
    step_time = paper_config("llumnix", "S-S").step_time
    test = StressTest(architecture, costs, step_time, num_instances)
    test.run(np.cumsum(gaps_s).tolist())
    return {
        "measure": "stress",
        "architecture": architecture,
        "rate": rate,
        "n": len(test.stalls_s),
        "stall_mean_ms": rounded(1000 * float(np.mean(test.stalls_s))),
        "stall_p99_ms": rounded(1000 * float(np.percentile(test.stalls_s, 99))),
        "step_mean_ms": rounded(1000 * float(np.mean(test.steps_s))),
        "token_mean_ms": rounded(1000 * float(np.mean(test.token_latencies_s))),
        "dispatch_p99_ms": (
            rounded(1000 * float(np.percentile(test.dispatch_delays_s, 99)))
            if test.dispatch_delays_s
            else None
        ),
    }
