"""The KV data plane alone, beside the wires that it uses.

No engine runs, so the numbers are a lower bound for the copies of a migration. Rows:

- `operation` gather, scatter: chunk by chunk between a cache with shuffled blocks and a staging
  buffer, in one thread;
- `operation` transfer: from `send` in one process to `Arrived` in another (`arrived_ms`) and to
  `Sent` in the first (`sent_ms`), paced as in bulk stages or not as in last stages. In turn with
  each one that is not paced, the same bytes go from one buffer to another (`wire_ms`, `raw_wires`);
  `wire_share` is the wire's time over the transfer's;
- `operation` connect: a first transfer of one block over a connection that must be opened.

`foreign_cores` is the number of cores that others kept busy meanwhile: above a few tenths, the
smallest numbers are uncertain.

    sterna bench data-plane [--models llama-7b] [--transports tcp shm] ...

`bench/results/data_plane.json`, with `--device cuda` `data_plane_cuda.json`, is written at the end.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.machine import ForeignLoad
from bench.common.pages import write_marked
from bench.migration import data_plane_report as report
from bench.migration import raw_wires
from sterna.config import TransportConfig
from sterna.transport.data_plane import Arrived, DataPlane, PlaneEvent, Sent, Transfer
from sterna.transport.memory.chunks import largest_chunk_bytes, plan_tiles
from sterna.transport.memory.layout import KvCache, KvLayout
from sterna.transport.memory.staging import make_buffer, make_copier
from sterna.transport.plane import make_data_plane
from sterna.types import MigrationId

NAME = "data_plane"

PAGE = results_io.ROOT / "docs" / "performance.md"

RAW_WIRES = ("tcp", "shm")
"""The transports that are compared with their wires alone."""

_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
_MEASURE_S = 1.0
_MIN_SAMPLES, _MAX_SAMPLES = 7, 200


@dataclass(frozen=True)
class Model:
    """The shape of a model's KV cache; two bytes an element."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int

    @property
    def page_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * 2

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.page_bytes


