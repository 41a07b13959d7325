"""Simulation whose course is recorded for the dashboard; its results are the same.

A frame shows the cluster at one moment of the simulated time. The latencies of a frame are filled
in at the end, when the times of all tokens are known.
"""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sterna.dashboard import recording
from sterna.dashboard.cluster_frames import (
    LATENCY_WINDOW_S,
    Frame,
    Frames,
    ShownDecision,
    ShownInstance,
    ShownRequest,
    percentiles,
)
from sterna.dashboard.decisions import line_of
from sterna.messages.reasons import MoveReason, described_dispatch, described_move
from sterna.metrics.records import ClusterRecord, Records
from sterna.migration.messages import Ended
from sterna.policy.load_report import load
from sterna.policy.virtual_usage import freeness_of
from sterna.scheduler.global_scheduler import Dispatch, Effect, SetDestination
from sterna.simulator.config import SimulationConfig
from sterna.simulator.event_queue import Action, EventQueue, Rank
from sterna.simulator.simulated_instance import SimulatedInstance
from sterna.simulator.simulation import Simulation
from sterna.types import InstanceId, InstanceView, MigrationId, RequestId, RequestView, whose_prefix
from sterna.workload.trace import Trace

CLASS_RANKS = {"normal": 0, "high": 1}
"""Classes of a trace's requests."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What `simulate_recorded` needs besides the trace and the configuration.

    Attributes:
        path: the file that is written.
        title: of the recording.
        interval_s: simulated time between two frames.
    """

    path: Path
    title: str
    interval_s: float = 1.0


def simulate_recorded(
    trace: Trace,
    config: SimulationConfig,
    recorded: Recorded,
    on_progress: Callable[[int], None] = lambda num_ended: None,
) -> tuple[Records, ClusterRecord]:
    """Run the trace as `simulate` does, and write its recording.

    Args:
        on_progress: called at each frame with the number of requests that have ended.

    Raises:
        ConfigurationError: a request of the trace can never be served by such an instance, or the
            recording cannot be written.
    """
    begin_s = time.perf_counter()
    simulation = _RecordedSimulation(trace, config, recorded, on_progress)
    simulation.run()
    records, cluster = simulation.result(time.perf_counter() - begin_s)
    simulation.write(records)
    return records, cluster


@dataclass(slots=True)
class _Moves:
    """What is known of the migrations until they end."""

    places: dict[RequestId, InstanceId] = field(default_factory=dict)
    reasons: dict[InstanceId, MoveReason] = field(default_factory=dict)
    downtimes_s: dict[MigrationId, float] = field(default_factory=dict)


