"""Measured costs of scheduling: the production global scheduler's decisions in this process, and
an iteration's scheduling from the real engine's profile (bench/paper/decode_profile.py)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.common.results_io import RESULTS, read, summary
from bench.common.tables import Row
from sterna.errors import ConfigurationError
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import LLUMNIX
from sterna.scheduler.global_scheduler import GlobalScheduler
from sterna.types import NORMAL, FrontendId, InstanceId, InstanceLoad, RequestId
from sterna.workload.seeds import PAPER_SEED

NUM_INSTANCES = 64
NUM_TOKENS = 64
"""Length of every prompt, and of every output."""
TOTAL_TOKENS = 785 * 16


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of scheduling in seconds; of an iteration as `constant + per request * batch`.

    Attributes:
        local_s: an instance that schedules its own steps, its llumlet's report included.
        central_s: the centralized scheduler for one instance's step.
        dispatch_s: the global scheduler for a new request.
        report_s: the global scheduler for a load report.
    """

    local_s: tuple[float, float]
    central_s: tuple[float, float]
    dispatch_s: float
    report_s: float


def iteration_costs() -> tuple[tuple[float, float], tuple[float, float]]:
    """Local and central cost of an iteration, in seconds: lines through the profile's medians.

    Raises:
        ConfigurationError: there is no profile.
    """
    return (
        profile_line("schedule_ms", "update_ms", "report_ms"),
        profile_line("schedule_ms", "update_ms", "coding_ms"),
    )


def profile_line(*parts: str) -> tuple[float, float]:
    """These parts of an iteration together, as a constant and a time for each request, in seconds.

    Raises:
        ConfigurationError: there is no profile.
    """
    if not (RESULTS / "decode_profile.json").exists():
        raise ConfigurationError(
            "there is no bench/results/decode_profile.json: run "
            "`python -m bench.paper.decode_profile`"
        )
    profile = read("decode_profile")["rows"]
    batches = [row["batch_size"] for row in profile]
    totals = [sum(row[each]["median"] for each in parts) / 1000 for row in profile]
    slope, constant = np.polyfit(batches, totals, 1)
    return max(0.0, float(constant)), max(0.0, float(slope))


def a_load(index: int, sequence: int, num_running: int) -> InstanceLoad:
    """A report of an instance whose requests, `num_requests`, are half way through."""
    used_tokens = num_running * 96
    return InstanceLoad(
        instance_id=InstanceId(f"i{index:05d}"),
        sequence=sequence,
        total_tokens=TOTAL_TOKENS,
        used_tokens=used_tokens,
        free_tokens=TOTAL_TOKENS - used_tokens,
        normal_free_tokens=TOTAL_TOKENS - used_tokens,
        num_running=num_running,
        num_queuing=0,
        num_by_priority=((NORMAL, num_running),),
        last_dispatch=10**9,
        move_tokens=96,
    )


def scheduler_rows(num_calls: int) -> list[Row]:
    """Each kind of decision of the production global scheduler, timed."""
    scheduler = GlobalScheduler(LLUMNIX, now_s=0.0)
    draws = np.random.default_rng(PAPER_SEED)
    batches = draws.integers(1, 40, size=(num_calls, NUM_INSTANCES)).tolist()
    timed: dict[str, list[float]] = {"dispatch": [], "report": [], "round": []}

    def call(kind: str, decide: Callable[[], object]) -> None:
        begun_s = time.perf_counter()
        decide()
        timed[kind].append(time.perf_counter() - begun_s)

    for sequence, running in enumerate(batches, start=1):
        now_s = sequence * LLUMNIX.round_interval_s
        loads = [a_load(index, sequence, each) for index, each in enumerate(running)]
        for each in loads:
            call("report", lambda each=each, at=now_s: scheduler.on_load(each, at))  # type: ignore[misc]
        request = DispatchRequest(
            frontend_id=FrontendId(0),
            request_id=RequestId(f"r{sequence}"),
            demand_tokens=NUM_TOKENS,
            arrival_s=now_s,
            scheduling_priority=NORMAL,
            execution_priority=NORMAL,
        )
        call("dispatch", lambda new=request, at=now_s: scheduler.on_request(new, at))  # type: ignore[misc]
        call("round", lambda at=now_s: scheduler.on_tick(at))  # type: ignore[misc]
    return [
        {
            "measure": "decision",
            "decision": kind,
            "instances": NUM_INSTANCES,
            "n": len(durations_s),
            "duration_ms": summary([1000 * each for each in durations_s]),
        }
        for kind, durations_s in timed.items()
    ]
