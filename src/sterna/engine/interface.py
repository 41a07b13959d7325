"""Interface of an engine, real or emulated, for the shell of its instance.

An engine steps its requests on a thread (or clock) of its own. Methods that change the set of
requests, or their states, take effect between two steps, in the order of the calls; none blocks the
caller's asyncio loop. Outputs, views and the outcomes of transfers go to the `EngineListener`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from sterna.engine.cache_changes import CacheChanges
from sterna.engine.kv_memory import KvMemory
from sterna.messages.actors import TokenSpan
from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    CopyBlocks,
    CopyEvent,
    Drain,
    Drained,
    DrainRefused,
    Inspected,
    KeepPrefix,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.types import CacheLayout, FrontendId, InstanceView, MigrationId, RequestId


class PromptHashing(msgspec.Struct, frozen=True, array_like=True):
    """How a front end hashes prompts, so that the hashes are those of the engines' prefix caches.

    Attributes:
        algorithm: vLLM's `--prefix-caching-hash-algo`; None for emulated engines.
        hash_tokens: tokens that have one hash.
    """

    algorithm: str | None
    hash_tokens: int


class EngineReady(msgspec.Struct, frozen=True, array_like=True):
    """What a front end needs to know of the engines.

    Attributes:
        response: vLLM's EngineCoreReadyResponse, in msgpack: the first message that its engine
            client expects.
        memory: the memory that requests need.
        hashing: None if the engines do not report their prefix caches.
    """

    response: bytes
    memory: KvMemory
    hashing: PromptHashing | None = None

    def encode(self) -> bytes:
        """Return it as it travels to front ends."""
        return msgspec.msgpack.encode(self)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine that is ready.

    Attributes:
        total_tokens: M, memory usable by requests, in tokens.
        ready: an encoded `EngineReady`.
        kv_format: equal for engines that can exchange KV blocks while their weights are not
            updated: with equal weights, layout and precision. Between other engines requests move
            without their KV cache.
        immovable_features: names of engine features whose state cannot move; with any of them the
            engine serves without migration.
        cache_layout: how to look prompts up among the keys of `EngineListener.on_cache`; None if
            the engine does not report its prefix cache.
    """

    total_tokens: int
    ready: bytes
    kv_format: str
    immovable_features: tuple[str, ...] = ()
    cache_layout: CacheLayout | None = None


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """An engine's activity, by which a hang is detected, and the updates of its weights.

    Attributes:
        num_ended: steps, and commands between two steps, that have ended since the start.
        is_busy: whether one is under way that should end soon. A command of an operator does not
            count: it may take any time.
        weight_updates: equal for engines whose weights were updated alike since their start; ""
            without any update.
    """

    num_ended: int
    is_busy: bool
    weight_updates: str = ""


class EngineListener(Protocol):
    """Receives the events of an engine, on the asyncio loop and in order."""

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        """A step produced these tokens for this front end; one payload for each span."""

    def on_view(self, view: InstanceView) -> None:
        """The state at the beginning of a step, or between two steps."""

    def on_cache(self, changes: CacheChanges) -> None:
        """The contents of the prefix cache have changed; comes before the view of that time."""

    def on_transfer(self, migration_id: MigrationId, event: CopyEvent) -> None:
        """An event of a stage's copy."""

    def on_sent(self, num_bytes: int) -> None:
        """These bytes of a KV cache have been sent to another instance."""

    def on_utility_result(self, frontend_id: FrontendId, call_id: int, payload: bytes) -> None:
        """A utility call ended."""

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        """The engine steps this migrated request of this front end, from this token on."""

    def on_failure(self, error: BaseException) -> None:
        """The engine has failed and will not step again."""


class Engine(Protocol):
    """One inference engine."""

    async def start(self) -> EngineFacts:
        """Load the model and begin to step.

        Raises:
            InstanceStartError: the engine refused; the message carries its reason.
        """

    def activity(self) -> EngineActivity:
        """Return the engine's activity, at once even if the engine hangs."""

    def add(
        self, frontend_id: FrontendId, payload: bytes, output_token_ids: Sequence[int] = ()
    ) -> None:
        """Queue the request that a front end sent. If the engine refuses it, it ends with an error
        output.

        Args:
            output_token_ids: its output tokens so far, from an instance that died. It goes on like
                a preempted request: its KV cache is computed again, its next token is the one that
                would have followed there, and spans count from its first output token.
        """

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests whose clients have gone; unknown ones are ignored."""

    def call_utility(
        self, frontend_id: FrontendId, call_id: int, method: str, payload: bytes, place: int
    ) -> None:
        """Call a method of the engine; the result comes through the listener.

        Args:
            place: position of the engine among those that get the call, from 0.
        """

    def keep_prefix(self, effect: KeepPrefix) -> None:
        """Carry out `KeepPrefix`. The other effects of migrations then take the prefix's id."""

    async def inspect(self, migration_id: MigrationId, request_id: RequestId) -> Inspected:
        """Carry out `Inspect`."""

    async def drain(self, effect: Drain) -> Drained | DrainRefused:
        """Carry out `Drain`."""

    def resume(self, request_id: RequestId) -> None:
        """Carry out `Resume`."""

    def release(self, request_id: RequestId) -> None:
        """Carry out `Release` and `AbortDrained`: free a drained request without an output."""

    def copy(self, effect: CopyBlocks) -> None:
        """Carry out `CopyBlocks`."""

    def stop_copying(self, migration_id: MigrationId) -> None:
        """Carry out `StopCopying`."""

    def forget_migration(self, migration_id: MigrationId) -> None:
        """Drop the records of a migration that has ended on this side."""

    def set_terminating(self, is_terminating: bool) -> None:
        """Set `is_terminating` of all further views."""

    async def reserve(self, effect: ReserveBlocks) -> BlocksReserved | ReserveFailed:
        """Carry out `ReserveBlocks`."""

    async def free_reservation(self, migration_id: MigrationId) -> None:
        """Carry out `FreeReservation`; returns when the blocks are free."""

    async def adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        """Carry out `Adopt`."""

    async def close(self) -> None:
        """Stop stepping and release all resources."""
