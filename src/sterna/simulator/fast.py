"""The engines of all instances, compiled: many steps in one call.

The same results as `plain`, bit for bit. What the compiled functions need not know while they
step is kept here: reservations, and what drained requests hold.
"""

from dataclasses import dataclass, field

import numpy as np

from sterna.config import Victim
from sterna.engine.emulated.compiled import moves, queue, reports, steps
from sterna.engine.emulated.compiled.tables import (
    ENGINE,
    LAST_STARTED,
    LIVE,
    LONGEST,
    NEVER,
    NO_VICTIM,
    NONE,
    NUM_ENDED,
    NUM_STEPS,
    REPORTED,
    REQUEST,
    SETTINGS,
    SHORTEST,
    Table,
    make_tables,
    with_more_rows,
)
from sterna.engine.emulated.config import Preemption, StepMode
from sterna.metrics.records import Records
from sterna.migration.messages import Progress, Reason
from sterna.policy.virtual_usage import load_of_sums
from sterna.simulator.config import Report, SimulationConfig
from sterna.simulator.engines import request_id_of
from sterna.types import (
    NORMAL,
    Immovable,
    InstanceId,
    InstanceLoad,
    InstanceView,
    MigrationId,
    Priority,
    RequestStatus,
    RequestView,
)
from sterna.workload.trace import Trace

VICTIMS = {
    Victim.SHORTEST: SHORTEST,
    Victim.LONGEST: LONGEST,
    Victim.LAST_STARTED: LAST_STARTED,
}


@dataclass(slots=True)
class _Reservation:
    num_blocks: int = 0
    has_slot: bool = False


@dataclass(slots=True)
class _Engine:
    instance_id: InstanceId
    is_terminating: bool = False
    reservations: dict[MigrationId, _Reservation] = field(default_factory=dict)
    # Each drained request with the blocks that it holds; none when it was queuing.
    drained: dict[int, int] = field(default_factory=dict)


