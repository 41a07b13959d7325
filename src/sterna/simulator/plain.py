"""The engines of all instances, step by step: every step is two events. Pure.

They are the reference for the compiled engines (`fast`), and the ones that the checks inspect.
"""

from array import array
from dataclasses import dataclass, replace

import numpy as np

from sterna.config import PolicyConfig
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.durations import whole_nanoseconds
from sterna.engine.emulated.requests import RequestState, decode_state
from sterna.engine.emulated.steps import Step
from sterna.metrics.records import Records
from sterna.policy.load_report import load
from sterna.policy.virtual_usage import prefill_demand_tokens_of, used_tokens_of
from sterna.simulator.config import Report, SimulationConfig
from sterna.simulator.engines import index_of, request_id_of
from sterna.simulator.recorder import MemorySample
from sterna.types import (
    InstanceId,
    InstanceLoad,
    InstanceView,
    MigrationId,
    Priority,
    RequestId,
)
from sterna.workload.block_hashes import BlockHashes
from sterna.workload.trace import Trace
from sterna.workload.turns import NONE


@dataclass(slots=True)
class _Snapshot:
    """Content of a report: the state, and the last dispatch that is part of it."""

    view: InstanceView
    last_dispatch: int


@dataclass(slots=True)
class _Engine:
    instance_id: InstanceId
    core: EmulatedCore
    policy: PolicyConfig
    step: Step | None = None
    end_s: float = 0.0
    step_ns: int = 0
    is_terminating: bool = False
    num_outgoing: int = 0
    num_incoming: int = 0
    num_reports: int = 0
    last_dispatch: int = 0
    begun: _Snapshot | None = None
    reported: _Snapshot | None = None


@dataclass(slots=True)
class _Times:
    """Times and counts of one request; a time is None until its event has happened."""

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_preemptions: int = 0
    loss_s: float = 0.0
    preempted_s: float | None = None
    num_tokens: int = 0
    execution_ns: int = 0
    num_cached_tokens: int = 0


