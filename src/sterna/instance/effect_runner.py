"""Carries out the effects of a llumlet on a real engine, and brings their outcomes back.

Effects of one migration are carried out one after the other: the next one begins when the
outcome of the last has been delivered. Effects of different migrations do not wait for each
other.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import assert_never

from sterna.engine.interface import Engine
from sterna.messages.actors import MigrationMessage
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    CopyBlocks,
    Drain,
    Effect,
    Ended,
    Event,
    FreeReservation,
    Inspect,
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
    """Runs the effects of all migrations of one instance.

    Args:
        send: sends a migration message to a peer's llumlet.
        on_outcome: is given every outcome.
        on_failure: is told of an error in an effect, which is a bug.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        engine: Engine,
        *,
        send: Callable[[InstanceId, MigrationMessage], None],
        on_outcome: Callable[[MigrationId, Event], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._instance_id = instance_id
        self._engine = engine
        self._send = send
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self._waiting: dict[MigrationId, deque[Effect]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, effect: Effect) -> None:
        """Carry the effect out, after all earlier ones of its migration."""
        migration_id = _migration_id(effect)
        waiting = None if migration_id is None else self._waiting.get(migration_id)
        if waiting is not None:
            waiting.append(effect)
            return
        outcome = self._begin(effect)
        if outcome is not None and migration_id is not None:
            self._waiting[migration_id] = deque()
            task = asyncio.create_task(self._finish(migration_id, effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, migration_id: MigrationId, effect: Effect) -> None:
        """Await the effect's outcome, then carry out what has been waiting behind it."""
        waiting = self._waiting[migration_id]
        try:
            self._on_outcome(migration_id, await self._outcome(effect))
            while waiting:
                effect = waiting.popleft()
                if self._begin(effect) is not None:
                    self._on_outcome(migration_id, await self._outcome(effect))
        except Exception as error:
            logger.exception("effect failed migration=%s effect=%s", migration_id, type(effect))
            self._on_failure(error)
        finally:
            del self._waiting[migration_id]

    def _begin(self, effect: Effect) -> Effect | None:
        """Carry out an effect without an outcome; return one that has an outcome to await."""
        match effect:
            case Send(peer, message):
                self._send(peer, MigrationMessage(self._instance_id, message))
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
                return effect
            case _:
                assert_never(effect)
        return None

    async def _outcome(self, effect: Effect) -> Event:
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
            case _:
                raise AssertionError(f"{effect} has no outcome")

    async def close(self) -> None:
        """Drop everything that is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _migration_id(effect: Effect) -> MigrationId | None:
    if isinstance(effect, Send):
        return effect.message.migration_id
    if isinstance(effect, AbortRequest):
        return None
    return effect.migration_id