class _RecordedSimulation(Simulation):
    """The same run, with events that only look."""

    def __init__(
        self,
        trace: Trace,
        config: SimulationConfig,
        recorded: Recorded,
        on_progress: Callable[[int], None],
    ) -> None:
        super().__init__(trace, config, explains=True)
        self._events = self._queue = _TimedQueue()
        self._recorded = recorded
        self._on_progress = on_progress
        self._policy = config.policy
        self._frames = Frames(recorded.title, CLASS_RANKS)
        self._header = self._frames.header()
        self._decisions: list[ShownDecision] = []
        # Compressed, since a long run has many.
        self._kept: list[bytes] = []
        self._starting: set[InstanceId] = set()
        self._moves = _Moves()

    def run(self) -> None:
        """See `Simulation`; the first frame is that of the start, and the last one of the end."""
        self._events.push(0.0, Rank.SAMPLE, self._look)
        super().run()
        self._take(self._queue.now_s)

    def write(self, records: Records) -> None:
        """Write the recording.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        tpots_s = (records.end_s - records.first_token_s) / np.maximum(records.output_tokens - 1, 1)
        has_tpot = records.output_tokens > 1
        ttfts_s = records.first_token_s - records.arrival_s

        def whole(kept: bytes) -> Frame:
            frame: Frame = json.loads(zlib.decompress(kept))
            begin_s, end_s = frame["t"] - LATENCY_WINDOW_S, frame["t"]
            began = (records.first_token_s > begin_s) & (records.first_token_s <= end_s)
            ended = (records.end_s > begin_s) & (records.end_s <= end_s) & has_tpot
            frame["ttft"] = percentiles(ttfts_s[began].tolist())
            frame["tpot"] = percentiles(tpots_s[ended].tolist())
            return frame

        recording.write(self._recorded.path, self._header, map(whole, self._kept))

    # -------------------------------------------------------------------------------- frames

    def _look(self, now_s: float) -> None:
        self._engines.advance(now_s)
        self._on_progress(self._engines.num_ended)
        self._take(now_s)
        # Another look would keep a run alive that has nothing else to come.
        if self._engines.num_ended < len(self._trace):
            next_s = now_s + self._recorded.interval_s
            self._events.push(next_s, Rank.SAMPLE, self._look)

    def _take(self, now_s: float) -> None:
        frame = self._frames.frame(
            now_s,
            [self._shown(each, now_s) for each in self._instances.values()],
            num_held=self._scheduler.num_held,
            decisions=self._decisions,
        )
        self._decisions = []
        self._kept.append(zlib.compress(json.dumps(frame).encode(), 1))

    def _shown(self, instance: SimulatedInstance, now_s: float) -> ShownInstance:
        name = instance.instance_id
        if name in self._starting:
            return ShownInstance(name, "starting", 0, 0, None, 0, 0, None, ())
        view = self._engines.view(instance.row, now_s)
        seen = load(
            view,
            self._policy,
            sequence=0,
            last_dispatch=0,
            num_migrating_out=instance.llumlet.num_outgoing,
            num_migrating_in=instance.llumlet.num_incoming,
        )
        freeness = freeness_of(seen)
        return ShownInstance(
            name,
            "terminating" if instance.is_terminating else "running",
            seen.total_tokens,
            seen.used_tokens,
            freeness if np.isfinite(freeness) else None,
            len(view.running),
            len(view.queuing),
            None,
            _requests(view),
        )

    # ------------------------------------------------------------------------------- events

    def _launch(self, now_s: float, delay_s: float) -> None:
        super()._launch(now_s, delay_s)
        if delay_s > 0.0:
            self._starting.add(next(reversed(self._instances)))

    def _ready(self, instance: SimulatedInstance, now_s: float) -> None:
        self._starting.discard(instance.instance_id)
        super()._ready(instance, now_s)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        self._queue.now_s = max(self._queue.now_s, now_s)
        for effect in effects:
            match effect:
                case Dispatch(request_id, _, instance_id, _, reason):
                    self._moves.places[request_id] = instance_id
                    why = None if reason is None else described_dispatch(reason)
                    self._decide(request_id, "dispatched", instance=instance_id, why=why)
                case SetDestination(source, _, MoveReason() as reason):
                    self._moves.reasons[source] = reason
        super()._carry_out(effects, now_s)

    def on_adopted(self, migration_id: MigrationId, now_s: float) -> None:
        """See `Simulation`."""
        drained_s = self._recorder.drained_s.get(migration_id)
        if drained_s is not None:
            self._moves.downtimes_s[migration_id] = now_s - drained_s
        super().on_adopted(migration_id, now_s)

    def on_ended(self, ended: Ended) -> None:
        """See `Simulation`."""
        super().on_ended(ended)
        # The destination's side ends first.
        if not ended.is_outgoing or whose_prefix(ended.request_id) is not None:
            return
        downtime_s = self._moves.downtimes_s.pop(ended.migration_id, 0.0)
        source = self._moves.places[ended.request_id]
        known = {"from": source, "to": ended.peer}
        if ended.aborted is not None:
            outcome = ended.aborted.name.lower()
            self._decide(ended.request_id, "did not move", outcome=outcome, **known)
            return
        self._moves.places[ended.request_id] = ended.peer
        reason = self._moves.reasons.get(source)
        why = None if reason is None else described_move(reason)
        self._decide(ended.request_id, "moved", suspended_s=downtime_s, why=why, **known)

    def _decide(self, request_id: RequestId, event: str, **facts: Any) -> None:
        line = line_of({"event": event, **facts})
        self._decisions.append(ShownDecision(self._queue.now_s, request_id, event, line))


class _TimedQueue(EventQueue):
    """Event queue that knows the time of what happens. Requests arrive beside the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def pop(self) -> tuple[float, Action]:
        self.now_s, action = super().pop()
        return self.now_s, action


def _requests(view: InstanceView) -> list[ShownRequest]:
    running = map(partial(_request, is_queuing=False), view.running)
    return [*running, *map(partial(_request, is_queuing=True), view.queuing)]


def _request(request: RequestView, *, is_queuing: bool) -> ShownRequest:
    name = "high" if request.execution_priority > 0 else "normal"
    return ShownRequest(request.request_id, name, request.physical_usage_tokens, is_queuing)
