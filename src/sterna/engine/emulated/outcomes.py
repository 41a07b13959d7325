"""Outcomes of a migration's effects on the core of an emulated engine. Pure.

Shared by the shells of such cores: `emulated_engine` on the wall clock, `simulator` and the fault
simulation in virtual time. The functions are called between two steps. State of a request that a
shell keeps besides the core's is passed in through functions.
"""

from collections.abc import Callable
from typing import Protocol

from sterna.engine.drains import DrainOutcome, Left, refused
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
from sterna.types import MigrationId, RequestId, whose_prefix


class Core(Protocol):
    """The part of an engine's core that migrations use; `EmulatedCore` says what it does."""

    def progress(self, request_id: RequestId) -> RequestPosition | None: ...

    def begin_drain(self, drain: Drain) -> DrainOutcome: ...

    def resume(self, request_id: RequestId) -> None: ...

    def release(self, request_id: RequestId) -> None: ...

    def reserve(
        self, migration_id: MigrationId, num_blocks: int, *, needs_slot: bool
    ) -> Reason | None: ...

    def free_reservation(self, migration_id: MigrationId) -> None: ...


def inspect(core: Core, request_id: RequestId, encode: Callable[[RequestId], bytes]) -> Inspected:
    """Carry out `Inspect`; `encode` returns the request as it is sent to the destination."""
    progress = core.progress(request_id)
    return Inspected(None) if progress is None else Inspected(progress, encode(request_id))


def drain(
    core: Core, effect: Drain, export: Callable[[RequestId], bytes]
) -> Drained | DrainRefused:
    """Carry out `Drain`; `export` returns the state of the drained request."""
    return drained(effect, core.begin_drain(effect), export)


def drained(
    effect: Drain, outcome: DrainOutcome, export: Callable[[RequestId], bytes]
) -> Drained | DrainRefused:
    """Return what the migration is told of a drain with this outcome; `export` as in `drain`."""
    if not isinstance(outcome, Left):
        return refused(outcome)
    num_blocks = 0 if effect.mode is Mode.RECOMPUTE else outcome.num_blocks
    return Drained(num_blocks, export(effect.request_id))


def reserve(
    core: Core, effect: ReserveBlocks, expect: Callable[[ReserveBlocks], tuple[str, ...]]
) -> BlocksReserved | ReserveFailed:
    """Carry out `ReserveBlocks`; `expect` prepares for the stage and returns its receivers."""

    def extend() -> Reason | None:
        num_blocks = effect.first_block + effect.num_blocks
        needs_slot = effect.is_last and whose_prefix(effect.request_id) is None
        return core.reserve(effect.migration_id, num_blocks, needs_slot=needs_slot)

    return reserved(core, effect, extend, expect)


def reserved(
    core: Core,
    effect: ReserveBlocks,
    extend: Callable[[], Reason | None],
    expect: Callable[[ReserveBlocks], tuple[str, ...]],
) -> BlocksReserved | ReserveFailed:
    """Carry out `ReserveBlocks`; `extend` extends the reservation, `expect` is as in `reserve`."""
    if core.progress(effect.request_id) is not None:
        return ReserveFailed(effect.stage, Reason.DUPLICATE_REQUEST)
    refusal = extend()
    if refusal is not None:
        return ReserveFailed(effect.stage, refusal)
    return BlocksReserved(effect.stage, expect(effect))


def adopt(core: Core, effect: Adopt, take_in: Callable[[], None]) -> Adopted | AdoptFailed:
    """Carry out `Adopt`; `take_in` makes the core adopt the request."""
    if core.progress(effect.request_id) is not None:
        return AdoptFailed(Reason.DUPLICATE_REQUEST)
    take_in()
    return Adopted()
