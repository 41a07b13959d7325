"""Caches, planes over them, and what their owners hear, for tests."""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from sterna.config import TransportConfig
from sterna.transport.data_plane import PlaneEvent, Transfer
from sterna.transport.memory.chunks import Tile
from sterna.transport.memory.layout import KvCache, KvLayout
from sterna.transport.plane import make_data_plane
from sterna.types import MigrationId

KINDS = ("tcp", "shm", "gloo")
WAIT_S = 60.0
"""Far beyond anything that a test expects, on a machine however busy."""
NEVER_S = 2 * WAIT_S
"""A time-out for which no test waits: what ends before it has another reason."""


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    """int8[num_bytes]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, generator=generator)


def stage(migration: str, number: int = 0) -> Transfer:
    return Transfer(MigrationId(migration), number)


class Gate:
    """Holds the threads that pass it until it is opened, one pass for each opening."""

    def __init__(self) -> None:
        self._arrivals = threading.Semaphore(0)
        self._openings = threading.Semaphore(0)

    def wait_for_arrival(self) -> None:
        assert self._arrivals.acquire(timeout=WAIT_S), "nobody came to the gate"

    def open(self, num_passes: int = 1) -> None:
        self._openings.release(num_passes)

    def pass_through(self) -> None:
        self._arrivals.release()
        assert self._openings.acquire(timeout=WAIT_S), "the gate was never opened"


class WatchedLayout(KvLayout):
    """A layout that notes each chunk, before which it may be held at a gate."""

    gather_gate: Gate | None = None
    scatter_gate: Gate | None = None

    def watch(self) -> None:
        self.gathered: list[list[int]] = []
        self.gather_times: list[tuple[float, float]] = []
        self.scattered: list[list[int]] = []
        self.first_scatter = threading.Event()

    def gather(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        self.gathered.append(_ids(tile, block_ids))
        if self.gather_gate is not None:
            self.gather_gate.pass_through()
        begun_s = time.monotonic()
        super().gather(tile, block_ids, buffer)
        self.gather_times.append((begun_s, time.monotonic()))

    def scatter(self, tile: Tile, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        self.scattered.append(_ids(tile, block_ids))
        self.first_scatter.set()
        if self.scatter_gate is not None:
            self.scatter_gate.pass_through()
        super().scatter(tile, block_ids, buffer)


def _ids(tile: Tile, block_ids: torch.Tensor) -> list[int]:
    ids: list[int] = block_ids[tile.first_block : tile.first_block + tile.num_blocks].tolist()
    return ids


class Node:
    """An instance reduced to its cache and its data plane."""

    def __init__(
        self,
        kind: str,
        *,
        num_layers: int = 3,
        num_blocks: int = 24,
        page_bytes: int = 64,
        seed: int = 0,
        label: str = "",
        device: str = "cpu",
        **config: Any,
    ) -> None:
        storage = random_bytes(num_layers * num_blocks * page_bytes, seed).to(device)
        # kv: int8[num_layers, num_blocks, page_bytes]
        self.kv = storage.view(num_layers, num_blocks, page_bytes)
        layout = WatchedLayout.from_strided(
            storage,
            0,
            num_layers,
            num_blocks * page_bytes,
            num_blocks,
            page_bytes,
            page_bytes,
        )
        self.layout = layout
        self.layout.watch()
        self.cache = KvCache([layout], label=label)
        self._events: queue.SimpleQueue[PlaneEvent] = queue.SimpleQueue()
        # Two blocks a chunk unless told otherwise, so that small caches make many chunks.
        timeouts = {"timeout_s": NEVER_S, "begin_timeout_s": NEVER_S}
        config = {"chunk_bytes": 2 * num_layers * page_bytes} | timeouts | config
        self.plane = make_data_plane(
            TransportConfig(kind=kind, **config), self.cache, self._events.put
        )

    def next_event(self) -> PlaneEvent:
        return self._events.get(timeout=WAIT_S)

    def next_events(self, count: int) -> list[PlaneEvent]:
        return [self.next_event() for _ in range(count)]

    def has_events(self) -> bool:
        return not self._events.empty()

    def blocks(self, ids: Sequence[int]) -> torch.Tensor:
        """A copy of the blocks: int8[num_layers, len(ids), page_bytes]."""
        return self.kv[:, list(ids)].clone()

    def send(
        self,
        transfer: Transfer,
        destination: "Node",
        ids: Sequence[int],
        *,
        is_paced: bool = False,
    ) -> None:
        self.plane.send(transfer, destination.plane.endpoint, [ids], is_paced=is_paced)

    def receive(self, transfer: Transfer, ids: Sequence[int]) -> None:
        self.plane.receive(transfer, [ids], lambda: None)

    def copy(self, transfer: Transfer, destination: "Node", ids: list[int], to: list[int]) -> None:
        """A whole transfer, awaited and asserted on both sides."""
        destination.receive(transfer, to)
        self.send(transfer, destination, ids)
        arrived, sent = destination.next_event(), self.next_event()
        assert (type(arrived).__name__, type(sent).__name__) == ("Arrived", "Sent"), (arrived, sent)