class PlainEngines:
    """One `EmulatedCore` an instance; see `engines.Engines` for the methods."""

    steps_alone = False

    def __init__(self, trace: Trace, config: SimulationConfig) -> None:
        self._trace = trace
        self._config = config
        self._engines: dict[int, _Engine] = {}
        self._changed: set[int] = set()
        self._times = [_Times() for _ in range(len(trace))]
        self._arrival_s = trace.arrival_s.copy()
        self._next_turns = None if trace.turns is None else trace.turns.next()
        self._turns_ended: list[tuple[int, float]] = []
        self._hashes = (
            BlockHashes.of(trace, config.engine.block_size)
            if config.engine.prefix_caching
            else None
        )
        self.num_ended = 0
        self.num_steps = 0

    def start(self, row: int, instance_id: InstanceId, policy: PolicyConfig) -> None:
        core = EmulatedCore(self._config.engine, self._config.step_time)
        self._engines[row] = _Engine(instance_id, core, policy)
        self._report_now(row)

    def stop(self, row: int) -> None:
        assert self.is_empty(row)
        del self._engines[row]
        self._changed.discard(row)

    def cores(self) -> dict[InstanceId, EmulatedCore]:
        """The engines themselves, for the checks."""
        return {engine.instance_id: engine.core for engine in self._engines.values()}

    def num_delivered(self, index: int) -> int:
        """Number of tokens that the request's client has received, for the checks."""
        return self._times[index].num_tokens

    # ------------------------------------------------------------------------------- steps

    def advance(self, until_s: float) -> None:
        pass

    def notices(
        self, until_s: float, room_tokens: int | None, growth_steps: float
    ) -> tuple[list[tuple[int, float]], float | None]:
        ended, self._turns_ended = self._turns_ended, []
        return ended, None

    def has_room(self, row: int, num_tokens: int, growth_steps: float) -> bool:
        view = self._view(self._engines[row])
        num_requests = len(view.running) + len(view.queuing)
        if view.num_slots is not None and num_requests >= view.num_slots:
            return False
        taken_tokens = used_tokens_of(view) + prefill_demand_tokens_of(view)
        taken_tokens += sum(each.demand_tokens for each in view.queuing)
        growth_tokens = growth_steps * num_requests
        return taken_tokens + growth_tokens + num_tokens <= view.total_tokens

    def step_end_s(self, row: int, now_s: float) -> float | None:
        engine = self._engines[row]
        return None if engine.step is None else engine.end_s

    def hold(self, row: int) -> None:
        pass

    def begin_step(self, row: int, now_s: float) -> float | None:
        engine = self._engines[row]
        step = engine.core.begin_step()
        engine.end_s = now_s + step.duration_s
        for request_id in step.preempted:
            times = self._times[index_of(request_id)]
            times.num_preemptions += 1
            if times.preempted_s is None:
                # The step that it misses would have produced its next token.
                times.preempted_s = engine.end_s
        for request_id, num_cached_tokens in zip(step.admitted, step.cached, strict=True):
            times = self._times[index_of(request_id)]
            if times.first_scheduled_s is None:
                times.first_scheduled_s = now_s
                times.num_cached_tokens = num_cached_tokens
        if not step.scheduled:
            # While the engine does not step, no later event would report its state.
            self._report_now(row)
            return None
        self.num_steps += 1
        engine.step = step
        engine.step_ns = whole_nanoseconds(engine.end_s - now_s)
        engine.begun = self._snapshot(engine)
        if self._config.report is Report.STEP:
            engine.reported = engine.begun
        self._changed.add(row)
        return engine.end_s

    def end_step(self, row: int, now_s: float) -> None:
        engine = self._engines[row]
        assert engine.step is not None
        assert now_s == engine.end_s
        for request_id in engine.step.decoded:
            self._times[index_of(request_id)].execution_ns += engine.step_ns
        for token in engine.core.end_step():
            times = self._times[index_of(token.request_id)]
            assert token.index == times.num_tokens, "tokens in order, each of them once"
            times.num_tokens += 1
            if times.first_token_s is None:
                times.first_token_s = now_s
            if times.preempted_s is not None:
                times.loss_s += now_s - times.preempted_s
                times.preempted_s = None
            if token.is_last:
                assert times.end_s is None
                times.end_s = now_s
                self.num_ended += 1
                index = index_of(token.request_id)
                if self._next_turns is not None and self._next_turns[index] != NONE:
                    self._turns_ended.append((index, now_s))
        engine.step = None
        engine.reported = engine.begun
        self._changed.add(row)

    # ------------------------------------------------------------------------------- loads

    def set_terminating(self, row: int) -> None:
        self._engines[row].is_terminating = True
        self._changed.add(row)

    def set_migrating(self, row: int, num_outgoing: int, num_incoming: int) -> None:
        engine = self._engines[row]
        engine.num_outgoing, engine.num_incoming = num_outgoing, num_incoming
        self._changed.add(row)

    def changed_loads(self, now_s: float) -> list[InstanceLoad]:
        loads = [self._load(self._engines[row]) for row in sorted(self._changed)]
        self._changed.clear()
        return loads

    def _load(self, engine: _Engine) -> InstanceLoad:
        snapshot = engine.reported
        if self._config.report is Report.LIVE or snapshot is None:
            snapshot = self._snapshot(engine)
        engine.num_reports += 1
        return load(
            replace(snapshot.view, is_terminating=engine.is_terminating),
            engine.policy,
            sequence=engine.num_reports,
            last_dispatch=snapshot.last_dispatch,
            num_migrating_out=engine.num_outgoing,
            num_migrating_in=engine.num_incoming,
        )

    def view(self, row: int, now_s: float) -> InstanceView:
        return self._view(self._engines[row])

    def _view(self, engine: _Engine) -> InstanceView:
        return engine.core.view(engine.instance_id, is_terminating=engine.is_terminating)

    def is_empty(self, row: int) -> bool:
        return self._engines[row].core.is_empty

    def memory(self) -> MemorySample:
        config = self._config.engine
        free_tokens = room_tokens = largest_room_tokens = largest_used_tokens = 0
        demands_tokens = []
        for row in sorted(self._engines):
            core = self._engines[row].core
            room_blocks = max(0, core.num_free_blocks - config.watermark_blocks)
            free_tokens += core.num_free_blocks * config.block_size
            room_tokens += room_blocks * config.block_size
            largest_room_tokens = max(largest_room_tokens, room_blocks * config.block_size)
            num_used_blocks = config.num_blocks - core.num_free_blocks
            largest_used_tokens = max(largest_used_tokens, num_used_blocks * config.block_size)
            queuing = self._view(self._engines[row]).queuing
            if queuing and queuing[0].demand_tokens > room_blocks * config.block_size:
                demands_tokens.append(queuing[0].demand_tokens)
        return MemorySample(
            free_tokens=free_tokens,
            room_tokens=room_tokens,
            largest_room_tokens=largest_room_tokens,
            demands_tokens=demands_tokens,
            total_tokens=len(self._engines) * config.num_blocks * config.block_size,
            largest_used_tokens=largest_used_tokens,
            num_instances=len(self._engines),
        )

    def _snapshot(self, engine: _Engine) -> _Snapshot:
        return _Snapshot(engine.core.view(engine.instance_id), engine.last_dispatch)

    def _report_now(self, row: int) -> None:
        engine = self._engines[row]
        engine.reported = self._snapshot(engine)
        self._changed.add(row)

    # ---------------------------------------------------------------------------- requests

    def set_arrival(self, index: int, arrival_s: float) -> None:
        self._arrival_s[index] = arrival_s

    def add(self, row: int, index: int, dispatch_number: int, now_s: float) -> None:
        engine = self._engines[row]
        priority = self._config.policy.counts_as(Priority(int(self._trace.priority[index])))
        engine.core.add(
            RequestState(
                request_id=request_id_of(index),
                prompt_tokens=int(self._trace.input_tokens[index]),
                output_tokens=int(self._trace.output_tokens[index]),
                arrival_s=float(self._arrival_s[index]),
                scheduling_priority=priority,
                execution_priority=priority,
                block_hashes=self._hashes.of_request(index).tobytes() if self._hashes else b"",
            )
        )
        engine.last_dispatch = dispatch_number
        self._changed.add(row)

    def prompt_hashes(self, index: int) -> bytes:
        if self._hashes is None:
            return b""
        return self._hashes.of_prompt(
            index, int(self._trace.input_tokens[index]) // self._config.engine.block_size
        )

    def coming_tokens(self, index: int) -> dict[InstanceId, int]:
        if self._hashes is None:
            return {}
        hashes: list[int] = self._hashes.of_request(index).tolist()
        num_tokens = int(self._trace.input_tokens[index])
        coming = {
            engine.instance_id: engine.core.coming_tokens(hashes, num_tokens)
            for _, engine in sorted(self._engines.items())
        }
        return {instance_id: num for instance_id, num in coming.items() if num > 0}

    def core(self, row: int) -> EmulatedCore:
        return self._engines[row].core

    def export(self, row: int, index: int) -> bytes:
        return self._engines[row].core.export(request_id_of(index)).encode()

    def adopt(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        self._engines[row].core.adopt(migration_id, decode_state(state), num_blocks)

    def keep_prefix(self, row: int, moving_id: RequestId, first_token: int) -> None:
        assert self._hashes is not None
        index, block_size = index_of(moving_id), self._config.engine.block_size
        num_blocks = (int(self._trace.input_tokens[index]) - 1) // block_size
        hashes = self._hashes.of_request(index)[:num_blocks].tolist()
        self.core(row).keep_prefix(moving_id, hashes, first_token // block_size)

    def export_prefix(self, row: int, moving_id: RequestId) -> bytes:
        kept = self.core(row).kept_hashes(moving_id)
        return array("q", kept).tobytes()

    def adopt_prefix(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        hashes = array("q")
        hashes.frombytes(state)
        self.core(row).adopt_prefix(migration_id, hashes)

    def records(self) -> Records:
        nan = float("nan")

        def seconds(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            values = [getattr(times, name) for times in self._times]
            return np.array([nan if value is None else value for value in values], np.float64)

        return Records(
            arrival_s=self._arrival_s,
            first_token_s=seconds("first_token_s"),
            end_s=seconds("end_s"),
            input_tokens=self._trace.input_tokens,
            output_tokens=self._trace.output_tokens,
            priority=self._trace.priority,
            num_preemptions=np.array([each.num_preemptions for each in self._times], np.int64),
            preemption_loss_s=seconds("loss_s"),
            queue_s=seconds("first_scheduled_s") - self._arrival_s,
            decode_execution_s=np.array([each.execution_ns for each in self._times]) / 1e9,
            cached_tokens=(
                np.array([each.num_cached_tokens for each in self._times], np.int64)
                if self._hashes
                else None
            ),
            reusable_tokens=self._hashes.reusable_tokens if self._hashes else None,
        )
