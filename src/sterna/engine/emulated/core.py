"""The emulated engine's core: continuous batching over paged memory, without a clock. Pure.

It decides by the rules of vLLM's scheduler: which requests are admitted, what a step computes and
which requests are preempted. It also carries out the effects of migrations (drains, reservations,
adoptions), as `engine.vllm.scheduler` does. The caller begins and ends each step and lets its
duration pass in between, on a wall clock or a virtual one; all other methods are called between
two steps.

Where a rule differs between vLLM 0.1, which the paper ran, and vLLM 1, `config` chooses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sterna.engine.cache_changes import CacheRecorder
from sterna.engine.drains import DrainOutcome, Left, drain_outcome, position_of_prefix
from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.prefix_cache import CachedBlock, PrefixCache, num_common, num_free
from sterna.engine.emulated.requests import EmulatedRequest, RequestState
from sterna.engine.emulated.steps import Step, Token
from sterna.engine.ended_outputs import EndedOutputs
from sterna.errors import UnknownRequestError
from sterna.migration.messages import Drain, Reason, RequestPosition
from sterna.types import (
    Immovable,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    RequestStatus,
    RequestView,
    whose_prefix,
)


@dataclass(slots=True)
class _Reservation:
    num_blocks: int = 0
    has_slot: bool = False


@dataclass(slots=True)
class KeptPrefix:
    """Blocks of a prefix that moves alone.

    Attributes:
        num_idle_blocks: those of them that no request held before.
    """

    blocks: list[CachedBlock]
    num_idle_blocks: int


class EmulatedCore:
    """One engine.

    Args:
        recorder: gets all changes to the prefix cache.
    """

    def __init__(
        self,
        config: EmulatedEngineConfig,
        step_time: StepTime,
        recorder: CacheRecorder | None = None,
    ) -> None:
        self._config = config
        self._step_time = step_time
        self._requests: dict[RequestId, EmulatedRequest] = {}
        # In the order in which they get memory; `_victim` is preempted first.
        self._running: list[EmulatedRequest] = []
        self._waiting: list[EmulatedRequest] = []
        self._drained: dict[RequestId, EmulatedRequest] = {}
        self._reservations: dict[MigrationId, _Reservation] = {}
        self._kept: dict[RequestId, KeptPrefix] = {}
        self._num_free_blocks = config.num_blocks
        self._prefixes = PrefixCache(recorder)
        self._num_preemptions = 0
        self._num_prefix_tokens = self._num_prefix_hits = 0
        self._ended = EndedOutputs()
        self._scheduled: list[tuple[EmulatedRequest, int]] = []

    # ------------------------------------------------------------------------------- views

    @property
    def num_free_blocks(self) -> int:
        """Blocks that neither a request nor a reservation holds."""
        return self._num_free_blocks

    @property
    def num_idle_blocks(self) -> int:
        """Those of them whose contents the prefix cache still has."""
        return self._prefixes.num_idle

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks held for incoming migrations."""
        return sum(each.num_blocks for each in self._reservations.values())

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that no request held until they were kept for a prefix that moves from here."""
        return sum(each.num_idle_blocks for each in self._kept.values())

    @property
    def kept_blocks(self) -> Iterable[CachedBlock]:
        """Blocks of prefixes that move from here; requests may hold some of them, too."""
        return (block for each in self._kept.values() for block in each.blocks)

    @property
    def num_reservations(self) -> int:
        """Incoming migrations that hold blocks or a slot, or may do so later."""
        return len(self._reservations)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way."""
        return bool(self._scheduled)

    @property
    def is_empty(self) -> bool:
        """Whether there are neither requests nor reservations."""
        return not (self._requests or self._reservations or self._kept)

    def cached_hashes(self) -> Iterable[int]:
        """The block hashes of the contents that the prefix cache has."""
        return self._prefixes.hashes()

    def coming_tokens(self, block_hashes: Sequence[int], num_tokens: int) -> int:
        """Tokens that a request with these block hashes and this length would not have to compute
        here, behind those that queue: of its prefix, what is cached and what one of them has."""
        hashes = block_hashes[: (num_tokens - 1) // self._config.block_size]
        num_blocks = len(self._prefixes.find(hashes, len(hashes)))
        for each in (*self._waiting, *self._running):
            if each.is_prefilling or each.num_blocks == 0:
                its_hashes = each.block_hashes[: each.num_tokens // self._config.block_size]
                num_blocks = max(num_blocks, num_common(hashes, its_hashes))
        return num_blocks * self._config.block_size

    def forget_prefixes(self) -> bool:
        """Empty the prefix cache; returns whether it could be done: only while no block is held."""
        if self._num_free_blocks < self._config.num_blocks:
            return False
        self._prefixes.clear()
        return True

    def requests(self) -> Iterable[EmulatedRequest]:
        """All requests that hold memory, queue or are drained."""
        return self._requests.values()

    def is_drained(self, request_id: RequestId) -> bool:
        """Whether the request is here, outside batch and queue."""
        return request_id in self._drained

    def view(self, instance_id: InstanceId, *, is_terminating: bool = False) -> InstanceView:
        """The llumlet's view. During a step: the state after the step's beginning."""
        running = [*self._running, *self._drained_running()]
        return InstanceView(
            instance_id=instance_id,
            total_tokens=self._config.total_tokens,
            block_size=self._config.block_size,
            running=tuple(self._view(each, RequestStatus.RUNNING) for each in running),
            queuing=tuple(self._view(each, RequestStatus.QUEUING) for each in self._waiting),
            reserved_tokens=self._num_owned_blocks * self._config.block_size,
            num_preemptions=self._num_preemptions,
            is_terminating=is_terminating,
            shared_tokens=self._num_shared_blocks * self._config.block_size,
            num_slots=self._config.max_num_seqs - self._num_reserved_slots(),
            num_prefix_tokens=self._num_prefix_tokens,
            num_prefix_hits=self._num_prefix_hits,
            num_ended=self._ended.counts,
        )

    @property
    def _num_shared_blocks(self) -> int:
        """How often requests hold blocks more than the number of blocks that they hold."""
        num_held = sum(each.num_blocks for each in self._requests.values())
        num_used = self._config.num_blocks - self._num_free_blocks - self._num_owned_blocks
        return num_held - num_used

    @property
    def _num_owned_blocks(self) -> int:
        """Blocks that belong to migrations: those that are reserved, and those that were free until
        a prefix was to move."""
        return self.num_reserved_blocks + self.num_kept_blocks

    def _view(self, request: EmulatedRequest, status: RequestStatus) -> RequestView:
        is_awaiting = status is RequestStatus.QUEUING or request.is_prefilling
        demand_blocks = self._num_needed(request.num_tokens) if is_awaiting else 0
        return RequestView(
            request_id=request.request_id,
            status=status,
            num_tokens=request.num_tokens,
            physical_usage_tokens=request.num_blocks * self._config.block_size,
            demand_tokens=demand_blocks * self._config.block_size,
            scheduling_priority=request.scheduling_priority,
            execution_priority=request.execution_priority,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            arrival_s=request.arrival_s,
            immovable=self._immovable(request),
            uncomputed_tokens=self._uncomputed_tokens(request, status),
            num_earlier_tokens=request.num_earlier_tokens,
            num_shared_tokens=request.num_shared_tokens,
        )

    def _uncomputed_tokens(self, request: EmulatedRequest, status: RequestStatus) -> int:
        if status is RequestStatus.QUEUING:
            return request.num_tokens - request.num_found_tokens
        return request.num_tokens - request.num_computed_tokens if request.is_prefilling else 0

    def _immovable(self, request: EmulatedRequest) -> Immovable | None:
        if request.request_id in self._drained:
            return Immovable.MIGRATING
        if request.num_blocks > 0 and request.is_prefilling:
            return Immovable.PREFILLING
        return None

    def progress(self, request_id: RequestId) -> RequestPosition | None:
        """The request's position, or None when it is not here."""
        if (kept := self._kept.get(request_id)) is not None:
            return position_of_prefix(len(kept.blocks), self._config.block_size)
        request = self._requests.get(request_id)
        if request is None:
            return None
        num_valid_tokens = request.num_computed_tokens
        return RequestPosition(
            is_queuing=request.num_blocks == 0,
            num_full_blocks=num_valid_tokens // self._config.block_size,
            num_blocks=self._config.blocks_of(num_valid_tokens),
            num_preemptions=request.num_preemptions,
            is_immovable=self._immovable(request) is not None,
        )

    # --------------------------------------------------------------------------- requests

    def add(self, state: RequestState) -> None:
        """Queue a request by (scheduling priority, arrival).

        A request that already has outputs, of an engine that died, counts as preempted: it queues
        in front of those of its priority. May also be called during a step, whose batch does not
        change.
        """
        request = EmulatedRequest.of(state)
        self._requests[request.request_id] = request
        self._queue_arriving(request)

    def _queue_arriving(self, request: EmulatedRequest) -> None:
        """Queue a request that arrives without KV."""
        request.num_computed_tokens = 0
        if request.num_output_tokens > 0:
            request.is_preempted = True
            self._enqueue_in_front(request)
        else:
            self._enqueue(request)

    def abort(self, request_id: RequestId) -> None:
        """End the request without a token; one that is not here is ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._ended.add(request.num_output_tokens)
        self._free(request)
        self._drained.pop(request_id, None)
        for requests in (self._running, self._waiting):
            if request in requests:
                requests.remove(request)

    def _enqueue(self, request: EmulatedRequest) -> None:
        """Queue behind those of higher priority, the preempted and the earlier of the same."""
        place = len(self._waiting)
        while place > 0 and self._comes_after(self._waiting[place - 1], request):
            place -= 1
        self._queue_at(place, request)

    def _enqueue_in_front(self, request: EmulatedRequest) -> None:
        """Queue in front of all requests of the same priority; vLLM's queue by priority has no such
        place, and puts it by its arrival."""
        if self._config.preemption is Preemption.LEAST_URGENT:
            self._enqueue(request)
            return
        place = 0
        while (
            place < len(self._waiting)
            and self._waiting[place].scheduling_priority > request.scheduling_priority
        ):
            place += 1
        self._queue_at(place, request)

    def _comes_after(self, queuing: EmulatedRequest, newcomer: EmulatedRequest) -> bool:
        if queuing.scheduling_priority != newcomer.scheduling_priority:
            return queuing.scheduling_priority < newcomer.scheduling_priority
        is_by_arrival = self._config.preemption is Preemption.LEAST_URGENT
        stays_in_front = queuing.is_preempted and not is_by_arrival
        return not stays_in_front and queuing.arrival_s > newcomer.arrival_s

    def _queue_at(self, place: int, request: EmulatedRequest) -> None:
        request.num_found_tokens = len(self._find(request)) * self._config.block_size
        self._waiting.insert(place, request)

    def _join_batch(self, request: EmulatedRequest) -> None:
        place = len(self._running)
        if self._config.preemption is Preemption.LATEST_ARRIVED:
            key = _arrival_key(request)
            while place > 0 and _arrival_key(self._running[place - 1]) > key:
                place -= 1
        self._running.insert(place, request)

    # ------------------------------------------------------------------------------- steps

    def begin_step(self) -> Step:
        """Decide what the next step computes; an empty step is over at once."""
        assert not self._scheduled
        admitted, preempted = self._schedule()
        more_preempted = bool(preempted)
        while not self._scheduled and more_preempted:
            # There is memory again: for other running requests, or for the head of the queue.
            admitted, just_preempted = self._schedule()
            preempted += just_preempted
            more_preempted = bool(just_preempted)
        if self._config.prefix_caching:
            # As in vLLM, not for requests that are admitted again.
            fresh = [each for each in admitted if each.num_preemptions == 0]
            self._num_prefix_tokens += sum(each.num_tokens for each in fresh)
            self._num_prefix_hits += sum(each.num_computed_tokens for each in fresh)
        return Step(
            duration_s=self._duration_s() if self._scheduled else 0.0,
            scheduled=tuple((each.request_id, num) for each, num in self._scheduled),
            admitted=tuple(each.request_id for each in admitted),
            cached=tuple(each.num_computed_tokens for each in admitted),
            preempted=tuple(each.request_id for each in preempted),
            decoded=tuple(r.request_id for r, _ in self._scheduled if not r.is_prefilling),
        )

    def end_step(self) -> tuple[Token, ...]:
        """End the step under way; returns its tokens in the order of the batch."""
        tokens = []
        for request, num_tokens in self._scheduled:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens < request.num_tokens:
                continue
            index = request.num_output_tokens
            request.num_output_tokens += 1
            is_last = request.num_output_tokens == request.output_tokens
            tokens.append(Token(request.request_id, index, is_last))
            if is_last:
                self._running.remove(request)
                self._ended.add(request.num_output_tokens)
                self._free(request)
                del self._requests[request.request_id]
        self._scheduled = []
        return tuple(tokens)

    def _schedule(self) -> tuple[list[EmulatedRequest], list[EmulatedRequest]]:
        """Fill the step; returns the admitted and the preempted requests."""
        if self._config.step_mode is StepMode.CHUNKED:
            budget = self._config.max_num_batched_tokens
            budget, preempted = self._schedule_running(budget)
            return ([] if preempted else self._admit_chunks(budget)), preempted
        if admitted := self._admit_prompts():
            return admitted, []
        _, preempted = self._schedule_running(len(self._running))
        return [], preempted

    def _schedule_running(self, budget: int) -> tuple[int, list[EmulatedRequest]]:
        """Schedule the running requests, within the budget of tokens.

        Each gets the memory for its tokens. Where there is too little, others are preempted, until
        the request itself is the next one: then the rest computes nothing in this step. Returns
        the remaining budget, and the preempted requests.
        """
        preempted: list[EmulatedRequest] = []
        place = 0
        while place < len(self._running) and budget > 0:
            request = self._running[place]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._has_room(request, num_tokens):
                victim = self._victim()
                if self._running.index(victim) < place:
                    place -= 1
                    budget += self._unschedule(victim)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    return budget, preempted
            self._compute(request, num_tokens)
            budget -= num_tokens
            place += 1
        return budget, preempted

    def _has_room(self, request: EmulatedRequest, num_tokens: int) -> bool:
        num_new_blocks = self._num_new_blocks(request, num_tokens)
        return self._num_free_blocks >= max(num_new_blocks, int(self._config.keeps_block_free))

    def _victim(self) -> EmulatedRequest:
        """The running request that is preempted first."""
        if self._config.preemption is Preemption.LEAST_URGENT:
            return max(self._running, key=_arrival_key)
        return self._running[-1]

    def _unschedule(self, request: EmulatedRequest) -> int:
        """Remove the request from the step; returns its number of scheduled tokens."""
        place = next(i for i, (each, _) in enumerate(self._scheduled) if each is request)
        return self._scheduled.pop(place)[1]

    def _preempt(self, request: EmulatedRequest) -> None:
        self._running.remove(request)
        self._free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.is_preempted = True
        self._num_preemptions += 1
        self._enqueue_in_front(request)

    def _admit_prompts(self) -> list[EmulatedRequest]:
        """Admit whole prompts in the queue's order, until one does not fit (vLLM 0.1)."""
        admitted: list[EmulatedRequest] = []
        budget = self._config.max_num_batched_tokens
        while self._waiting and self._has_slot():
            head = self._waiting[0]
            if (admitted and head.num_tokens > budget) or not self._fits(head, self._watermark):
                break
            budget -= self._admit(head, head.num_tokens)
            admitted.append(head)
        return admitted

    def _admit_chunks(self, budget: int) -> list[EmulatedRequest]:
        """Admit requests in the queue's order as long as tokens are left (vLLM 1).

        The whole prompt must fit into the free memory, though only what is cached and the computed
        chunk take blocks. The watermark is kept for running requests; where none runs, it may be
        used.
        """
        admitted: list[EmulatedRequest] = []
        while self._waiting and budget > 0 and self._has_slot():
            head = self._waiting[0]
            if not self._fits(head, self._watermark if self._running else 0):
                break
            budget -= self._admit(head, budget)
            admitted.append(head)
        return admitted

    def _admit(self, head: EmulatedRequest, budget: int) -> int:
        """Admit the head of the queue; returns the number of its scheduled tokens."""
        self._waiting.pop(0)
        head.is_preempted = False
        self._join_batch(head)
        self._reuse(head)
        num_tokens = min(head.num_tokens - head.num_computed_tokens, budget)
        self._compute(head, num_tokens)
        return num_tokens

    def _reuse(self, head: EmulatedRequest) -> None:
        """Give the request, which has no blocks, those of its prefix that are cached."""
        head.cached = self._find(head)
        self._num_free_blocks -= self._prefixes.use(head.cached)
        head.num_blocks = len(head.cached)
        head.num_computed_tokens = head.num_blocks * self._config.block_size
        head.num_shared_tokens = head.num_computed_tokens

    def _find(self, request: EmulatedRequest) -> list[CachedBlock]:
        """The cached blocks of the request's prefix. The block of its last token is not among
        them: that token's step computes the next one."""
        if not self._config.prefix_caching:
            return []
        max_blocks = (request.num_tokens - 1) // self._config.block_size
        return self._prefixes.find(request.block_hashes, max_blocks)

    def _compute(self, request: EmulatedRequest, num_tokens: int) -> None:
        """Schedule the request, with blocks for this number of its tokens. Those that the step
        fills can be found from now on, even by a request that the same step computes."""
        self._hold(request, self._num_new_blocks(request, num_tokens))
        self._cache_full(request, request.num_computed_tokens + num_tokens)
        self._scheduled.append((request, num_tokens))

    def _cache_full(self, request: EmulatedRequest, num_tokens: int) -> None:
        """Have the blocks that these first tokens of the request fill be found."""
        if not self._config.prefix_caching:
            return
        num_full_blocks = num_tokens // self._config.block_size
        for block_hash in request.block_hashes[len(request.cached) : num_full_blocks]:
            request.cached.append(self._prefixes.add(block_hash))

    def _num_new_blocks(self, request: EmulatedRequest, num_tokens: int) -> int:
        num_needed = self._config.blocks_of(request.num_computed_tokens + num_tokens)
        return num_needed - request.num_blocks

    def _num_needed(self, num_tokens: int) -> int:
        """The blocks that a request of this length needs in order to be admitted."""
        return self._config.blocks_of(num_tokens)

    def _hold(self, request: EmulatedRequest, num_more_blocks: int) -> None:
        """Give the request more blocks; a negative number of them goes back."""
        self._take(num_more_blocks)
        request.num_blocks += num_more_blocks

    def _take(self, num_blocks: int) -> None:
        """Take free blocks, whose contents are lost; a negative number of them goes back."""
        self._num_free_blocks -= num_blocks
        self._prefixes.shrink(self._num_free_blocks)

    @property
    def _watermark(self) -> int:
        return self._config.watermark_blocks

    def _fits(self, request: EmulatedRequest, watermark_blocks: int) -> bool:
        cached = self._find(request)
        num_blocks = self._num_needed(request.num_tokens) - len(cached) + num_free(cached)
        return num_blocks + watermark_blocks <= self._num_free_blocks

    def _free(self, request: EmulatedRequest) -> None:
        num_others = len(request.cached) - self._prefixes.leave(request.cached)
        self._num_free_blocks += request.num_blocks - num_others
        request.num_blocks = 0
        request.cached = []

    def _duration_s(self) -> float:
        num_prompt_tokens = num_pairs = num_decodes = num_context_tokens = 0
        for request, num_tokens in self._scheduled:
            num_before = request.num_computed_tokens
            if request.is_prefilling:
                num_prompt_tokens += num_tokens
                num_pairs += num_tokens * num_tokens + 2 * num_tokens * num_before
            else:
                num_decodes += 1
                num_context_tokens += num_before + num_tokens
        return self._step_time.duration_s(
            num_prompt_tokens, num_pairs, num_decodes, num_context_tokens
        )

    # ------------------------------------------------------------------------------ source

    def begin_drain(self, drain: Drain) -> DrainOutcome:
        """Take the request out of the batch or queue if it may leave; it keeps blocks and slot."""
        outcome = drain_outcome(self.progress(drain.request_id), drain)
        if isinstance(outcome, Left) and drain.request_id not in self._kept:
            request = self._requests[drain.request_id]
            (self._waiting if outcome.was_queuing else self._running).remove(request)
            self._drained[drain.request_id] = request
        return outcome

    def export(self, request_id: RequestId) -> RequestState:
        """The state with which the destination continues the drained request."""
        return self._drained[request_id].state()

    def resume(self, request_id: RequestId) -> None:
        """Put the drained request back into the batch by the batch's order (`_join_batch`), or in
        front of the queuing requests of its priority. A prefix stays kept."""
        if request_id in self._kept:
            return
        request = self._forget_drained(request_id)
        if request.num_blocks > 0:
            self._join_batch(request)
        else:
            self._enqueue_in_front(request)

    def release(self, request_id: RequestId) -> None:
        """Free the drained request without a token, or the kept prefix, if there is one."""
        if whose_prefix(request_id) is not None:
            kept = self._kept.pop(request_id, None)
            if kept is not None:
                self._num_free_blocks += self._prefixes.leave(kept.blocks)
            return
        request = self._forget_drained(request_id)
        self._free(request)
        del self._requests[request_id]

    def _forget_drained(self, request_id: RequestId) -> EmulatedRequest:
        request = self._drained.pop(request_id, None)
        if request is None:
            raise UnknownRequestError(f"request {request_id} is not drained on this engine")
        return request

    def _drained_running(self) -> list[EmulatedRequest]:
        return [each for each in self._drained.values() if each.num_blocks > 0]

    def keep_prefix(
        self, prefix_id: RequestId, block_hashes: Sequence[int], first_block: int
    ) -> None:
        """Carry out `KeepPrefix`; from this block of the prefix on."""
        blocks = self._prefixes.find(block_hashes, len(block_hashes))[first_block:]
        if blocks:
            num_idle_blocks = self._prefixes.use(blocks)
            self._num_free_blocks -= num_idle_blocks
            self._kept[prefix_id] = KeptPrefix(blocks, num_idle_blocks)

    def kept_hashes(self, prefix_id: RequestId) -> list[int]:
        """The hashes of the kept blocks, in order: what the destination must know."""
        return [each.block_hash for each in self._kept[prefix_id].blocks]

    # ------------------------------------------------------------------------- destination

    def reserve(
        self, migration_id: MigrationId, num_blocks: int, *, needs_slot: bool
    ) -> Reason | None:
        """Extend the migration's reservation to `num_blocks` blocks, and a batch slot if needed.

        Returns why nothing was reserved, or None. The watermark stays free, as it does when a
        request is admitted. A request without KV, for which no block is reserved, will queue: it
        needs neither memory nor slot.
        """
        if num_blocks == 0:
            self._reservations.setdefault(migration_id, _Reservation())
            return None
        reservation = self._reservations.get(migration_id, _Reservation())
        num_new_blocks = max(0, num_blocks - reservation.num_blocks)
        if num_new_blocks > self._num_free_blocks - self._config.watermark_blocks:
            return Reason.NO_MEMORY
        if needs_slot and not reservation.has_slot and not self._has_slot():
            return Reason.NO_SLOT
        self._take(num_new_blocks)
        reservation.num_blocks += num_new_blocks
        reservation.has_slot = reservation.has_slot or needs_slot
        self._reservations[migration_id] = reservation
        return None

    def free_reservation(self, migration_id: MigrationId) -> None:
        """Free the reservation, if there is one."""
        reservation = self._reservations.pop(migration_id, None)
        if reservation is not None:
            self._num_free_blocks += reservation.num_blocks

    def adopt(self, migration_id: MigrationId, state: RequestState, num_blocks: int) -> None:
        """Add the migrated request, whose KV is in the reservation's first blocks.

        It runs from the next step on. A request without KV queues: by arrival, or in front of its
        priority when it has run before.

        Raises:
            KeyError: there is no such reservation.
        """
        reservation = self._reservations.pop(migration_id)
        assert num_blocks <= reservation.num_blocks
        self._num_free_blocks += reservation.num_blocks - num_blocks
        request = EmulatedRequest.of(state)
        self._requests[request.request_id] = request
        if num_blocks > 0:
            request.num_blocks = num_blocks
            self._cache_full(request, request.num_computed_tokens)
            self._join_batch(request)
        else:
            self._queue_arriving(request)

    def adopt_prefix(self, migration_id: MigrationId, block_hashes: Sequence[int]) -> None:
        """Enter the reservation's first blocks, which have these contents, into the prefix cache,
        and free all.

        Raises:
            KeyError: there is no such reservation.
        """
        reservation = self._reservations.pop(migration_id)
        assert len(block_hashes) <= reservation.num_blocks
        if self._config.prefix_caching:
            self._prefixes.leave([self._prefixes.add(each) for each in block_hashes])
        self._num_free_blocks += reservation.num_blocks

    def _has_slot(self) -> bool:
        num_held = len(self._drained_running()) + self._num_reserved_slots()
        return len(self._running) + num_held < self._config.max_num_seqs

    def _num_reserved_slots(self) -> int:
        return sum(each.has_slot for each in self._reservations.values())


def _arrival_key(request: EmulatedRequest) -> tuple[int, float]:
    return -request.scheduling_priority, request.arrival_s
