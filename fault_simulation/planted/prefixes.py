"""Mistakes in what instances report of their prefix caches, and in what is made of it."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from fault_simulation.engine.block_pool import Block, Content
from fault_simulation.engine.engine import SimulatedEngine
from fault_simulation.engine.kv_cache import KvCache
from sterna.engine.cache_changes import CacheChanges
from sterna.engine.kv_columns import Held
from sterna.instance.cache_contents import CacheContents
from sterna.instance.core import InstanceCore, InstanceEffect
from sterna.instance.llumlet import LlumletEffect
from sterna.migration.messages import Adopt, Ended, Release
from sterna.scheduler.core import SchedulerCore
from sterna.scheduler.prefix_index import PrefixIndex
from sterna.types import CacheLayout, InstanceId, RequestId, whose_prefix


class _OwesNothing(CacheContents):
    def owe_all(self) -> None:
        pass


class ReportsEverythingOnce(InstanceCore):
    """Reports to another scheduler what has changed since its last report to the first."""

    def report_cache(self, layout: CacheLayout) -> None:
        self._cache = _OwesNothing(self._instance_id, layout)


class ReportsNoEviction(InstanceCore):
    """Does not report what its prefix cache has lost."""

    def on_cache(self, changes: CacheChanges) -> None:
        super().on_cache(replace(changes, removed=()))


class _EntersInSilence(KvCache):
    def adopt(
        self, held: Held[Block], request_id: RequestId, num_valid_tokens: int, num_tokens: int
    ) -> int:
        recorder, self.pool.recorder = self.pool.recorder, None
        num_held = super().adopt(held, request_id, num_valid_tokens, num_tokens)
        self.pool.recorder = recorder
        return num_held


class ReportsNothingAdopted(SimulatedEngine):
    """Does not report what entered the prefix cache with a request that moved there."""

    cache_type = _EntersInSilence


class _RemembersTheDead(PrefixIndex):
    def on_instance_left(self, instance_id: InstanceId) -> None:
        pass


class RemembersTheDead(SchedulerCore):
    """Does not forget the prefix cache of an instance that has left."""

    def _new_index(self) -> PrefixIndex:
        return _RemembersTheDead()


class EntersPrefixesUnderOtherKeys(SimulatedEngine):
    """Enters a copied prefix into the cache one block off."""

    def _enter_prefix(self, effect: Adopt) -> None:
        contents = msgspec.msgpack.decode(effect.state, type=list[Content])
        self.core.enter_prefix(effect.migration_id, [*contents[1:], *contents[:1]])


class KeepsAbortedPrefixes(InstanceCore):
    """Does not free the blocks of a prefix whose migration was given up."""

    def _on_llumlet(self, effects: Iterable[LlumletEffect], now_s: float) -> list[InstanceEffect]:
        wanted = [*effects]
        is_aborted = any(isinstance(each, Ended) and each.aborted is not None for each in wanted)
        return super()._on_llumlet(
            [
                each
                for each in wanted
                if not (
                    is_aborted
                    and isinstance(each, Release)
                    and whose_prefix(each.request_id) is not None
                )
            ],
            now_s,
        )
