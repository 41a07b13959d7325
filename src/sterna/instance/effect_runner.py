"""Interpreter of a llumlet's effects on a real engine.

`EffectQueue` decides when each effect begins.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import assert_never

from sterna.engine.interface import Engine
from sterna.messages.actors import MigrationMessage
from sterna.migration.effect_queue import EffectQueue
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    CopyBlocks,
    Drain,
    Effect,
    EffectWithOutcome,
    Ended,
    FreeReservation,
    Inspect,
    KeepPrefix,
    Outcome,
    Release,
    ReservationFreed,
    ReserveBlocks,
    Resume,
    Send,
    StopCopying,
)
from sterna.types import InstanceId, MigrationId

logger = logging.getLogger(__name__)


class EffectRunner:
    """Carries out the effects of all migrations of one instance, and reports their outcomes.

    Args:
        send: sends a migration message to a peer's llumlet.
        on_outcome: called with every outcome.
        on_failure: called with an error in an effect, which is a bug.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        engine: Engine,
        *,
        send: Callable[[InstanceId, MigrationMessage], None],
        on_outcome: Callable[[MigrationId, Outcome], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._instance_id = instance_id
        self._engine = engine
        self._send = send
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self._queue = EffectQueue()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, effect: Effect) -> None:
        """Carry the effect out, after all earlier ones of its migration."""
        if self._queue.push(effect):
            self._begin(effect)

    def _begin(self, effect: Effect) -> None:
        match effect:
            case Send(peer, message):
                self._send(peer, MigrationMessage(self._instance_id, message))
            case KeepPrefix():
                self._engine.keep_prefix(effect)
            case CopyBlocks():
                self._engine.copy(effect)
            case StopCopying(migration_id):
                self._engine.stop_copying(migration_id)
            case Resume(_, request_id):
                self._engine.resume(request_id)
            case Release(_, request_id) | AbortDrained(_, request_id):
                self._engine.release(request_id)
            case AbortRequest(request_id):
                self._engine.abort([request_id])
            case Ended(migration_id):
                self._engine.forget_migration(migration_id)
            case Inspect() | Drain() | ReserveBlocks() | FreeReservation() | Adopt():
                task = asyncio.create_task(self._finish(effect))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                assert_never(effect)

    async def _finish(self, effect: EffectWithOutcome) -> None:
        """Await the effect's outcome, then begin the effects that waited for it."""
        migration_id = effect.migration_id
        try:
            self._on_outcome(migration_id, await self._outcome(effect))
            for each in self._queue.done(migration_id):
                self._begin(each)
        except Exception as error:
            logger.exception("effect failed migration=%s effect=%s", migration_id, type(effect))
            self._on_failure(error)

    async def _outcome(self, effect: EffectWithOutcome) -> Outcome:
        match effect:
            case Inspect(migration_id, request_id):
                return await self._engine.inspect(migration_id, request_id)
            case Drain():
                return await self._engine.drain(effect)
            case ReserveBlocks():
                return await self._engine.reserve(effect)
            case FreeReservation(migration_id):
                await self._engine.free_reservation(migration_id)
                return ReservationFreed()
            case Adopt():
                return await self._engine.adopt(effect)

    async def close(self) -> None:
        """Cancel all effects under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
