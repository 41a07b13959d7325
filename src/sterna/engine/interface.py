"""What a llumlet's driver asks of an engine, real or emulated.

An engine steps its requests on a thread (or clock) of its own. Every method that changes what
it steps takes effect between two steps, in the order of the calls; none blocks the caller's
asyncio loop. Outputs, views and the outcomes of transfers come through `EngineListener`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sterna.messages.actors import TokenSpan
from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    CopyBlocks,
    Drain,
    Drained,
    DrainRefused,
    Event,
    Inspected,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.types import FrontendId, InstanceView, MigrationId, RequestId


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine when it is ready.

    Attributes:
        block_size: tokens a block.
        total_tokens: M, memory usable by requests, in tokens.
        ready_response: what the front end's client expects from its engine, encoded.
        kv_format: KV blocks of an engine with the same format mean the same here: equal weights,
            layout and precision. Requests move between others without their KV cache.
        immovable_features: names of engine features whose state cannot move; when there are
            any, the engine is served without migration.
    """

    block_size: int
    total_tokens: int
    ready_response: bytes
    kv_format: str
    immovable_features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """How an engine gets on.

    Attributes:
        num_ended: steps, and commands between two steps, that have ended since the start.
        is_busy: whether one is under way that should end soon. What an operator has ordered may
            take as long as it likes.
    """

    num_ended: int
    is_busy: bool


class EngineListener(Protocol):
    """Hears what an engine does; called on the asyncio loop, in order."""

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        """A step produced these tokens for this front end; one payload a span."""

    def on_view(self, view: InstanceView) -> None:
        """The state of the step that begins, or between two steps."""

    def on_transfer(self, migration_id: MigrationId, event: Event) -> None:
        """StageReceived, StageFailed or CopyFailed happened."""

    def on_utility_result(self, frontend_id: FrontendId, call_id: int, payload: bytes) -> None:
        """A utility call ended."""

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        """The engine steps this migrated request of this front end, from this token on."""

    def on_failure(self, error: BaseException) -> None:
        """The engine is broken and steps no more."""


class Engine(Protocol):
    """One inference engine."""

    async def start(self) -> EngineFacts:
        """Load the model and begin to step.

        Raises:
            InstanceStartError: the engine refused; the message carries its reason.
        """

    def progress(self) -> EngineActivity:
        """Say how the engine gets on; also when it hangs this returns at once."""

    def add(
        self, frontend_id: FrontendId, payload: bytes, output_token_ids: Sequence[int] = ()
    ) -> None:
        """Queue the request that a front end sent. One that the engine refuses ends with an
        error output.

        Args:
            output_token_ids: what it has already said, on an instance that died. It goes on as
                one that was preempted: its KV is computed again, its next token is the one that
                would have followed there, and spans count from its first token on.
        """

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests whose clients have gone; unknown ones are ignored."""

    def call_utility(
        self, frontend_id: FrontendId, call_id: int, method: str, payload: bytes
    ) -> None:
        """Call a method of the engine; the result comes through the listener."""

    async def inspect(self, migration_id: MigrationId, request_id: RequestId) -> Inspected:
        """Carry out `Inspect`."""

    async def drain(self, effect: Drain) -> Drained | DrainRefused:
        """Carry out `Drain`."""

    def resume(self, request_id: RequestId) -> None:
        """Carry out `Resume`."""

    def release(self, request_id: RequestId) -> None:
        """Carry out `Release` and `AbortDrained`: free a drained request without a word."""

    def copy(self, effect: CopyBlocks) -> None:
        """Carry out `CopyBlocks`."""

    def stop_copying(self, migration_id: MigrationId) -> None:
        """Carry out `StopCopying`."""

    def forget_migration(self, migration_id: MigrationId) -> None:
        """Drop what is remembered of a migration that has ended on this side."""

    def set_terminating(self, is_terminating: bool) -> None:
        """Have views say that the instance is being emptied."""

    async def reserve(self, effect: ReserveBlocks) -> BlocksReserved | ReserveFailed:
        """Carry out `ReserveBlocks`."""

    async def free_reservation(self, migration_id: MigrationId) -> None:
        """Carry out `FreeReservation`; returns when the blocks are free."""

    async def adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        """Carry out `Adopt`."""

    async def close(self) -> None:
        """Stop stepping and give everything back."""
