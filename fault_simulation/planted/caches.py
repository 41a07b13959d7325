"""Mistakes in the columns of KV cache groups that a migration copies, reserves and adopts.

Those of `KvCache` leave out a step of `engine.kv_columns`, which production runs as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fault_simulation.engine.block_pool import Block, Content
from fault_simulation.engine.engine import Incoming, SimulatedEngine
from fault_simulation.engine.kv_cache import KvCache
from fault_simulation.planted.migrations import WithMachines
from sterna.engine.kv_columns import Columns, Held
from sterna.migration.destination import MigrationDestination
from sterna.migration.messages import (
    CopyBlocks,
    Drain,
    Drained,
    DrainRefused,
    Effect,
    Reserve,
    ReserveBlocks,
)
from sterna.types import MigrationId, RequestId


class _KeepsThemAll(KvCache):
    def _kept(
        self, group: Any, blocks: dict[int, Block], *lengths: int
    ) -> tuple[int, dict[int, int]]:
        length, kept = super()._kept(group, blocks, *lengths)
        behind = {column: column for column in blocks if 0 <= column < length}
        return length, kept if group.has_state else {**behind, **kept}


class AdoptsWhatIsBehind(SimulatedEngine):
    """Puts every reserved block into the table, also of columns behind the window."""

    cache_type = _KeepsThemAll


class _ForgetsAGroup(KvCache):
    def blocks_of(self, tables: Any, columns: Columns, num_valid_tokens: int) -> list[list[Any]]:
        found = super().blocks_of(tables, columns, num_valid_tokens)
        return found if len(found) == 1 else [[], *found[1:]]


class CopiesNotAllGroups(SimulatedEngine):
    """Does not copy the first of several groups."""

    cache_type = _ForgetsAGroup


class _SendsStateFirst(KvCache):
    def stage_columns(
        self, first_unit: int, num_units: int, num_valid_tokens: int, *, is_last: bool
    ) -> Columns:
        lengths = (first_unit, num_units, num_valid_tokens)
        columns = super().stage_columns(*lengths, is_last=is_last)
        first = super().stage_columns(*lengths, is_last=first_unit == 0)
        return tuple(
            each if group.has_state else column
            for group, column, each in zip(self.kind.groups, columns, first, strict=True)
        )


class SendsStateFirst(SimulatedEngine):
    """Copies the state with the first stage in place of the last."""

    cache_type = _SendsStateFirst


class _CachesWhatIsBehind(KvCache):
    def adopt(
        self, held: Held[Block], request_id: RequestId, num_valid_tokens: int, num_tokens: int
    ) -> int:
        rows = self._new_rows(request_id)
        for number, group in self._numbered:
            for column, block in held[number].items():
                end = (column + 1) * group.block_size
                if self.kind.has_prefix_cache and 0 < end <= num_valid_tokens:
                    self.pool.enter(block, rows.content(number, end))
        return super().adopt(held, request_id, num_valid_tokens, num_tokens)


class CachesWhatIsBehind(SimulatedEngine):
    """Puts copied blocks that a window has left behind into the prefix cache, and frees them."""

    cache_type = _CachesWhatIsBehind


class _LeavesNoUnit(KvCache):
    def num_full_units(self, num_valid_tokens: int) -> int:
        return num_valid_tokens // self.unit_tokens


class LeavesNoUnitForTheState(SimulatedEngine):
    """Copies all full units before the last stage, also where the state is to travel with one."""

    cache_type = _LeavesNoUnit


class _LeaksWhatIsBehind(KvCache):
    def take_tables(self, held: Held[Block], *lengths: int) -> list[list[Block]]:
        tables = super().take_tables(held, *lengths)
        for blocks in held:
            blocks.clear()
        return tables


class LeaksWhatIsBehind(SimulatedEngine):
    """Forgets the reserved blocks that the adopted request does not look at."""

    cache_type = _LeaksWhatIsBehind


class FindsColumnsByThePresent(SimulatedEngine):
    """Finds the columns of a stage by the length at the copy, and not by that of the plan."""

    def leaving_blocks(self, effect: CopyBlocks) -> list[list[Block]]:
        num_valid_tokens = self.leaving[effect.migration_id].num_valid_tokens
        return super().leaving_blocks(replace(effect, num_valid_tokens=num_valid_tokens))


class SendsTheBlocksOfThePlan(SimulatedEngine):
    """Copies with the last stage what the tables had when that was planned."""

    def _drain(self, effect: Drain) -> Drained | DrainRefused:
        leaving = self.leaving.get(effect.migration_id)
        outcome = super()._drain(effect)
        if leaving is not None:
            self.leaving[effect.migration_id] = leaving
        return outcome


class WritesToWhatIsFreed(SimulatedEngine):
    """Lets a stage be written after its reservation was freed, or adopted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ever_expected: dict[tuple[MigrationId, int], Incoming] = {}

    def _expect(self, effect: ReserveBlocks) -> tuple[str, ...]:
        receivers = super()._expect(effect)
        prepared = self.prepared.get(effect.migration_id)
        if prepared is not None and effect.stage in prepared.incoming:
            key = effect.migration_id, effect.stage
            self._ever_expected[key] = prepared.incoming[effect.stage]
        return receivers

    def expected(self, effect: CopyBlocks) -> Incoming | None:
        return self._ever_expected.get((effect.migration_id, effect.stage))

    def receive(self, effect: CopyBlocks, contents: Sequence[Sequence[Content | None]]) -> None:
        if super().expected(effect) is not None:
            super().receive(effect, contents)
        else:
            self.write(self._ever_expected[effect.migration_id, effect.stage], contents)


class _ForgetsTheLength(MigrationDestination):
    def _reserve(self, reserve: Reserve) -> list[Effect]:
        return [
            replace(effect, num_valid_tokens=0) if isinstance(effect, ReserveBlocks) else effect
            for effect in super()._reserve(reserve)
        ]


class ForgetsTheLength(WithMachines):
    """Reserves the columns of a stage without the length at its plan."""

    destination = _ForgetsTheLength
