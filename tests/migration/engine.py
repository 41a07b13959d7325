"""A very small engine: paged memory, a batch, preemption, and the effects of a migration.

It keeps what every block of its memory holds, so that a block that was copied too late, or
overwritten, or never written, shows when the request is adopted.
"""

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Drain,
    Drained,
    DrainRefused,
    Inspected,
    Mode,
    Reason,
    RequestPosition,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.types import (
    Immovable,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    RequestStatus,
    RequestView,
)

BLOCK_SIZE = 2

Content = tuple[str, ...]
GARBAGE: Content = ("garbage",)


class Where(Enum):
    RUNNING = "running"
    QUEUING = "queuing"
    DRAINED = "drained"


@dataclass
class Request:
    request_id: RequestId
    num_tokens: int
    max_tokens: int
    where: Where = Where.QUEUING
    drained_from: Where = Where.QUEUING
    blocks: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE)

    def content(self, block: int) -> Content:
        """What the block holds when everything is right."""
        tokens = range(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, self.num_tokens))
        return tuple(f"{self.request_id}:{token}" for token in tokens)


class RequestState(msgspec.Struct):
    num_tokens: int
    max_tokens: int


@dataclass
class Reservation:
    request_id: RequestId
    blocks: list[int] = field(default_factory=list)
    has_slot: bool = False


@dataclass
class Listening:
    """A receiver that waits for the blocks of one stage."""

    block_ids: list[int]
    since_s: float
    num_received: int = 0


