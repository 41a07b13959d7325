"""vLLM's scheduler with migration of requests to and from it (`scheduler_cls`).

All methods run on the engine's thread between two steps, except views, which show the beginning of
a step. A request that leaves is first **drained**: it is out of the batch, keeps its blocks, and
its batch slot is held so that it can be resumed. A request that arrives needs a **reservation**:
blocks of the pool and, for its last stage, a batch slot. To vLLM an adopted request is a running
one that missed a step; to workers with vLLM's V2 model runner it is one that is resumed after a
preemption.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from operator import add
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from sterna.engine.drains import DrainOutcome, Left, drain_outcome
from sterna.engine.ended_outputs import EndedOutputs
from sterna.engine.kv_columns import Columns, Held
from sterna.engine.vllm.adapters import adapter_numbers
from sterna.engine.vllm.kv_groups import CacheReports, KvGroups, MovingPrefixes
from sterna.engine.vllm.offloading import Offloading
from sterna.engine.vllm.request_state import announce_with_history
from sterna.engine.vllm.support import (
    ends_thinking_by_phrase,
    immovable_engine_features,
    immovable_request_feature,
)
from sterna.migration.messages import Drain, KeepPrefix, Reason, RequestPosition
from sterna.priority_classes import DEFAULT_CLASSES, PriorityClasses
from sterna.types import (
    Immovable,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    RequestView,
    whose_prefix,
)
from sterna.types import RequestStatus as Status


@dataclass(slots=True)
class Reservation:
    """Blocks and perhaps a batch slot, held for an incoming migration.

    Attributes:
        adapter: the number of the LoRA adapter that is held with the slot.
    """

    held: Held[Any]
    has_slot: bool = False
    adapter: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups together."""
        return sum(map(len, self.held))


