"""KV blocks on their way from engine to engine.

The source's memory is read when a copy is done, which is the worst moment: a source that has given
the blocks away meanwhile has sent the KV of another request.
"""

from dataclasses import dataclass
from random import Random

from fault_simulation.engine.engine import Incoming, SimulatedEngine
from fault_simulation.virtual.network import Network
from fault_simulation.virtual.settings import COPY_BLOCK_S, ENGINE
from fault_simulation.virtual.timeline import Process, Timeline
from sterna.engine.emulated.requests import EmulatedRequest
from sterna.migration.messages import CopyBlocks, CopyFailed
from sterna.types import InstanceId, MigrationId


@dataclass(slots=True, eq=False)
class _Copy:
    source: Process
    engine: SimulatedEngine
    destination: SimulatedEngine
    effect: CopyBlocks
    incoming: Incoming
    request: EmulatedRequest | None
    num_preemptions: int


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
        request = engine.request(effect.request_id)
        num_preemptions = -1 if request is None else request.num_preemptions
        copy = _Copy(source, engine, destination, effect, incoming, request, num_preemptions)
        incoming.num_copying += 1
        self._copies.append(copy)
        duration_s = COPY_BLOCK_S * effect.num_blocks * self._rng.uniform(0.5, 4.0)
        self._timeline.push(duration_s, source, "copy", lambda: self._finish(copy))

    def stop(self, source: InstanceId, migration_id: MigrationId) -> None:
        """Carry out `StopCopying`."""
        for copy in list(self._copies):
            if copy.source.name == source and copy.effect.migration_id == migration_id:
                self._drop(copy)

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
        if copy not in self._copies:
            return
        self._drop(copy)
        effect, destination = copy.effect, copy.destination
        is_there = destination.is_alive and destination.expected(effect) is copy.incoming
        is_broken = self._network.is_cut_off(copy.source.name, destination.name)
        if not is_there or is_broken or self._rng.random() < self.failure_share:
            self._fail_source(copy.source, copy.engine, effect)
            return
        destination.receive(effect, self._read(copy))

    def _read(self, copy: _Copy) -> dict[int, int]:
        """Return the number of tokens whose KV each block has; -1: that of another request."""
        effect = copy.effect
        blocks = range(effect.first_block, effect.first_block + effect.num_blocks)
        request = copy.engine.request(effect.request_id)
        is_own = (
            request is not None
            and request is copy.request
            and request.num_preemptions == copy.num_preemptions
            and request.num_blocks >= blocks.stop
        )
        if request is None or not is_own:
            return dict.fromkeys(blocks, -1)
        size = ENGINE.block_size
        return {b: max(0, min(size, request.num_computed_tokens - b * size)) for b in blocks}

    def _fail_source(self, source: Process, engine: SimulatedEngine, effect: CopyBlocks) -> None:
        failed = CopyFailed(effect.stage)
        self._timeline.push(
            self._rng.random() * 0.01,
            source,
            failed,
            lambda: engine.listener.on_transfer(effect.migration_id, failed),
        )
