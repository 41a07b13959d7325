"""Instances that count the bytes of the migrations that come to them.

The counts are those of the data planes: a stage of several ranks has all bytes that come from the
source.
"""

import asyncio
from typing import Any

from bench.migration.timed_instance import TimedInstanceHost
from sterna.engine.interface import EngineFacts
from sterna.runtime.actors.actor_classes import InstanceSpec, remote_class


class _CountingInstance(TimedInstanceHost):
    """One instance, and the bytes of each stage that it has received since the last question."""

    async def start(self, spec: InstanceSpec) -> tuple[str, EngineFacts]:
        """See `_InstanceActor.start`."""
        from sterna.transport.data_plane import Arrived

        started = await super().start(spec)
        self._stage_bytes: dict[str, dict[int, int]] = {}
        transfers: Any = self._engine._transfers
        on_notice = transfers._on_notice

        def count(notice: Any) -> None:
            match notice.event:
                case Arrived(transfer, copy_bytes=copy_bytes) if transfer.hop is None:
                    stages = self._stage_bytes.setdefault(transfer.migration_id, {})
                    stages[transfer.stage] = stages.get(transfer.stage, 0) + copy_bytes
            on_notice(notice)

        transfers._on_notice = count
        return started

    async def take_stage_bytes(self) -> list[dict[int, int]]:
        """Return, of each migration since the last call, the bytes of its stages by number."""
        taken, self._stage_bytes = self._stage_bytes, {}
        return list(taken.values())

    async def kv_groups(self) -> list[str]:
        """Return vLLM's name for the kind of each KV cache group, in order."""
        config = self._engine._core.scheduler.kv_cache_config
        return [_kind_of(group.kv_cache_spec) for group in config.kv_cache_groups]

    async def immovable_feature(self, request_id: str) -> str | None:
        """Return the name of the feature for which this request cannot move; None when it can."""
        from sterna.engine.vllm.support import (
            ends_thinking_by_phrase,
            immovable_request_feature,
        )

        def look(core: Any) -> str | None:
            scheduler = core.scheduler
            ends_by_phrase = ends_thinking_by_phrase(scheduler.vllm_config)
            request = scheduler.requests[request_id]
            return immovable_request_feature(request, ends_by_phrase=ends_by_phrase)

        return await asyncio.wrap_future(self._engine._thread.call(look))

    @property
    def _engine(self) -> Any:
        """The real engine, of which an interface would not show enough."""
        return self._instance._engine


def _kind_of(spec: Any) -> str:
    # Layers of one kind and several page sizes have a spec each.
    specs = getattr(spec, "kv_cache_specs", {"all": spec})
    return type(next(iter(specs.values()))).__name__


CountingInstance = remote_class(_CountingInstance)