class Engine:
    """The engine of one instance."""

    def __init__(self, instance_id: InstanceId, num_blocks: int, max_batch: int) -> None:
        self.instance_id = instance_id
        self.num_blocks = num_blocks
        self.max_batch = max_batch
        self.memory: list[Content] = [GARBAGE] * num_blocks
        self.free = list(range(num_blocks))
        self.requests: dict[RequestId, Request] = {}
        self.reservations: dict[MigrationId, Reservation] = {}
        self.listening: dict[tuple[MigrationId, int], Listening] = {}
        self.num_adoptions_to_fail = 0

    # --------------------------------------------------------------------------------- serving

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    def admit(self) -> None:
        """Let queuing requests run, in order, as long as there is memory and a slot."""
        for request in self._those(Where.QUEUING):
            if self._num_taken_slots() >= self.max_batch or request.num_blocks > len(self.free):
                return
            request.blocks = self._take(request.num_blocks)
            request.where = Where.RUNNING
            for block in range(request.num_blocks):
                self.memory[request.blocks[block]] = request.content(block)

    def step(self) -> list[Request]:
        """Every running request gets a token; returns those that are finished by it."""
        finished = []
        for request in self._those(Where.RUNNING):
            if request.num_tokens % BLOCK_SIZE == 0:
                if not self.free:
                    self.preempt(request)
                    continue
                request.blocks += self._take(1)
            request.num_tokens += 1
            last = request.num_blocks - 1
            self.memory[request.blocks[last]] = request.content(last)
            if request.num_tokens >= request.max_tokens:
                finished.append(request)
        for request in finished:
            self.remove(request)
        return finished

    def preempt(self, request: Request) -> None:
        assert request.where is Where.RUNNING
        self._give_back(request.blocks)
        request.blocks = []
        request.where = Where.QUEUING
        request.num_preemptions += 1

    def remove(self, request: Request) -> None:
        self._give_back(request.blocks)
        del self.requests[request.request_id]

    def view(self) -> InstanceView:
        return InstanceView(
            instance_id=self.instance_id,
            total_tokens=self.num_blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            running=tuple(self._view(r) for r in self._those(Where.RUNNING, Where.DRAINED)),
            queuing=tuple(self._view(r) for r in self._those(Where.QUEUING)),
            reserved_tokens=BLOCK_SIZE * sum(len(r.blocks) for r in self.reservations.values()),
        )

    def _view(self, request: Request) -> RequestView:
        is_queuing = request.where is Where.QUEUING
        return RequestView(
            request_id=request.request_id,
            status=RequestStatus.QUEUING if is_queuing else RequestStatus.RUNNING,
            num_tokens=request.num_tokens,
            physical_usage_tokens=BLOCK_SIZE * len(request.blocks),
            demand_tokens=BLOCK_SIZE * request.num_blocks if is_queuing else 0,
            num_preemptions=request.num_preemptions,
            immovable=Immovable.MIGRATING if request.where is Where.DRAINED else None,
        )

    # ---------------------------------------------------------------------------------- source

    def inspect(self, request_id: RequestId) -> Inspected:
        request = self.requests.get(request_id)
        if request is None:
            return Inspected(None)
        is_queuing = request.where is Where.QUEUING
        progress = RequestPosition(
            is_queuing=is_queuing,
            num_full_blocks=0 if is_queuing else request.num_tokens // BLOCK_SIZE,
            num_blocks=0 if is_queuing else request.num_blocks,
            num_preemptions=request.num_preemptions,
            is_immovable=request.where is Where.DRAINED,
        )
        return Inspected(progress, request_id.encode())

    def drain(self, effect: Drain) -> Drained | DrainRefused:
        request = self.requests.get(effect.request_id)
        if request is None:
            return DrainRefused(Reason.REQUEST_FINISHED)
        if request.num_preemptions != effect.num_preemptions:
            return DrainRefused(Reason.REQUEST_PREEMPTED)
        if request.where is Where.DRAINED:
            return DrainRefused(Reason.REQUEST_IMMOVABLE)
        num_blocks = 0 if request.where is Where.QUEUING else request.num_blocks
        if (
            effect.mode is not Mode.RECOMPUTE
            and num_blocks - effect.first_block > effect.max_blocks
        ):
            return DrainRefused(None)
        request.drained_from = request.where
        request.where = Where.DRAINED
        state = RequestState(request.num_tokens, request.max_tokens)
        return Drained(num_blocks, msgspec.msgpack.encode(state))

    def resume(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        assert request.where is Where.DRAINED, "only what was drained can be resumed"
        request.where = request.drained_from

    def free_drained(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        assert request.where is Where.DRAINED, "only what was drained can be released"
        self.remove(request)

    # ----------------------------------------------------------------------------- destination

    def reserve(self, effect: ReserveBlocks, now_s: float) -> BlocksReserved | ReserveFailed:
        reservation = self.reservations.get(effect.migration_id, Reservation(effect.request_id))
        end = effect.first_block + effect.num_blocks
        num_added = max(0, end - len(reservation.blocks))
        if effect.request_id in self.requests:
            return ReserveFailed(effect.stage, Reason.DUPLICATE_REQUEST)
        if num_added > len(self.free):
            return ReserveFailed(effect.stage, Reason.NO_MEMORY)
        needs_slot = effect.is_last and not reservation.has_slot
        if needs_slot and self._num_taken_slots() >= self.max_batch:
            return ReserveFailed(effect.stage, Reason.NO_SLOT)
        reservation.blocks += self._take(num_added)
        reservation.has_slot |= effect.is_last
        self.reservations[effect.migration_id] = reservation
        if effect.num_blocks:
            stage_blocks = reservation.blocks[effect.first_block : end]
            listening = Listening(stage_blocks, now_s)
            self.listening[effect.migration_id, effect.stage] = listening
        return BlocksReserved(effect.stage, (self.instance_id,))

    def free_reservation(self, migration_id: MigrationId) -> None:
        self._stop_listening(migration_id)
        self._give_back(self.reservations.pop(migration_id).blocks)

    def adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        if self.num_adoptions_to_fail:
            self.num_adoptions_to_fail -= 1
            return AdoptFailed(Reason.UNSUPPORTED)
        self._stop_listening(effect.migration_id)
        reservation = self.reservations.pop(effect.migration_id)
        state = msgspec.msgpack.decode(effect.state, type=RequestState)
        request = Request(effect.request_id, state.num_tokens, state.max_tokens)
        self.add(request)
        self._give_back(reservation.blocks[effect.num_blocks :])
        if effect.num_blocks:
            request.where = Where.RUNNING
            request.blocks = reservation.blocks[: effect.num_blocks]
            assert effect.num_blocks == request.num_blocks, "a block is missing"
            for block, block_id in enumerate(request.blocks):
                held, right = self.memory[block_id], request.content(block)
                assert held == right, f"KV corrupted: block {block} holds {held}, not {right}"
        return Adopted()

    # ------------------------------------------------------------------------------- internals

    def _those(self, *where: Where) -> list[Request]:
        return [request for request in self.requests.values() if request.where in where]

    def _num_taken_slots(self) -> int:
        # A drained request keeps its slot, so that it can come back.
        held = [r for r in self._those(Where.DRAINED) if r.drained_from is Where.RUNNING]
        reserved = [r for r in self.reservations.values() if r.has_slot]
        return len(self._those(Where.RUNNING)) + len(held) + len(reserved)

    def _take(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.memory[block] = GARBAGE
        self.free += blocks

    def _stop_listening(self, migration_id: MigrationId) -> None:
        self.listening = {k: v for k, v in self.listening.items() if k[0] != migration_id}
