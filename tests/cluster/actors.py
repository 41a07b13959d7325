"""The production instance actor, with windows to look through and handles for tests.

Nothing of it changes how an instance works until a test asks for it: a hold stops a migration
at a named effect, a pause stops the engine at a request's token, a defect leaves one part of a
request's state out of migrations.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sterna.instance.effect_runner import EffectRunner
from sterna.migration.effect_queue import migration_of
from sterna.migration.messages import Effect, Send
from sterna.runtime.actors.actor_classes import _InstanceActor, remote_class
from sterna.types import MigrationId


def point_of(effect: Effect) -> str:
    """Name the place in a migration that the effect marks: "CopyBlocks", "Commit", ..., with
    " last" behind it where it belongs to a last stage."""
    named = effect.message if isinstance(effect, Send) else effect
    return type(named).__name__ + (" last" if getattr(named, "is_last", False) else "")


class HoldingEffectRunner(EffectRunner):
    """Stops migrations where a test wants it.

    Effects of a migration that is held wait in order, behind the one at which it was stopped;
    other migrations go on.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._point: str | None = None
        self._held: dict[MigrationId, list[Effect]] = {}
        self._changed = asyncio.Condition()
        self._notes: set[asyncio.Task[None]] = set()

    def run(self, effect: Effect) -> None:
        migration_id = migration_of(effect)
        if migration_id in self._held:
            self._held[migration_id].append(effect)
        elif migration_id is not None and point_of(effect) == self._point:
            self._held[migration_id] = [effect]
            note = asyncio.create_task(self._note())
            self._notes.add(note)
            note.add_done_callback(self._notes.discard)
        else:
            super().run(effect)

    def hold(self, point: str) -> None:
        """Stop every migration that comes to this point from here on."""
        self._point = point

    async def until_held(self, num_migrations: int) -> None:
        """Wait until so many migrations are stopped."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._held) >= num_migrations)

    def let_go(self) -> None:
        """Stop no more, and let go on what was stopped."""
        self._point = None
        held, self._held = self._held, {}
        for effects in held.values():
            for effect in effects:
                super().run(effect)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _ProbedInstance(_InstanceActor):
    """One instance under a test's eyes."""

    async def start(self, *args: Any) -> Any:
        from sterna.engine.vllm import step_thread
        from sterna.instance import shell

        vars(shell)["EffectRunner"] = HoldingEffectRunner
        self._pauses: dict[str, int] = {}
        vars(step_thread)["_has_work"] = self._pausing(step_thread._has_work)
        self._undo: Callable[[], None] | None = None
        return await super().start(*args)

    # ------------------------------------------------------------------------------- pauses

    def _pausing(self, has_work: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def is_to_step(core: Any) -> bool:
            is_paused = self._pauses and any(
                request.num_output_tokens >= self._pauses.get(request.request_id, sys.maxsize)
                for request in core.scheduler.running
            )
            return not is_paused and has_work(core)

        return is_to_step

    async def pause_at(self, request_id: str, num_tokens: int) -> None:
        """Make no step while the request is in the batch with so many tokens or more, that is,
        until it is drained; commands are carried out as ever."""
        self._pauses[request_id] = num_tokens

    async def unpause(self, request_id: str | None = None) -> None:
        """Step the request again, or all."""
        if request_id is None:
            self._pauses.clear()
        else:
            self._pauses.pop(request_id, None)
        # The step thread looks again after each command.
        engine: Any = self._instance._engine
        await asyncio.wrap_future(engine._thread.call(lambda core: None))

    # ------------------------------------------------------------------------------- holds

    @property
    def _effects(self) -> HoldingEffectRunner:
        effects = self._instance._effects
        assert isinstance(effects, HoldingEffectRunner)
        return effects

    async def hold(self, point: str) -> None:
        self._effects.hold(point)

    async def until_held(self, num_migrations: int) -> None:
        await self._effects.until_held(num_migrations)

    async def let_go(self) -> None:
        self._effects.let_go()

    # -------------------------------------------------------------------------- inventories

    async def cached_tokens(self, payload: bytes) -> int:
        """Return the tokens of a request that the prefix cache has."""
        from sterna.engine.vllm.payload import decode_request

        engine: Any = self._instance._engine

        def look(core: Any) -> int:
            request, _ = core.preprocess_add_request(decode_request(payload))
            return int(core.scheduler._num_cached_tokens(request))

        return int(await engine._call(look))

    async def inventory(self) -> dict[str, int]:
        """Count everything that the instance holds for requests and migrations.

        An instance without requests has again what it had when it was fresh.
        """
        instance = self._instance
        engine: Any = instance._engine

        def look(core: Any) -> dict[str, int]:
            scheduler = core.scheduler
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            return {
                "free blocks": scheduler._pool.get_num_free_blocks(),
                "requests": len(scheduler.requests),
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
                "deferred": len(scheduler.deferred_waiting),
                "drained": len(scheduler._drained),
                "reservations": len(scheduler._reservations),
                "kept prefixes": len(scheduler.prefixes._kept),
                "free slots": scheduler.max_num_active_reqs,
                "requests with blocks": sum(len(m.req_to_blocks) for m in managers),
                "requests with cached blocks": sum(len(m.num_cached_block) for m in managers),
                "wire requests": len(engine._sent_requests),
                "delivered counts": len(engine._num_delivered),
                "waiting drains": len(engine._waiting_drains),
            }

        counts: dict[str, int] = await asyncio.wrap_future(engine._thread.call(look))
        decisions = instance._core
        coordinator = decisions._llumlet._coordinator
        transfers = engine._transfers
        return counts | {
            "prepared requests": len(engine._prepared),
            "block lists": len(engine._leaving),
            "armed transfers": len(transfers._armed),
            "arriving transfers": len(transfers._arriving),
            "stopping migrations": len(transfers._stopping),
            "outgoing machines": len(coordinator._sources),
            "incoming machines": len(coordinator._destinations),
            "migrations with effects": len(instance._effects._queue),
            "requests of front ends": len(decisions._requests),
            "orders": len(decisions._orders),
            "drain times": len(decisions._drained_s),
        }

    async def hops(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ranks to which a source sends, and the hops among its ranks."""
        shards = self._instance._engine._transfers._shards
        return shards.leads, shards.hops

    # ------------------------------------------------------------------------------ defects

    async def leave_out(self, part: str) -> None:
        """Leave a part of the state out of every migration that comes here: "kv", "group N" (the
        pages of one KV cache group), "generator" or "history"."""
        from sterna.engine.vllm import request_state
        from sterna.engine.vllm.request_state import RequestState, worker_state
        from sterna.transport.memory.layout import KvCache, KvLayout

        await self.repair()
        if part == "kv":
            scatter = KvLayout.scatter
            KvLayout.scatter = lambda self, tile, block_ids, buffer: None  # type: ignore[method-assign]
            self._undo = lambda: setattr(KvLayout, "scatter", scatter)
        elif part.startswith("group "):
            group, scatter_any = int(part.removeprefix("group ")), KvCache.scatter

            def scatter_others(cache: KvCache, tile: Any, *args: Any) -> None:
                if tile.group != group:
                    scatter_any(cache, tile, *args)

            KvCache.scatter = scatter_others  # type: ignore[method-assign]
            self._undo = lambda: setattr(KvCache, "scatter", scatter_any)
        elif part == "generator":
            decode = RequestState.decode

            def without_generator(state: bytes) -> RequestState:
                whole = decode(state)
                return RequestState(
                    whole.output_token_ids, whole.num_valid_tokens, whole.num_preemptions
                )

            RequestState.decode = staticmethod(without_generator)  # type: ignore[method-assign]
            self._undo = lambda: setattr(RequestState, "decode", staticmethod(decode))
        elif part == "history":

            def without_history(*args: Any) -> Any:
                return replace(worker_state(*args), output_token_ids=[])

            vars(request_state)["worker_state"] = without_history
            self._undo = lambda: vars(request_state).update(worker_state=worker_state)
        else:
            raise ValueError(part)

    async def repair(self) -> None:
        """Undo `leave_out`."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


ProbedInstance = remote_class(_ProbedInstance)