MODELS = {
    model.name: model
    for model in (
        Model("smollm2-135m", num_layers=30, num_kv_heads=3, head_size=64, block_size=32),
        Model("llama-7b", num_layers=32, num_kv_heads=32, head_size=128, block_size=16),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for name in options.models:
        model = MODELS[name]
        sizes = list(_sizes(model, options.max_tokens, device, skipped))
        for row in _measure_copies(model, sizes, options.chunk_bytes, device):
            rows.append(_show(row))
        for kind in options.transports:
            config = TransportConfig(kind=kind, chunk_bytes=options.chunk_bytes)
            for row in _measure_transfers(model, sizes, config, device):
                rows.append(_show(row))
    config_facts = {
        "chunk_bytes": options.chunk_bytes,
        "bandwidth_share": TransportConfig().bandwidth_share,
        "device": str(device),
        "processes": "source and destination on one host",
        "skipped": skipped,
    }
    folder = results_io.RESULTS if options.results is None else options.results
    name = NAME if device.type == "cpu" else f"{NAME}_cuda"
    path = results_io.write(name, config_facts, rows, folder, summary=report.summary(rows))
    print(f"wrote {path}", file=sys.stderr)
    text = report.markdown(rows)
    print(text)
    if folder == results_io.RESULTS and name == NAME:
        write_marked(PAGE, "sterna bench data-plane", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench data-plane",
        description="Time the KV data plane alone, beside the wires that it uses.",
        epilog="docs/performance.md explains what is measured.",
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--transports", nargs="+", default=["tcp", "shm", "gloo"])
    parser.add_argument("--max-tokens", type=int, default=_TOKENS[-1])
    parser.add_argument("--chunk-bytes", type=int, default=TransportConfig().chunk_bytes)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--results", type=Path, help="folder of the result file")
    return parser


def _sizes(
    model: Model, max_tokens: int, device: torch.device, skipped: list[str]
) -> Iterator[int]:
    """Numbers of blocks to measure: one, two, and those for the token counts that fit."""
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        free_bytes = psutil.virtual_memory().available
    yield 1
    yield 2
    for tokens in _TOKENS:
        num_blocks = tokens // model.block_size
        # A cache in each process, and the same amount for others.
        if tokens <= max_tokens and 3 * num_blocks * model.block_bytes < free_bytes:
            yield num_blocks
        else:
            skipped.append(f"{model.name}: {tokens} tokens")


def _make_cache(model: Model, num_blocks: int, device: torch.device) -> KvCache:
    """A cache in vLLM's CPU layout: one storage, layer by layer."""
    page = model.page_bytes
    storage = torch.empty(num_blocks * model.block_bytes, dtype=torch.int8, device=device)
    storage.view(torch.int64).copy_(
        torch.arange(storage.numel() // 8, dtype=torch.int64, device=device)
    )
    layout = KvLayout.from_strided(
        storage,
        offset=0,
        num_layers=model.num_layers,
        layer_stride=num_blocks * page,
        num_blocks=num_blocks,
        block_stride=page,
        page_bytes=page,
    )
    return KvCache([layout], label=model.name)


def _shuffled(num_blocks: int, seed: int) -> list[int]:
    ids = list(range(num_blocks))
    random.Random(seed).shuffle(ids)
    return ids


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one cell, in seconds, and the load of other programs."""

    seconds: list[tuple[float, ...]]
    foreign_cores: float


def _measure(measure: Callable[[], tuple[float, ...]]) -> Samples:
    """Repeats the measurement for about a second, after one warm-up run."""
    measure()
    foreign = ForeignLoad()
    samples: list[tuple[float, ...]] = []
    begun_s = time.monotonic()
    while len(samples) < _MIN_SAMPLES or (
        len(samples) < _MAX_SAMPLES and time.monotonic() - begun_s < _MEASURE_S
    ):
        samples.append(measure())
    return Samples(samples, round(foreign.cores(), 2))


def _row(
    operation: str,
    model: Model,
    num_blocks: int,
    samples: Samples,
    names: tuple[str, ...],
    **facts: object,
) -> dict[str, Any]:
    copy_bytes = num_blocks * model.block_bytes
    durations = {
        name: results_io.summary([sample[index] * 1e3 for sample in samples.seconds])
        for index, name in enumerate(names)
    }
    median_s = durations[names[0]]["median"] / 1e3
    return {
        "operation": operation,
        "model": model.name,
        **facts,
        "blocks": num_blocks,
        "tokens": num_blocks * model.block_size,
        "copy_bytes": copy_bytes,
        "n": len(samples.seconds),
        **durations,
        "gb_per_s": round(copy_bytes / median_s / 1e9, 3),
        "foreign_cores": samples.foreign_cores,
    }


def _measure_copies(
    model: Model, sizes: list[int], chunk_bytes: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    cache = _make_cache(model, max(sizes), device)
    slot_bytes = largest_chunk_bytes(cache.page_bytes, chunk_bytes)
    copier = make_copier(cache, slot_bytes)
    buffer = make_buffer(slot_bytes, device)
    for operation, copy in (("gather", copier.gather), ("scatter", copier.scatter)):
        for num_blocks in sizes:
            ids = torch.tensor(_shuffled(max(sizes), num_blocks)[:num_blocks])
            tiles = [
                (tile, buffer[: tile.num_bytes(cache.page_bytes)])
                for tile in plan_tiles(cache.page_bytes, [num_blocks], chunk_bytes)
            ]

            def measure(
                copy: Callable[..., None] = copy,
                tiles: list[Any] = tiles,
                ids: torch.Tensor = ids,
            ) -> tuple[float]:
                begun_s = time.monotonic()
                for tile, staged in tiles:
                    copy(tile, ids, staged, None)
                return (time.monotonic() - begun_s,)

            yield _row(operation, model, num_blocks, _measure(measure), ("duration_ms",))


class _Source:
    """The measuring end; its peer runs in a process of its own."""

    def __init__(
        self, model: Model, num_blocks: int, config: TransportConfig, device: torch.device
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_destination, args=(theirs, model, num_blocks, config, device), daemon=True
        )
        self._process.start()
        self._cache = _make_cache(model, num_blocks, device)
        self._config = config
        self._num_blocks = num_blocks
        self._stage = 0
        self._raw: raw_wires.RawWire | None = None
        self.endpoint: str
        self.endpoint, address = self._pipe.recv()
        if address is not None:
            max_bytes = num_blocks * model.block_bytes
            self._raw = raw_wires.connect(address, max_bytes, config.chunk_bytes)
        self.open()

    def open(self) -> None:
        """Makes a plane without connections."""
        self._events: queue.SimpleQueue[PlaneEvent] = queue.SimpleQueue()
        self._plane: DataPlane = make_data_plane(self._config, self._cache, self._events.put)

    def reopen(self) -> None:
        self._plane.close()
        self.open()

    def transfer(self, num_blocks: int, *, is_paced: bool) -> tuple[float, float]:
        """Seconds until the blocks are in place at the peer, and until this end knows it."""
        self._stage += 1
        transfer = Transfer(MigrationId("bench"), self._stage)
        self._pipe.send((transfer, _shuffled(self._num_blocks, self._stage)[:num_blocks]))
        self._pipe.recv()
        ids = _shuffled(self._num_blocks, -self._stage)[:num_blocks]
        begun_s = time.monotonic()
        self._plane.send(transfer, self.endpoint, [ids], is_paced=is_paced)
        event = self._events.get()
        sent_s = time.monotonic()
        if not isinstance(event, Sent):
            sys.exit(f"a transfer failed: {event}")
        # The monotonic clock is the same in all processes of a host.
        arrived_s: float = self._pipe.recv()
        return arrived_s - begun_s, sent_s - begun_s

    def wire(self, num_bytes: int) -> float:
        """Seconds that as many bytes take without the data plane."""
        assert self._raw is not None
        begun_s = time.monotonic()
        self._raw.send(num_bytes)
        arrived_s: float = self._pipe.recv()
        return arrived_s - begun_s

    def close(self) -> None:
        self._plane.close()
        if self._raw is not None:
            self._raw.close()
        self._pipe.send(None)
        self._process.join()


def _run_destination(
    pipe: multiprocessing.connection.Connection,
    model: Model,
    num_blocks: int,
    config: TransportConfig,
    device: torch.device,
) -> None:
    def notify(event: PlaneEvent) -> None:
        arrived_s = time.monotonic()
        if isinstance(event, Arrived):
            pipe.send(arrived_s)

    plane = make_data_plane(config, _make_cache(model, num_blocks, device), notify)
    raw = None
    if config.kind in RAW_WIRES:
        raw = raw_wires.Destination(
            config.kind,
            num_blocks * model.block_bytes,
            config.chunk_bytes,
            lambda: pipe.send(time.monotonic()),
        )
    pipe.send((plane.endpoint, None if raw is None else raw.address))
    while (order := pipe.recv()) is not None:
        transfer, ids = order
        plane.receive(transfer, [ids], lambda: pipe.send("ready"))
    plane.close()
    if raw is not None:
        raw.close()


def _measure_transfers(
    model: Model, sizes: list[int], config: TransportConfig, device: torch.device
) -> Iterator[dict[str, Any]]:
    source = _Source(model, max(sizes), config, device)
    names = ("arrived_ms", "sent_ms")

    def connect() -> tuple[float, ...]:
        source.reopen()
        return source.transfer(1, is_paced=False)

    yield _row("connect", model, 1, _measure(connect), names, transport=config.kind)
    for is_paced in (False, True):
        for num_blocks in sizes:

            def measure(
                num_blocks: int = num_blocks, is_paced: bool = is_paced
            ) -> tuple[float, ...]:
                times = source.transfer(num_blocks, is_paced=is_paced)
                if is_paced or config.kind not in RAW_WIRES:
                    return times
                return (*times, source.wire(num_blocks * model.block_bytes))

            samples = _measure(measure)
            has_wire = len(samples.seconds[0]) > len(names)
            row = _row(
                "transfer",
                model,
                num_blocks,
                samples,
                (*names, "wire_ms") if has_wire else names,
                transport=config.kind,
                paced=is_paced,
            )
            if has_wire:
                row["wire_share"] = asdict(report.wire_share(samples.seconds))
            yield row
    source.close()


def _show(row: dict[str, Any]) -> dict[str, Any]:
    durations = row.get("duration_ms") or row["arrived_ms"]
    print(
        f"{row['model']:13} {row['operation']:9} {row.get('transport', '-'):5} "
        f"{'paced' if row.get('paced') else '':5} {row['tokens']:5} tokens "
        f"{durations['median']:9.3f} ms (p99 {durations['p99']:9.3f}) "
        f"{row['gb_per_s']:6.2f} GB/s n={row['n']} foreign={row['foreign_cores']}"
        + (f" wire share {row['wire_share']['median']:.2f}" if "wire_share" in row else ""),
        file=sys.stderr,
        flush=True,
    )
    return row


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