class MigratingScheduler(Scheduler):
    """vLLM's scheduler with drains, reservations and adoptions.

    Attributes:
        classes: the priority classes of requests in views.
        groups: the KV cache groups.
        num_prefix_tokens: that were looked up in the prefix cache, where vLLM keeps statistics.
        num_prefix_hits: those of them that were found.
        external_counts, draft_counts: see `InstanceView`.
        prefixes: those that move without a request.
        on_scheduled: called in this order when a step has been scheduled, before it is computed.
        cache_reports: tells of changes to the prefix cache; None unless `report_cache` was called.
    """

    classes: PriorityClasses = DEFAULT_CLASSES
    on_scheduled: Sequence[Callable[[SchedulerOutput], None]] = ()
    cache_reports: CacheReports | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.immovable_features = immovable_engine_features(self.vllm_config, self.kv_cache_config)
        self._ends_by_phrase = ends_thinking_by_phrase(self.vllm_config)
        # As vLLM does for connectors that load KV: with two steps under way, a rank may still have
        # to launch the one that writes once more to the blocks of a request that has just ended. A
        # copy into these blocks would not wait for it. (With one rank it does: this thread has
        # launched all steps before it commands a copy.)
        self._fences_copies = (
            not self.immovable_features
            and self.parallel_config.world_size > 1
            and self.vllm_config.max_concurrent_batches > 1
            and not self.defer_block_free
        )
        self.defer_block_free |= self._fences_copies
        # Blocks of requests that were preempted, or have ended, with the last step that may write
        # to them.
        self._fences: dict[int, int] = {}
        self.groups = KvGroups(self.kv_cache_manager.coordinator, self.kv_cache_config)
        self.prefixes = MovingPrefixes(self.kv_cache_manager.coordinator)
        self.num_preemptions = 0
        self.num_prefix_tokens = 0
        self.num_prefix_hits = 0
        self.external_counts = (0, 0)
        self.draft_counts: tuple[int, ...] = ()
        self._ended = EndedOutputs()
        self._drained: dict[str, Request] = {}
        self._reservations: dict[MigrationId, Reservation] = {}
        # Requests in the batch of which V2 workers have not heard.
        self._unannounced: set[str] = set()
        self._admission_limit: int = self.max_num_active_reqs
        # Tokens that the prefix cache had of each queuing request when it began to queue.
        self._found: dict[str, int] = {}
        # Output tokens with which requests came from other engines.
        self._num_earlier_tokens: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._num_shared_tokens: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._offloading: Offloading | None = None
        if self.connector is not None and not self.immovable_features:
            self._offloading = Offloading(self.connector.scheduler)
        # A copy of its own, whose `max_loras` is the limit of the next step.
        self.lora_config = copy(self.vllm_config.lora_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, then call `on_scheduled`."""
        self._hold_adapters()
        output = super().schedule(*args, **kwargs)
        for tell in self.on_scheduled:
            tell(output)
        return output

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        """See vLLM. A preempted request leaves its blocks to the next one at once, whose steps come
        after those that may still write to them: vLLM would let it, and all behind it, miss steps
        for as long as the victim has one under way. Only copies wait (`_unready_free_blocks`)."""
        if self._fences_copies and not request.is_finished():
            return True
        return bool(super()._request_blocks_can_be_freed(request))

    def _free_request_blocks(self, request: Request) -> None:
        if self._fences_copies and request.last_sched_seq > self.processed_step_seq:
            for block_id in itertools.chain(*self.groups.block_ids(request.request_id)):
                self._fences[block_id] = self.sched_step_seq
        super()._free_request_blocks(request)

    def report_cache(self) -> None:
        """Record what the prefix cache gets and loses, if there is one."""
        if self.cache_config.enable_prefix_caching:
            # A connector owns blocks beside this scheduler.
            may_move = not self.immovable_features and self.connector is None
            moves = self.prefixes.can_move and may_move
            reports = CacheReports(self.kv_cache_manager.coordinator, moves=moves)
            # Blocks of scratch memory alone are in no cache.
            self.cache_reports = reports if reports.layout.groups else None

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache as vLLM does; but while moves hold blocks, which cannot be
        preempted, nothing is done for it: vLLM would preempt all requests, and then fail."""
        if reset_running_requests and self._moves_hold_blocks:
            return False
        is_reset = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if self.cache_reports is not None:
            self.cache_reports.on_reset()
        return is_reset

    @property
    def _moves_hold_blocks(self) -> bool:
        has_reserved = any(each.num_blocks for each in self._reservations.values())
        return has_reserved or bool(self._drained_running()) or self.prefixes.are_kept

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics of a step, after what they say of the prefix cache, of a KV
        connector and of drafts is added to the sums since the start."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.num_prefix_tokens += stats.prefix_cache_stats.queries
            self.num_prefix_hits += stats.prefix_cache_stats.hits
            if (external := stats.connector_prefix_cache_stats) is not None:
                num_tokens, num_hits = self.external_counts
                self.external_counts = num_tokens + external.queries, num_hits + external.hits
            if (drafts := stats.spec_decoding_stats) is not None:
                accepted = drafts.num_accepted_tokens_per_pos
                counts = (drafts.num_drafts, drafts.num_draft_tokens, *accepted)
                sums = self.draft_counts or (0,) * len(counts)
                self.draft_counts = tuple(map(add, sums, counts))
        return stats

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._unannounced:
            self._announce(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _announce(self, output: SchedulerOutput) -> None:
        """Announce adopted requests to V2 workers in their first step."""
        # Those that were preempted meanwhile, vLLM announces itself.
        for request_id in self._unannounced.intersection(output.scheduled_cached_reqs.req_ids):
            announce_with_history(
                output,
                self.requests[request_id],
                self.kv_cache_manager.get_block_ids(request_id),
                uses_mrope=self.model_uses_mrope,
            )
        self._unannounced.difference_update(output.num_scheduled_tokens)
        self._unannounced.intersection_update(self.requests)

    # ------------------------------------------------------------------------------- views

    @property
    def total_tokens(self) -> int:
        """Memory usable by requests, in tokens: the pool without its null block and watermark."""
        watermark_blocks = self.kv_cache_manager.watermark_blocks
        return int(
            (self._pool.num_gpu_blocks - 1 - watermark_blocks) * self.groups.memory.block_tokens
        )

    def view(self, instance_id: InstanceId, is_terminating: bool) -> InstanceView:
        """Return the state between two steps, or of the step that has just been scheduled."""
        running = [
            self._view(request, Status.RUNNING)
            for request in (*self.running, *self._drained_running())
        ]
        waiting = [*self.kv_holding_waiting, *self.waiting]
        known = self._found
        self._found = {
            each.request_id: known[each.request_id]
            if each.request_id in known
            else self._num_cached_tokens(each)
            for each in waiting
        }
        queuing = [self._view(request, Status.QUEUING) for request in waiting]
        reserved_blocks = sum(r.num_blocks for r in self._reservations.values())
        reserved_blocks += self.prefixes.num_blocks
        used_blocks = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        block_tokens = self.groups.memory.block_tokens
        counted_tokens = sum(r.physical_usage_tokens for r in running)
        counted_tokens += reserved_blocks * block_tokens
        return InstanceView(
            instance_id=instance_id,
            total_tokens=self.total_tokens,
            block_size=block_tokens,
            running=tuple(running),
            queuing=tuple(queuing),
            reserved_tokens=reserved_blocks * block_tokens,
            shared_tokens=max(0, counted_tokens - used_blocks * block_tokens),
            num_preemptions=self.num_preemptions,
            is_terminating=is_terminating,
            num_slots=self._admission_limit - self._num_reserved_slots(),
            num_prefix_tokens=self.num_prefix_tokens,
            num_prefix_hits=self.num_prefix_hits,
            external_counts=self.external_counts,
            draft_counts=self.draft_counts,
            num_ended=self._ended.counts,
        )

    def _drained_running(self) -> list[Request]:
        return [r for r in self._drained.values() if r.status == RequestStatus.RUNNING]

    def _view(self, request: Request, status: Status) -> RequestView:
        its_class = self.classes.of_vllm_priority(request.priority)
        is_running = status is Status.RUNNING
        is_awaiting = not is_running or _is_prefilling(request)
        immovable = self.immovable(request)
        return RequestView(
            request_id=RequestId(request.request_id),
            status=status,
            num_tokens=request.num_tokens,
            physical_usage_tokens=self._usage_tokens(request) if is_running else 0,
            demand_tokens=self.groups.memory.demand_tokens(request.num_tokens)
            if is_awaiting
            else 0,
            scheduling_priority=its_class.scheduling_priority,
            execution_priority=its_class.execution_priority,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            arrival_s=request.arrival_time,
            immovable=immovable,
            unsupported=self._unsupported(request, immovable),
            uncomputed_tokens=self._uncomputed_tokens(request, status),
            num_earlier_tokens=self._num_earlier_tokens.get(request, 0),
            num_shared_tokens=self._num_shared(request),
        )

    def _num_shared(self, request: Request) -> int:
        """The tokens that it found in the prefix cache when it was admitted first. vLLM drops its
        statistics with the first output."""
        stats = request.prefill_stats
        if stats is not None:
            self._num_shared_tokens[request] = stats.num_local_cached_tokens
        return self._num_shared_tokens.get(request, 0)

    def _usage_tokens(self, request: Request) -> int:
        return self.groups.num_held(request.request_id) * self.groups.memory.block_tokens

    def _uncomputed_tokens(self, request: Request, status: Status) -> int:
        if status is Status.QUEUING:
            return int(request.num_tokens - self._found[request.request_id])
        if not _is_prefilling(request):
            return 0
        return int(request.num_tokens - _num_valid_tokens(request))

    def _num_cached_tokens(self, request: Request) -> int:
        """The tokens that the prefix cache has of a request without memory."""
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        # Not by the manager's own method, which counts as a request for its statistics.
        hit = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(hit[1])

    def immovable(self, request: Request) -> Immovable | None:
        """Return why the request cannot move at this moment, or None when it can."""
        if self.immovable_features:
            return Immovable.UNSUPPORTED_ENGINE_FEATURE
        if self._immovable_feature(request) is not None:
            return Immovable.UNSUPPORTED_REQUEST_FEATURE
        if request.request_id in self._drained:
            return Immovable.MIGRATING
        if request.status == RequestStatus.RUNNING and _is_prefilling(request):
            return Immovable.PREFILLING
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or (
            request.status != RequestStatus.RUNNING and request.num_computed_tokens
        ):
            # Its prompt is being loaded into its blocks.
            return Immovable.PREFILLING
        return None

    def _unsupported(self, request: Request, immovable: Immovable | None) -> str:
        """The names of the features that keep the request here; "" when there are none."""
        if immovable is Immovable.UNSUPPORTED_ENGINE_FEATURE:
            return "; ".join(self.immovable_features)
        if immovable is Immovable.UNSUPPORTED_REQUEST_FEATURE:
            return self._immovable_feature(request) or ""
        return ""

    def _immovable_feature(self, request: Request) -> str | None:
        return immovable_request_feature(request, ends_by_phrase=self._ends_by_phrase)

    def progress(self, request_id: RequestId) -> RequestPosition | None:
        """Return the position of the request or the moving prefix, or None when it is not here."""
        if whose_prefix(request_id) is not None:
            return self.prefixes.position(request_id)
        request = self._unfinished(request_id)
        if request is None:
            return None
        # Tokens of steps in flight are not in memory yet.
        return self._progress(request, _num_valid_tokens(request))

    def _progress(self, request: Request, num_valid_tokens: int) -> RequestPosition:
        return RequestPosition(
            is_queuing=request.status != RequestStatus.RUNNING,
            num_full_blocks=self.groups.num_full_units(num_valid_tokens),
            num_blocks=self.groups.num_units(num_valid_tokens),
            num_preemptions=request.num_preemptions,
            is_immovable=self.immovable(request) is not None,
            num_valid_tokens=num_valid_tokens,
            block_bytes=self.groups.unit_bytes,
            state_bytes=self.groups.state_bytes,
        )

    def _unfinished(self, request_id: RequestId) -> Request | None:
        request = self.requests.get(request_id)
        return None if request is None or request.is_finished() else request

    # ------------------------------------------------------------------------------ source

    def keep_prefix(self, effect: KeepPrefix) -> None:
        """Hold a prefix that is to move, unless the engine's features forbid that."""
        if self.cache_reports is None or not self.cache_reports.layout.moves:
            return
        unit_tokens = self.groups.unit_tokens
        being_computed: set[int] = set()
        for request in self.running:
            num_valid = _num_valid_tokens(request)
            (block_ids,) = self.groups.block_ids(request.request_id)[:1]
            being_computed.update(block_ids[num_valid // unit_tokens :])
        # A rank may still have to compute what a request had that has lost its blocks.
        being_computed.update(self._pending_writes())
        self.prefixes.keep(effect, self.cache_reports, being_computed)

    def begin_drain(self, drain: Drain) -> DrainOutcome:
        """Take the request out of the batch or queue if it may leave; it keeps blocks and slot."""
        request = self._unfinished(drain.request_id)
        if request is None:
            return drain_outcome(None, drain)
        # Steps in flight will still write to the blocks behind the valid ones.
        outcome = drain_outcome(self._progress(request, request.num_computed_tokens), drain)
        if not isinstance(outcome, Left):
            return outcome
        self._drained[drain.request_id] = request
        if not self._can_carry_drafts:
            request.spec_token_ids = []
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
            self._hold_slots()
        else:
            self.waiting.remove_request(request)
            self.deferred_waiting.discard(request)
        return outcome

    def is_drained(self, request_id: RequestId) -> bool:
        """Whether no step in flight computes the drained request, or it has finished."""
        request = self._drained[request_id]
        # vLLM counts no more of a request that has finished: the placeholders of drafts behind its
        # last token stay, and so do the tokens of the steps in flight when it is aborted.
        return request.is_finished() or (
            request.num_in_flight_tokens == 0 and request.num_output_placeholders == 0
        )

    def drained_request(self, request_id: RequestId) -> Request | None:
        """Return the drained request, or None if it finished in its last step in flight."""
        request = self._drained[request_id]
        if request.is_finished():
            self._forget_drained(request_id)
            return None
        return request

    def resume(self, request_id: RequestId) -> None:
        """Put the drained request back, at the end of the batch or by its arrival in the queue; its
        client notices at most a pause."""
        request = self._forget_drained(request_id)
        if request.is_finished():
            # A pause of the whole engine ended every request meanwhile.
            return
        if request.status == RequestStatus.RUNNING:
            self.running.append(request)
        else:
            self.waiting.prepend_request(request)
            self._place_by_arrival(request)

    def release(self, request_id: RequestId) -> None:
        """Free the drained request without an output."""
        request = self._forget_drained(request_id)
        if request.is_finished():
            return
        request.status = RequestStatus.FINISHED_ABORTED
        # Its output goes on elsewhere.
        super()._free_request(request)
        if self._offloading is not None:
            self._offloading.leave(request)
        self.prev_step_scheduled_req_ids.discard(request_id)

    def _forget_drained(self, request_id: RequestId) -> Request:
        request = self._drained.pop(request_id)
        self._hold_slots()
        return request

    # ------------------------------------------------------------------------- destination

    def may_be_reserved(self, first_unit: int, num_units: int) -> bool:
        """Whether a request may have these units, and one to spare."""
        most = self.groups.num_units(self.max_model_len) + 1
        return first_unit >= 0 and 0 <= num_units <= most - first_unit

    def batch_adapters(self) -> set[int]:
        """Return the numbers of the adapters that the batch has or may get at any time."""
        return adapter_numbers(self.running) | self._held_adapters()

    def has_place_for(self, adapter: int | None) -> bool:
        """Whether a batch may have this adapter beside those."""
        if adapter is None or self.vllm_config.lora_config is None:
            return adapter is None
        adapters = self.batch_adapters() | {adapter}
        return len(adapters) <= self.vllm_config.lora_config.max_loras

    def reserve(
        self,
        migration_id: MigrationId,
        columns: Columns,
        needs_slot: bool,
        adapter: int | None = None,
    ) -> list[list[int]] | Reason:
        """Extend the migration's reservation to these columns, and a batch slot if needed.

        Returns the ids of the blocks at the columns, for each group, or why nothing was reserved.
        The watermark stays free, as it does when vLLM admits a request. A request without KV, for
        which no block is reserved, will queue: it needs neither memory nor slot.

        Args:
            adapter: the number of the request's LoRA adapter, which is held with the slot. A batch
                has at most `--max-loras` of them.
        """
        reservation = self._reservations.get(migration_id)
        if reservation is None:
            reservation = Reservation(self.groups.new_reservation())
        if not any(columns) and not reservation.num_blocks:
            self._reservations[migration_id] = reservation
            return self.groups.ids_at(reservation.held, columns)
        num_new = self.groups.num_missing(reservation.held, columns)
        unready = self._unready_free_blocks()
        num_free = self._pool.get_num_free_blocks() - len(unready)
        if num_new > num_free - self.kv_cache_manager.watermark_blocks:
            return Reason.NO_MEMORY
        lacks_slot = needs_slot and not reservation.has_slot
        if lacks_slot and len(self.running) + self._num_held_slots() >= self._admission_limit:
            return Reason.NO_SLOT
        if not self.has_place_for(adapter):
            return Reason.NO_ADAPTER_SLOT
        self._pool.touch(unready)
        self.groups.extend(reservation.held, columns)
        self._pool.free_blocks(unready)
        if needs_slot:
            reservation.has_slot, reservation.adapter = True, adapter
        self._reservations[migration_id] = reservation
        self._hold_slots()
        block_ids = self.groups.ids_at(reservation.held, columns)
        if self._offloading is not None:
            self._offloading.use(itertools.chain(*block_ids))
        return block_ids

    def free_reservation(self, migration_id: MigrationId) -> None:
        """Free the reservation, if there is one."""
        reservation = self._reservations.pop(migration_id, None)
        if reservation is not None:
            self.groups.free(reservation.held)
            self._hold_slots()

    def can_adopt(self, migration_id: MigrationId, num_valid: int) -> bool:
        """Whether all blocks that a request of this length looks at are reserved."""
        reservation = self._reservations.get(migration_id)
        return reservation is not None and self.groups.has_all(reservation.held, num_valid)

    def adopt_running(
        self,
        migration_id: MigrationId,
        request: Request,
        num_valid: int,
        draft_token_ids: Sequence[int] = (),
    ) -> None:
        """Add the request, with KV of `num_valid` tokens in its reserved blocks, to the batch.

        Args:
            draft_token_ids: drafts for its next step; those that do not fit here are dropped.

        Raises:
            KeyError: there is no such reservation.
        """
        reservation = self._reservations.pop(migration_id)
        self._hold_slots()
        self.groups.adopt(reservation.held, request, num_valid)
        request.num_computed_tokens = num_valid
        self.kv_cache_manager.cache_blocks(request, num_valid)
        request.status = RequestStatus.RUNNING
        if self._can_carry_drafts:
            request.spec_token_ids = self.structured_output_manager.validate_tokens(
                request, list(draft_token_ids[: self.num_spec_tokens])
            )
        self._register(request)
        if self._offloading is not None:
            self._offloading.arrive(
                request, self.kv_cache_manager.get_block_ids(request.request_id)
            )
        self.running.append(request)
        if self.use_v2_model_runner:
            self._unannounced.add(request.request_id)

    def adopt_prefix(self, migration_id: MigrationId, state: bytes, weight_updates: str) -> bool:
        """Enter the reserved blocks into the prefix cache; returns whether that was possible, and
        otherwise changes nothing.

        Args:
            weight_updates: see `MovingPrefixes.enter`.

        Raises:
            KeyError: there is no such reservation.
        """
        held = self._reservations[migration_id].held
        if not self.prefixes.enter(held, state, weight_updates):
            return False
        self.free_reservation(migration_id)
        return True

    def adopt_queuing(self, migration_id: MigrationId, request: Request) -> None:
        """Queue the request, which arrives without KV, by its arrival among those of its priority.

        With a history (outputs already delivered), vLLM treats it as a preempted request, whose KV
        is computed again from prompt and outputs.
        """
        self.free_reservation(migration_id)
        if request.num_output_tokens:
            self.add_with_history(request)
        else:
            earlier = list(request.events)
            self.add_request(request)
            # It has queued since its first instance took it.
            request.events = earlier or request.events
            self._place_by_arrival(request)

    def add_with_history(self, request: Request) -> None:
        """Queue a request with outputs of another engine as a preempted one: by arrival, and where
        vLLM does not serve by priority in front of those without outputs; its KV is computed
        again."""
        request.status = RequestStatus.PREEMPTED
        self._register(request)
        if self.connector is not None:
            # A connector that does not know the request when it is scheduled ends the engine, and
            # then every engine on which the request is continued.
            self.connector.on_new_request(request)
        self.waiting.prepend_request(request)
        self._place_by_arrival(request)

    def _place_by_arrival(self, request: Request) -> None:
        """Move the request, which has come from elsewhere, to its place. Where vLLM serves by
        priority, it is there; in its other queue it is the last one, or with a history the first.
        """
        queue = self.waiting
        if not isinstance(queue, deque) or request not in queue:
            return
        queue.remove(request)
        if request.status == RequestStatus.PREEMPTED:
            place = 0
            while place < len(queue) and _is_preempted_before(queue[place], request):
                place += 1
        else:
            place = len(queue)
            while place > 0 and _comes_after(queue[place - 1], request):
                place -= 1
        queue.insert(place, request)

    def _register(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._num_earlier_tokens[request] = request.num_output_tokens
        if self.spec_decode_metrics_level != "none":
            # As `add_request` does. Drafts are counted from here on.
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self.num_spec_tokens)
        if not self.use_v2_model_runner:
            # If the request was here before, the worker may not have got its end yet, and would
            # then drop the state of the adoption. A V2 worker must get it, to free the row, and
            # gets the state afterwards.
            self.finished_req_ids.discard(request.request_id)

    # ---------------------------------------------------------------------------- internals

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        is_ready = bool(super()._handle_blocked_waiting_request(request))
        if is_ready and request.num_output_tokens:
            # vLLM announces a request as a new one if a connector has loaded its blocks and it was
            # never preempted. A worker would drop the outputs that it has of another engine.
            request.status = RequestStatus.PREEMPTED
        return is_ready

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._ended.add(request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    @property
    def _pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def _unready_free_blocks(self) -> list[Any]:
        """Blocks of the free queue to which no copy may be written yet: they are still to be saved,
        or a step under way may write to them."""
        unsaved = () if self._offloading is None else self._offloading.unsaved()
        blocks = (self._pool.blocks[each] for each in {*unsaved, *self._pending_writes()})
        return [each for each in blocks if each.ref_cnt == 0 and not each.is_null]

    def _pending_writes(self) -> Collection[int]:
        """Blocks that have no request now, and to which a step under way may write."""
        done = self.processed_step_seq
        self._fences = {each: step for each, step in self._fences.items() if step > done}
        return self._fences.keys()

    @property
    def _can_carry_drafts(self) -> bool:
        """Whether the tokens of a request's drafts are here, and are all that its next step needs.

        Asynchronous scheduling has placeholders for them, and drafts that were drawn at random have
        their probabilities in the worker. Without drafts the next step says one token.
        """
        speculation = self.vllm_config.speculative_config
        return (
            speculation is not None
            and speculation.draft_sample_method == "greedy"
            and not self.scheduler_config.async_scheduling
        )

    def _num_held_slots(self) -> int:
        return self._num_reserved_slots() + len(self._drained_running())

    def _num_reserved_slots(self) -> int:
        return sum(each.has_slot for each in self._reservations.values())

    def _held_adapters(self) -> set[int]:
        reservations = self._reservations.values()
        reserved = {each.adapter for each in reservations if each.adapter is not None}
        return adapter_numbers(self._drained_running()) | reserved

    def _hold_adapters(self) -> None:
        """Keep vLLM from admitting requests with adapters in place of those that drained and
        arriving requests bring: it ends an engine whose batch has too many."""
        if self.lora_config is not None:
            held = self._held_adapters() - adapter_numbers(self.running)
            self.lora_config.max_loras = self.vllm_config.lora_config.max_loras - len(held)

    def _hold_slots(self) -> None:
        """Keep vLLM from admitting into slots that drained and arriving requests need."""
        self.max_num_active_reqs = self._admission_limit - self._num_held_slots()


def _is_prefilling(request: Request) -> bool:
    # The second condition holds for a preempted request that is being prefilled again, also in the
    # step that ends it.
    return bool(
        request.num_output_tokens == 0 or _num_valid_tokens(request) < request.num_tokens - 1
    )


def _num_valid_tokens(request: Request) -> int:
    # vLLM counts tokens as computed when it has scheduled them.
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


class MigratingAsyncScheduler(MigratingScheduler, AsyncScheduler):
    """MigratingScheduler over vLLM's asynchronous scheduling, vLLM's default on GPUs.

    vLLM forces synchronous scheduling on CPU, where tests simulate its steps.
    """


def _is_preempted_before(other: Request, request: Request) -> bool:
    is_preempted = other.status == RequestStatus.PREEMPTED
    return bool(is_preempted and other.arrival_time <= request.arrival_time)


def _comes_after(other: Request, request: Request) -> bool:
    is_preempted = other.status == RequestStatus.PREEMPTED
    return bool(not is_preempted and other.arrival_time > request.arrival_time)
