"""KV blocks on their way from engine to engine.

The source's memory is read when a copy is done, which is the worst moment: of blocks that the
source has given away meanwhile, it has sent what is in them by then. When a source stops a copy,
what is on its way still arrives, where it is still expected.
"""

from dataclasses import dataclass
from random import Random

from fault_simulation.engine.block_pool import Block, Content
from fault_simulation.engine.engine import Incoming, SimulatedEngine
from fault_simulation.virtual.network import Network
from fault_simulation.virtual.settings import COPY_BLOCK_S
from fault_simulation.virtual.timeline import Process, Timeline
from sterna.migration.messages import CopyBlocks, CopyFailed
from sterna.types import InstanceId, MigrationId


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy under way.

    Attributes:
        on_its_way: the contents that were sent before the source stopped it; None: it goes on.
    """

    source: Process
    engine: SimulatedEngine
    destination: SimulatedEngine
    effect: CopyBlocks
    incoming: Incoming
    blocks: list[list[Block]]
    on_its_way: list[list[Content | None]] | None = None


class Copies:
    """All copies that are under way."""

    def __init__(self, timeline: Timeline, network: Network, rng: Random) -> None:
        self.failure_share = 0.0
        self._timeline = timeline
        self._network = network
        self._rng = rng
        self._engines: dict[str, SimulatedEngine] = {}
        self._copies: list[_Copy] = []

    def join(self, engine: SimulatedEngine) -> None:
        """Blocks can be sent to and from this engine."""
        self._engines[engine.name] = engine

    def begin(self, source: Process, engine: SimulatedEngine, effect: CopyBlocks) -> None:
        """Carry out `CopyBlocks`."""
        (receiver,) = effect.receivers
        destination = self._engines[receiver]
        incoming = destination.expected(effect) if destination.is_alive else None
        if incoming is None:
            self._fail_source(source, engine, effect)
            return
        blocks = engine.leaving_blocks(effect)
        copy = _Copy(source, engine, destination, effect, incoming, blocks)
        incoming.num_copying += 1
        self._copies.append(copy)
        duration_s = COPY_BLOCK_S * effect.num_blocks * self._rng.uniform(0.5, 4.0)
        self._timeline.push(duration_s, source, "copy", lambda: self._finish(copy))

    def stop(self, source: InstanceId, migration_id: MigrationId) -> None:
        """Carry out `StopCopying`."""
        for copy in list(self._copies):
            if copy.source.name == source and copy.effect.migration_id == migration_id:
                self._drop(copy)
                copy.on_its_way = _contents(copy.blocks)

    def on_death(self, process: Process) -> None:
        """The connections of a dead process break."""
        for copy in list(self._copies):
            if copy.source is process:
                self._drop(copy)
                if not self._network.is_cut_off(process.name, copy.destination.name):
                    copy.destination.fail_stage(copy.effect.migration_id, copy.incoming)
        if process.name in self._engines:
            self._engines[process.name].is_alive = False

    def _drop(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        copy.incoming.num_copying -= 1
        copy.incoming.since_s = self._timeline.now_s

    def _finish(self, copy: _Copy) -> None:
        effect, destination = copy.effect, copy.destination
        is_there = destination.is_alive and destination.expected(effect) is copy.incoming
        is_broken = self._network.is_cut_off(copy.source.name, destination.name)
        if copy.on_its_way is not None and is_there and not is_broken:
            destination.write(copy.incoming, copy.on_its_way)
        if copy not in self._copies:
            return
        self._drop(copy)
        if not is_there or is_broken or self._rng.random() < self.failure_share:
            self._fail_source(copy.source, copy.engine, effect)
            return
        destination.receive(effect, _contents(copy.blocks))

    def _fail_source(self, source: Process, engine: SimulatedEngine, effect: CopyBlocks) -> None:
        failed = CopyFailed(effect.stage)
        self._timeline.push(
            self._rng.random() * 0.01,
            source,
            failed,
            lambda: engine.listener.on_transfer(effect.migration_id, failed),
        )


def _contents(blocks: list[list[Block]]) -> list[list[Content | None]]:
    return [[each.content for each in group] for group in blocks]