class FastEngines:
    """The tables of one run; see `engines.Engines` for the methods."""

    steps_alone = True

    def __init__(self, trace: Trace, config: SimulationConfig) -> None:
        self._trace = trace
        self._config = config
        self._block_size = config.engine.block_size
        self._total_tokens = config.engine.total_tokens
        self._engines: dict[int, _Engine] = {}
        self._request_ids = [request_id_of(index) for index in range(len(trace))]
        num_rows = config.num_instances
        self._tables = make_tables(_requests(trace, config), _settings(config), num_rows)
        self._changed = np.zeros(num_rows, np.int64)
        self._listed = np.zeros((config.engine.max_num_seqs, 4), np.int64)

    @property
    def num_ended(self) -> int:
        """Requests that have produced their last token."""
        return int(self._tables.totals[NUM_ENDED])

    @property
    def num_steps(self) -> int:
        """Steps begun."""
        return int(self._tables.totals[NUM_STEPS])

    def start(self, row: int, instance_id: InstanceId) -> None:
        if row >= len(self._changed):
            num_rows = 2 * row
            self._tables = with_more_rows(self._tables, num_rows)
            self._changed = np.zeros(num_rows, np.int64)
        self._engines[row] = _Engine(instance_id)
        new = np.zeros((), ENGINE)
        new["exists"] = 1
        new["first"] = new["last"] = NONE
        new["next_finish"] = NEVER
        new["free_blocks"] = self._config.engine.num_blocks
        new["has_changed"] = 1
        self._tables.rows[row] = new
        reports.take_report(self._tables, REPORTED, row)

    def stop(self, row: int) -> None:
        assert self.is_empty(row)
        del self._engines[row]
        self._tables.rows[row]["exists"] = 0

    # ------------------------------------------------------------------------------- steps

    def advance(self, until_s: float) -> None:
        steps.advance(self._tables, until_s)

    def advance_row(self, row: int, until_s: float) -> None:
        steps.advance_row(self._tables, row, until_s)

    def step_end_s(self, row: int) -> float | None:
        record = self._tables.rows[row]
        return float(record["step_end_s"]) if record["is_stepping"] else None

    def hold(self, row: int) -> None:
        self._tables.rows[row]["is_held"] = 1

    def end_step(self, row: int, now_s: float) -> None:
        steps.advance_row(self._tables, row, now_s)

    def begin_step(self, row: int, now_s: float) -> float | None:
        has_begun = steps.begin_step(self._tables, row, now_s)
        return float(self._tables.rows[row]["step_end_s"]) if has_begun else None

    # ------------------------------------------------------------------------------- loads

    def set_terminating(self, row: int) -> None:
        self._engines[row].is_terminating = True
        self._tables.rows[row]["has_changed"] = 1

    def changed_rows(self) -> list[int]:
        num_changed = reports.collect_changed(self._tables, self._changed)
        rows: list[int] = self._changed[:num_changed].tolist()
        return rows

    def load(
        self, row: int, *, sequence: int, num_migrating_out: int, num_migrating_in: int
    ) -> InstanceLoad:
        engine = self._engines[row]
        block_size = self._block_size
        (
            used_blocks,
            reserved_blocks,
            num_running,
            num_queuing,
            num_preempted,
            head_blocks,
            queued_blocks,
            move_blocks,
            num_preemptions,
            last_dispatch,
        ) = self._tables.reports[REPORTED, row].item()
        if engine.is_terminating and num_queuing > 0:
            # The queuing ones leave first (`policy.selection`).
            move_blocks = head_blocks
        return load_of_sums(
            self._config.policy,
            instance_id=engine.instance_id,
            sequence=sequence,
            total_tokens=self._total_tokens,
            used_tokens=(used_blocks + reserved_blocks) * block_size,
            num_by_priority=self._num_by_priority(row, num_running),
            num_running=num_running,
            num_queuing=num_queuing,
            head_demand_tokens=head_blocks * block_size,
            queued_demand_tokens=queued_blocks * block_size,
            num_preempted=num_preempted,
            last_dispatch=last_dispatch,
            move_tokens=None if move_blocks == NONE else move_blocks * block_size,
            num_migrating_out=num_migrating_out,
            num_migrating_in=num_migrating_in,
            num_preemptions=num_preemptions,
            is_terminating=engine.is_terminating,
        )

    def _num_by_priority(self, row: int, num_running: int) -> tuple[tuple[Priority, int], ...]:
        if num_running == 0:
            return ()
        counts = self._tables.counts
        if counts.shape[2] == 1 or not self._config.policy.has_priorities:
            return ((NORMAL, num_running),)
        reported = counts[REPORTED, row].tolist()
        return tuple((Priority(each), count) for each, count in enumerate(reported) if count)

    def view(self, row: int) -> InstanceView:
        engine = self._engines[row]
        record = self._tables.rows[row]
        num_running = reports.list_running(self._tables, row, self._listed)
        running = [
            self._view_running(index, num_tokens, num_blocks, immovable)
            for index, num_tokens, num_blocks, is_prefilling in self._listed[:num_running].tolist()
            for immovable in (Immovable.PREFILLING if is_prefilling else None,)
        ]
        for index, num_blocks in engine.drained.items():
            if num_blocks > 0:
                request = self._tables.requests[index]
                num_tokens = int(request["prompt_tokens"] + request["num_output_tokens"])
                immovable = Immovable.MIGRATING
                running.append(self._view_running(index, num_tokens, num_blocks, immovable))
        return InstanceView(
            instance_id=engine.instance_id,
            total_tokens=self._total_tokens,
            block_size=self._block_size,
            running=tuple(running),
            queuing=tuple(self._view_queuing(each) for each in self._queuing(row)),
            reserved_tokens=int(record["reserved_blocks"]) * self._block_size,
            num_preemptions=int(record["num_preemptions"]),
            is_terminating=engine.is_terminating,
        )

    def _queuing(self, row: int) -> list[int]:
        queuing = []
        index = int(self._tables.rows[row]["first"])
        while index != NONE:
            queuing.append(index)
            index = int(self._tables.requests[index]["behind"])
        return queuing

    def _view_running(
        self, index: int, num_tokens: int, num_blocks: int, immovable: Immovable | None
    ) -> RequestView:
        request = self._tables.requests[index]
        priority = Priority(int(request["priority"]))
        return RequestView(
            self._request_ids[index],
            RequestStatus.RUNNING,
            num_tokens,
            num_blocks * self._block_size,
            0,
            priority,
            priority,
            num_tokens - int(request["prompt_tokens"]),
            int(request["num_preemptions"]),
            float(request["arrival_s"]),
            immovable,
        )

    def _view_queuing(self, index: int) -> RequestView:
        request = self._tables.requests[index]
        num_output_tokens = int(request["num_output_tokens"])
        num_tokens = int(request["prompt_tokens"]) + num_output_tokens
        priority = Priority(int(request["priority"]))
        return RequestView(
            self._request_ids[index],
            RequestStatus.QUEUING,
            num_tokens,
            0,
            self._config.engine.blocks_of(num_tokens) * self._block_size,
            priority,
            priority,
            num_output_tokens,
            int(request["num_preemptions"]),
            float(request["arrival_s"]),
        )

    def is_empty(self, row: int) -> bool:
        engine, record = self._engines[row], self._tables.rows[row]
        num_requests = int(record["num_running"]) + int(record["num_queuing"])
        return not (num_requests or engine.drained or engine.reservations)

    def fragmented_tokens(self) -> tuple[int, list[int], int]:
        config = self._config.engine
        rows = self._tables.rows[self._tables.rows["exists"] == 1]
        heads = rows["first"]
        free_blocks = rows["free_blocks"][heads != NONE]
        requests = self._tables.requests[heads[heads != NONE]]
        num_tokens = requests["prompt_tokens"] + requests["num_output_tokens"]
        demands = -(-num_tokens // self._block_size)
        blocking = demands[demands > free_blocks - config.watermark_blocks]
        return (
            int(rows["free_blocks"].sum()) * self._block_size,
            (blocking * self._block_size).tolist(),
            len(rows) * config.num_blocks * self._block_size,
        )

    # ---------------------------------------------------------------------------- requests

    def add(self, row: int, index: int, dispatch_number: int, now_s: float) -> None:
        queue.enqueue(self._tables, row, index)
        record = self._tables.rows[row]
        record["last_dispatch"] = dispatch_number
        record["has_changed"] = 1

    def progress(self, row: int, index: int) -> Progress | None:
        is_drained = index in self._engines[row].drained
        is_here, is_queuing, num_valid_tokens, num_preemptions, is_prefilling = reports.progress_of(
            self._tables, row, index
        )
        if not (is_drained or is_here):
            return None
        return Progress(
            is_queuing=is_queuing,
            num_full_blocks=num_valid_tokens // self._block_size,
            num_blocks=-(-num_valid_tokens // self._block_size),
            num_preemptions=num_preemptions,
            immovable=is_drained or is_prefilling,
        )

    def begin_drain(
        self, row: int, index: int, num_preemptions: int, first_block: int, max_blocks: int | None
    ) -> bool | Reason | None:
        progress = self.progress(row, index)
        if progress is None:
            return Reason.REQUEST_UNKNOWN
        if progress.num_preemptions != num_preemptions:
            return Reason.REQUEST_PREEMPTED
        if progress.immovable:
            return Reason.REQUEST_IMMOVABLE
        if max_blocks is not None and progress.num_blocks - first_block > max_blocks:
            return None
        moves.drain(self._tables, row, index)
        self._engines[row].drained[index] = int(self._tables.requests[index]["num_blocks"])
        return True

    def export(self, row: int, index: int) -> bytes:
        # The request's row in the table is its state.
        return b""

    def resume(self, row: int, index: int) -> None:
        del self._engines[row].drained[index]
        moves.resume(self._tables, row, index)

    def release(self, row: int, index: int) -> None:
        num_blocks = self._engines[row].drained.pop(index)
        if num_blocks == 0:
            return
        record = self._tables.rows[row]
        record["num_drained"] -= 1
        record["free_blocks"] += num_blocks
        record["used_blocks"] -= num_blocks
        self._tables.counts[LIVE, row, self._tables.requests[index]["priority"]] -= 1

    def reserve(
        self, row: int, migration_id: MigrationId, num_blocks: int, *, needs_slot: bool
    ) -> Reason | None:
        config, record = self._config.engine, self._tables.rows[row]
        reservations = self._engines[row].reservations
        reservation = reservations.get(migration_id, _Reservation())
        num_new_blocks = max(0, num_blocks - reservation.num_blocks)
        if num_new_blocks > record["free_blocks"] - config.watermark_blocks:
            return Reason.NO_MEMORY
        if needs_slot and not reservation.has_slot:
            num_taken = record["num_running"] + record["num_drained"] + record["num_held_slots"]
            if num_taken >= config.max_num_seqs:
                return Reason.NO_SLOT
            record["num_held_slots"] += 1
            reservation.has_slot = True
        record["free_blocks"] -= num_new_blocks
        record["reserved_blocks"] += num_new_blocks
        reservation.num_blocks += num_new_blocks
        reservations[migration_id] = reservation
        return None

    def free_reservation(self, row: int, migration_id: MigrationId) -> None:
        self._end_reservation(row, migration_id, 0)

    def adopt(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        self._end_reservation(row, migration_id, num_blocks)
        moves.adopt(self._tables, row, index, num_blocks)

    def _end_reservation(self, row: int, migration_id: MigrationId, num_kept_blocks: int) -> None:
        """Give the reservation back, but for the blocks that a request takes over."""
        reservation = self._engines[row].reservations.pop(migration_id, None)
        if reservation is None:
            assert num_kept_blocks == 0
            return
        assert num_kept_blocks <= reservation.num_blocks
        record = self._tables.rows[row]
        record["num_held_slots"] -= reservation.has_slot
        record["reserved_blocks"] -= reservation.num_blocks
        record["free_blocks"] += reservation.num_blocks - num_kept_blocks

    def records(self) -> Records:
        requests = self._tables.requests
        return Records(
            arrival_s=self._trace.arrival_s,
            first_token_s=requests["first_token_s"].copy(),
            end_s=requests["end_s"].copy(),
            input_tokens=self._trace.input_tokens,
            output_tokens=self._trace.output_tokens,
            priority=self._trace.priority,
            num_preemptions=requests["num_preemptions"].copy(),
            preemption_loss_s=requests["loss_s"].copy(),
            queue_s=requests["first_scheduled_s"] - self._trace.arrival_s,
            decode_execution_s=requests["execution_ns"] / 1e9,
        )


def _requests(trace: Trace, config: SimulationConfig) -> Table:
    requests = np.zeros(len(trace), REQUEST)
    for name in ("first_scheduled_s", "first_token_s", "end_s", "preempted_s"):
        requests[name] = np.nan
    requests["arrival_s"] = trace.arrival_s
    requests["prompt_tokens"] = trace.input_tokens
    requests["output_tokens"] = trace.output_tokens
    if config.policy.has_priorities:
        requests["priority"] = trace.priority
    requests["before"] = requests["behind"] = NONE
    return requests


def _settings(config: SimulationConfig) -> Table:
    engine, step_time, policy = config.engine, config.step_time, config.policy
    settings = np.zeros(1, SETTINGS)
    for name in (
        "prefill_s",
        "prefill_token_s",
        "prefill_pair_s",
        "prefill_min_s",
        "decode_s",
        "decode_request_s",
        "decode_token_s",
    ):
        settings[name] = getattr(step_time, name)
    for name in ("block_size", "watermark_blocks", "max_num_seqs", "max_num_batched_tokens"):
        settings[name] = getattr(engine, name)
    settings["is_chunked"] = engine.step_mode is StepMode.CHUNKED
    settings["is_by_arrival"] = engine.preemption is Preemption.LATEST_ARRIVED
    settings["min_free_blocks"] = engine.keeps_block_free
    settings["is_live"] = config.report is Report.LIVE
    settings["victim"] = VICTIMS[policy.victim] if policy.migrates else NO_VICTIM
    settings["has_priorities"] = policy.has_priorities
    return settings
