"""The engines of all instances, compiled: many steps in one call.

The results are those of `plain`, bit for bit. State that the compiled steps do not need is kept
here: reservations, and the blocks of drained requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sterna.config import PolicyConfig
from sterna.engine.drains import DrainOutcome, Left, drain_outcome, position_of_prefix
from sterna.engine.emulated.compiled import entries
from sterna.engine.emulated.compiled.tables import (
    FIRST_TURN,
    LISTED,
    NONE,
    NUM_ENDED,
    NUM_LENGTHS,
    NUM_LISTED,
    NUM_STEPS,
    REPORTED,
    Contents,
    Tables,
    begin_row,
    with_more_rows,
)
from sterna.metrics.records import Records
from sterna.migration.messages import Drain, Reason, RequestPosition
from sterna.policy.load_report import is_large, with_moves
from sterna.policy.virtual_usage import free_tokens_of, is_source_by_memory, lowest_with_headroom
from sterna.simulator.config import SimulationConfig
from sterna.simulator.engines import index_of, request_id_of
from sterna.simulator.fast_tables import Columns, looks_at_requests, tables_of
from sterna.simulator.recorder import MemorySample
from sterna.types import (
    MAX_LARGE_PROMPTS,
    NORMAL,
    Immovable,
    InstanceId,
    InstanceLoad,
    InstanceView,
    MigrationId,
    Priority,
    RequestId,
    RequestStatus,
    RequestView,
    whose_prefix,
)
from sterna.workload.block_hashes import BlockHashes
from sterna.workload.trace import Trace


@dataclass(slots=True)
class _Reservation:
    num_blocks: int = 0
    has_slot: bool = False


@dataclass(slots=True)
class _Drained:
    """What a drained request holds.

    Attributes:
        num_blocks: 0 when it was queuing.
        cached: int32[k], the first ones of its blocks, which the prefix cache has.
        view: the request as it left. Its row in the table becomes the destination's before the
            source frees it.
    """

    num_blocks: int
    cached: NDArray[np.int32]
    view: RequestView


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What the prefix of a request holds, which moves alone.

    Attributes:
        first_block: the place in the prefix of the first of these blocks.
        cached: int32[k], blocks of the prefix cache.
        num_idle_blocks: those of them that no request held before.
    """

    first_block: int
    cached: NDArray[np.int32]
    num_idle_blocks: int


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine, a row of the tables, with the interface for migrations (`outcomes.Core`)."""

    tables: "FastEngines"
    row: int
    instance_id: InstanceId
    policy: PolicyConfig
    is_terminating: bool = False
    num_outgoing: int = 0
    num_incoming: int = 0
    num_reports: int = 0
    reservations: dict[MigrationId, _Reservation] = field(default_factory=dict)
    drained: dict[int, _Drained] = field(default_factory=dict)
    kept: dict[RequestId, _Kept] = field(default_factory=dict)

    def progress(self, request_id: RequestId) -> RequestPosition | None:
        index, block_size = index_of(request_id), self.tables._block_size
        if whose_prefix(request_id) is not None:
            kept = self.kept.get(request_id)
            return None if kept is None else position_of_prefix(len(kept.cached), block_size)
        is_drained = index in self.drained
        is_here, is_queuing, num_valid_tokens, num_preemptions, is_prefilling = entries.progress_of(
            self.tables._places, self.row, index
        )
        if not (is_drained or is_here):
            return None
        return RequestPosition(
            is_queuing=is_queuing,
            num_full_blocks=num_valid_tokens // block_size,
            num_blocks=-(-num_valid_tokens // block_size),
            num_preemptions=num_preemptions,
            is_immovable=is_drained or is_prefilling,
        )

    def begin_drain(self, drain: Drain) -> DrainOutcome:
        outcome = drain_outcome(self.progress(drain.request_id), drain)
        if isinstance(outcome, Left) and whose_prefix(drain.request_id) is None:
            index = index_of(drain.request_id)
            entries.drain(self.tables._places, self.row, index)
            num_blocks = self.tables._blocks_held[index]
            self.drained[index] = _Drained(
                num_blocks,
                self.tables.cached_blocks(index),
                self.tables._view_drained(index, num_blocks),
            )
        return outcome

    def resume(self, request_id: RequestId) -> None:
        if whose_prefix(request_id) is not None:
            return
        index = index_of(request_id)
        del self.drained[index]
        entries.resume(self.tables._places, self.row, index)

    def release(self, request_id: RequestId) -> None:
        index, row = index_of(request_id), self.row
        if whose_prefix(request_id) is not None:
            self.release_prefix(request_id)
            return
        drained = self.drained.pop(index)
        if drained.num_blocks == 0:
            return
        columns, tables = self.tables._columns, self.tables._tables
        num_others = entries.leave(self.tables._places, row, drained.cached)
        columns.num_drained[row] -= 1
        columns.free_blocks[row] += drained.num_blocks - num_others
        columns.used_blocks[row] -= drained.num_blocks
        tables.counts[row, tables.requests[index]["priority"]] -= 1

    def keep_prefix(self, prefix_id: RequestId, first_block: int) -> None:
        """See `EmulatedCore.keep_prefix`."""
        index = index_of(prefix_id)
        columns, row, places = self.tables._columns, self.row, self.tables._places
        num_free_blocks = columns.free_blocks[row]
        listed = self.tables.new_list()
        num_blocks = entries.keep_prefix(places, row, index, first_block, listed)
        if num_blocks == 0:
            return
        num_idle_blocks = num_free_blocks - columns.free_blocks[row]
        columns.reserved_blocks[row] += num_idle_blocks
        self.kept[prefix_id] = _Kept(first_block, listed[:num_blocks], num_idle_blocks)

    def release_prefix(self, prefix_id: RequestId) -> None:
        """Free the kept prefix, if there is one."""
        kept = self.kept.pop(prefix_id, None)
        if kept is None:
            return
        columns, row = self.tables._columns, self.row
        num_others = entries.leave(self.tables._places, row, kept.cached)
        columns.free_blocks[row] += len(kept.cached) - num_others
        columns.reserved_blocks[row] -= kept.num_idle_blocks

    def reserve(
        self, migration_id: MigrationId, num_blocks: int, *, needs_slot: bool
    ) -> Reason | None:
        config, columns, row = self.tables._config.engine, self.tables._columns, self.row
        if num_blocks == 0:
            self.reservations.setdefault(migration_id, _Reservation())
            return None
        reservation = self.reservations.get(migration_id, _Reservation())
        num_new_blocks = max(0, num_blocks - reservation.num_blocks)
        if num_new_blocks > columns.free_blocks[row] - config.watermark_blocks:
            return Reason.NO_MEMORY
        if needs_slot and not reservation.has_slot:
            num_taken = columns.num_running[row] + columns.num_drained[row]
            if num_taken + columns.num_held_slots[row] >= config.max_num_seqs:
                return Reason.NO_SLOT
            columns.num_held_slots[row] += 1
            reservation.has_slot = True
        columns.free_blocks[row] -= num_new_blocks
        entries.forget(self.tables._places, row)
        columns.reserved_blocks[row] += num_new_blocks
        reservation.num_blocks += num_new_blocks
        self.reservations[migration_id] = reservation
        return None

    def free_reservation(self, migration_id: MigrationId) -> None:
        self.end_reservation(migration_id, 0)

    def end_reservation(self, migration_id: MigrationId, num_kept_blocks: int) -> None:
        """End the reservation, and free its blocks except for those that a request takes over."""
        reservation = self.reservations.pop(migration_id, None)
        if reservation is None:
            assert num_kept_blocks == 0
            return
        assert num_kept_blocks <= reservation.num_blocks
        columns, row = self.tables._columns, self.row
        columns.num_held_slots[row] -= reservation.has_slot
        columns.reserved_blocks[row] -= reservation.num_blocks
        columns.free_blocks[row] += reservation.num_blocks - num_kept_blocks


class FastEngines:
    """The engines of one run, in tables; see `engines.Engines` for the methods."""

    steps_alone = True

    def __init__(self, trace: Trace, config: SimulationConfig) -> None:
        self._trace = trace
        self._config = config
        self._policy = config.policy
        self._looks_at_requests = looks_at_requests(config.policy)
        self._block_size = config.engine.block_size
        self._total_tokens = config.engine.total_tokens
        self._lowest_that_stays = lowest_with_headroom(self._total_tokens, config.policy)
        self._engines: dict[int, _Engine] = {}
        self._request_ids = [request_id_of(index) for index in range(len(trace))]
        self._arrivals_s: list[float] = trace.arrival_s.tolist()
        self._hashes = (
            BlockHashes.of(trace, self._block_size) if config.engine.prefix_caching else None
        )
        self._use(*tables_of(trace, config, self._hashes))

    def _use(self, tables: Tables, contents: Contents) -> None:
        self._tables = tables
        self._contents = contents
        self._places = entries.places_of(tables)
        self._columns = Columns.of(tables)
        self._notes = memoryview(tables.notes)
        self._blocks_held = memoryview(tables.requests["num_blocks"])
        self._listed_reports = np.zeros((len(tables.rows), 1 + tables.reports.shape[2]), np.int64)
        self._coming_tokens = np.zeros(len(tables.rows), np.int64)
        self._listed_requests = np.zeros((2 * tables.running.shape[1], NUM_LISTED), np.int64)

    @property
    def num_ended(self) -> int:
        """Number of requests that have produced their last token."""
        return self._notes[NUM_ENDED]

    @property
    def num_steps(self) -> int:
        """Number of steps begun."""
        return self._notes[NUM_STEPS]

    def start(self, row: int, instance_id: InstanceId, policy: PolicyConfig) -> None:
        if row >= len(self._tables.rows):
            self._use(*with_more_rows(self._tables, self._contents, 2 * row))
        self._engines[row] = _Engine(self, row, instance_id, policy)
        begin_row(self._tables, self._contents, row)
        entries.take_report(self._places, REPORTED, row)
        self._relist(row)

    def stop(self, row: int) -> None:
        assert self.is_empty(row)
        del self._engines[row]
        self._tables.rows[row]["exists"] = 0

    # ------------------------------------------------------------------------------- steps

    def advance(self, until_s: float) -> None:
        entries.advance(self._places, until_s)

    def notices(
        self, until_s: float, room_tokens: int | None, growth_steps: float
    ) -> tuple[list[tuple[int, float]], float | None]:
        # More than an engine has, where room is not looked for.
        room_blocks = self._config.engine.num_blocks + 1
        if room_tokens is not None:
            room_blocks = -(-room_tokens // self._block_size)
        num_ended, room_s = entries.advance_to_notice(
            self._places, until_s, room_blocks, growth_steps
        )
        ended: list[int] = self._tables.notes[FIRST_TURN : FIRST_TURN + num_ended].tolist()
        turns = [(index, float(self._tables.requests["end_s"][index])) for index in ended]
        return turns, None if room_s < 0 else room_s

    def has_room(self, row: int, num_tokens: int, growth_steps: float) -> bool:
        num_blocks = -(-num_tokens // self._block_size)
        return bool(entries.has_room(self._places, row, num_blocks, growth_steps))

    def step_end_s(self, row: int, now_s: float) -> float | None:
        entries.advance_row(self._places, row, now_s)
        return self._columns.step_end_s[row] if self._columns.is_stepping[row] else None

    def hold(self, row: int) -> None:
        self._columns.is_held[row] = 1

    def end_step(self, row: int, now_s: float) -> None:
        entries.advance_row(self._places, row, now_s)

    def begin_step(self, row: int, now_s: float) -> float | None:
        has_begun = entries.begin_step(self._places, row, now_s)
        return self._columns.step_end_s[row] if has_begun else None

    # ------------------------------------------------------------------------------- loads

    def set_terminating(self, row: int) -> None:
        self._engines[row].is_terminating = True
        self._relist(row)

    def set_migrating(self, row: int, num_outgoing: int, num_incoming: int) -> None:
        engine = self._engines[row]
        engine.num_outgoing, engine.num_incoming = num_outgoing, num_incoming
        self._relist(row)

    def _relist(self, row: int) -> None:
        """Make `changed_loads` return the engine's load even if its report stays as it is."""
        self._tables.reports[LISTED, row] = NONE
        self._columns.has_changed[row] = 1

    def changed_loads(self, now_s: float) -> list[InstanceLoad]:
        if self._looks_at_requests:
            # Each step may have changed what they show.
            for row in self._engines:
                self._relist(row)
        num_changed = entries.advance_and_list(self._places, now_s, self._listed_reports)
        loads = [self._load(*listed) for listed in self._listed_reports[:num_changed].tolist()]
        if self._looks_at_requests:
            rows = self._listed_reports[:num_changed, 0].tolist()
            loads = [
                with_moves(each, self.view(row, now_s), self._engines[row].policy)
                for row, each in zip(rows, loads, strict=True)
            ]
        return loads

    def _load(
        self,
        row: int,
        used_blocks: int,
        reserved_blocks: int,
        prefill_blocks: int,
        num_running: int,
        num_queuing: int,
        num_preempted: int,
        head_blocks: int,
        queued_blocks: int,
        move_blocks: int,
        move_priority: int,
        balance_blocks: int,
        num_preemptions: int,
        last_dispatch: int,
        uncomputed_tokens: int,
        uncomputed_pairs: int,
        num_held_slots: int,
        *more: int,
    ) -> InstanceLoad:
        large_prompts, counts = more[:MAX_LARGE_PROMPTS], more[MAX_LARGE_PROMPTS:]
        engine = self._engines[row]
        engine.num_reports += 1
        block_size = self._block_size
        num_by_priority: tuple[tuple[Priority, int], ...] = ()
        if len(counts) == 1 and num_running > 0:
            num_by_priority = ((NORMAL, num_running),)
        elif len(counts) > 1:
            num_by_priority = tuple([(Priority(p), num) for p, num in enumerate(counts) if num])
        used_tokens = (used_blocks + reserved_blocks) * block_size
        prefill_tokens = prefill_blocks * block_size
        head_tokens, queued_tokens = head_blocks * block_size, queued_blocks * block_size
        free_tokens, normal_free_tokens = free_tokens_of(
            self._policy,
            self._total_tokens,
            used_tokens,
            prefill_tokens,
            head_tokens,
            queued_tokens,
            num_by_priority,
        )
        # The same rule as in `policy.selection`.
        moves_queuing = engine.is_terminating and num_queuing > 0
        if engine.is_terminating:
            if moves_queuing:
                move_blocks = head_blocks
        elif move_blocks != NONE:
            lowest = self._lowest_that_stays
            has_headroom = lowest is not None and num_by_priority[-1][0] >= lowest
            moves_otherwise = has_headroom or self._policy.balance_ratio is not None
            if moves_otherwise and not is_source_by_memory(
                normal_free_tokens, num_running, num_queuing, num_preempted, self._policy
            ):
                if not has_headroom:
                    move_blocks = balance_blocks
                elif lowest is not None and move_priority >= lowest:
                    move_blocks = NONE
        return InstanceLoad(
            engine.instance_id,
            engine.num_reports,
            self._total_tokens,
            used_tokens,
            free_tokens,
            normal_free_tokens,
            num_running,
            num_queuing,
            head_tokens,
            queued_tokens,
            num_by_priority,
            last_dispatch,
            None if move_blocks == NONE else move_blocks * block_size,
            engine.num_outgoing,
            engine.num_incoming,
            num_preemptions,
            engine.is_terminating,
            num_preempted,
            prefill_tokens,
            uncomputed_tokens,
            uncomputed_pairs,
            self._config.engine.max_num_seqs - num_held_slots,
            moves_queuing=moves_queuing,
            large_prompts=self._large_prompts(engine, large_prompts),
        )

    def _large_prompts(self, engine: _Engine, running: Iterable[int]) -> tuple[RequestId, ...]:
        found = [self._request_ids[index] for index in running if index != NONE]
        if engine.drained and self._policy.binds_late:
            # They are behind those in the batch.
            views = [each.view for each in engine.drained.values() if each.num_blocks > 0]
            large = [each.request_id for each in views if is_large(each, self._total_tokens)]
            found = [*reversed(large), *found][:MAX_LARGE_PROMPTS]
        return tuple(found)

    def view(self, row: int, now_s: float) -> InstanceView:
        entries.advance_row(self._places, row, now_s)
        engine, columns = self._engines[row], self._columns
        num_running = columns.num_running[row]
        num_listed = num_running + columns.num_queuing[row]
        if num_listed > len(self._listed_requests):
            self._listed_requests = np.zeros((2 * num_listed, NUM_LISTED), np.int64)
        entries.list_requests(self._places, row, self._listed_requests)
        listed = self._listed_requests[:num_listed].tolist()
        num_used_blocks = (
            self._config.engine.num_blocks - columns.free_blocks[row] - columns.reserved_blocks[row]
        )
        running = [self._view_running(*each) for each in listed[:num_running]]
        running += [drained.view for drained in engine.drained.values() if drained.num_blocks > 0]
        return InstanceView(
            instance_id=engine.instance_id,
            total_tokens=self._total_tokens,
            block_size=self._block_size,
            running=tuple(running),
            queuing=tuple([self._view_queuing(*each) for each in listed[num_running:]]),
            reserved_tokens=columns.reserved_blocks[row] * self._block_size,
            num_preemptions=columns.num_preemptions[row],
            is_terminating=engine.is_terminating,
            shared_tokens=(columns.used_blocks[row] - num_used_blocks) * self._block_size,
            num_slots=self._config.engine.max_num_seqs - columns.num_held_slots[row],
            num_ended=tuple(self._tables.counts[row, -NUM_LENGTHS:].tolist()),
        )

    def _view_running(
        self,
        index: int,
        num_tokens: int,
        prompt_tokens: int,
        num_blocks: int,
        priority: Priority,
        num_preemptions: int,
        is_prefilling: bool,
        uncomputed_tokens: int,
        num_earlier_tokens: int,
        num_shared_tokens: int,
    ) -> RequestView:
        return RequestView(
            self._request_ids[index],
            RequestStatus.RUNNING,
            num_tokens,
            num_blocks * self._block_size,
            self._demand_tokens(num_tokens) if is_prefilling else 0,
            priority,
            priority,
            num_tokens - prompt_tokens,
            num_preemptions,
            self._arrivals_s[index],
            Immovable.PREFILLING if is_prefilling else None,
            uncomputed_tokens=uncomputed_tokens,
            num_earlier_tokens=num_earlier_tokens,
            num_shared_tokens=num_shared_tokens,
        )

    def _view_drained(self, index: int, num_blocks: int) -> RequestView:
        request = self._tables.requests[index]
        prompt_tokens = int(request["prompt_tokens"])
        view = self._view_running(
            index,
            prompt_tokens + int(request["num_output_tokens"]),
            prompt_tokens,
            num_blocks,
            Priority(int(request["priority"])),
            int(request["num_preemptions"]),
            False,
            0,
            int(request["num_earlier_tokens"]),
            int(request["shared_tokens"]),
        )
        return structs.replace(view, immovable=Immovable.MIGRATING)

    def _view_queuing(
        self,
        index: int,
        num_tokens: int,
        prompt_tokens: int,
        num_blocks: int,
        priority: Priority,
        num_preemptions: int,
        is_prefilling: bool,
        uncomputed_tokens: int,
        num_earlier_tokens: int,
        num_shared_tokens: int,
    ) -> RequestView:
        return RequestView(
            self._request_ids[index],
            RequestStatus.QUEUING,
            num_tokens,
            0,
            self._demand_tokens(num_tokens),
            priority,
            priority,
            num_tokens - prompt_tokens,
            num_preemptions,
            self._arrivals_s[index],
            uncomputed_tokens=uncomputed_tokens,
            num_earlier_tokens=num_earlier_tokens,
            num_shared_tokens=num_shared_tokens,
        )

    def _demand_tokens(self, num_tokens: int) -> int:
        return self._config.engine.blocks_of(num_tokens) * self._block_size

    def is_empty(self, row: int) -> bool:
        engine, columns = self._engines[row], self._columns
        num_requests = columns.num_running[row] + columns.num_queuing[row]
        return not (num_requests or engine.drained or engine.reservations or engine.kept)

    def memory(self) -> MemorySample:
        listed, block_size = np.zeros(len(self._tables.rows), np.int64), self._block_size
        num_blocking, num_free, num_room, num_room_most, num_used_most, num_engines = (
            entries.sample_memory(self._places, listed)
        )
        return MemorySample(
            free_tokens=num_free * block_size,
            room_tokens=num_room * block_size,
            largest_room_tokens=num_room_most * block_size,
            demands_tokens=(listed[:num_blocking] * block_size).tolist(),
            total_tokens=num_engines * self._config.engine.num_blocks * block_size,
            largest_used_tokens=num_used_most * block_size,
            num_instances=num_engines,
        )

    # ---------------------------------------------------------------------------- requests

    def set_arrival(self, index: int, arrival_s: float) -> None:
        self._arrivals_s[index] = arrival_s
        self._tables.requests["arrival_s"][index] = arrival_s

    def add(self, row: int, index: int, dispatch_number: int, now_s: float) -> None:
        entries.add(self._places, row, index, dispatch_number, now_s)

    def prompt_hashes(self, index: int) -> bytes:
        if self._hashes is None:
            return b""
        return self._hashes.of_prompt(
            index, int(self._trace.input_tokens[index]) // self._block_size
        )

    def coming_tokens(self, index: int) -> dict[InstanceId, int]:
        if self._hashes is None:
            return {}
        entries.list_coming(self._places, index, self._coming_tokens)
        listed = self._coming_tokens.tolist()
        return {
            engine.instance_id: listed[row]
            for row, engine in self._engines.items()
            if listed[row] > 0
        }

    def core(self, row: int) -> "_Engine":
        return self._engines[row]

    def export(self, row: int, index: int) -> bytes:
        # The request's row in the table is its state.
        return b""

    def cached_blocks(self, index: int) -> NDArray[np.int32]:
        """The request's blocks that the prefix cache of its engine has."""
        request = self._tables.requests[index]
        first = int(request["first_hash"])
        held: NDArray[np.int32] = self._contents.held[first : first + int(request["num_cached"])]
        return held.copy()

    def new_list(self) -> NDArray[np.int32]:
        """A list for as many blocks as an engine has."""
        return np.zeros(self._config.engine.num_blocks, np.int32)

    def adopt(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        self._engines[row].end_reservation(migration_id, num_blocks)
        entries.adopt(self._places, row, index, num_blocks)

    def keep_prefix(self, row: int, moving_id: RequestId, first_token: int) -> None:
        self._engines[row].keep_prefix(moving_id, first_token // self._block_size)

    def export_prefix(self, row: int, moving_id: RequestId) -> bytes:
        # With the number of blocks it says which of the hashes in the table they have.
        return self._engines[row].kept[moving_id].first_block.to_bytes(8)

    def adopt_prefix(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        if self._config.engine.prefix_caching:
            first_block, listed = int.from_bytes(state), self.new_list()
            entries.adopt_prefix(self._places, row, index, first_block, num_blocks, listed)
        self._engines[row].end_reservation(migration_id, 0)

    def records(self) -> Records:
        requests = self._tables.requests
        return Records(
            arrival_s=requests["arrival_s"].copy(),
            first_token_s=requests["first_token_s"].copy(),
            end_s=requests["end_s"].copy(),
            input_tokens=self._trace.input_tokens,
            output_tokens=self._trace.output_tokens,
            priority=self._trace.priority,
            num_preemptions=requests["num_preemptions"].copy(),
            preemption_loss_s=requests["loss_s"].copy(),
            queue_s=requests["first_scheduled_s"] - requests["arrival_s"],
            decode_execution_s=requests["execution_ns"] / 1e9,
            cached_tokens=requests["found_tokens"].copy() if self._hashes else None,
            reusable_tokens=self._hashes.reusable_tokens if self._hashes else None,
        )
