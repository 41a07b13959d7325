"""Copies between the cache and staging buffers; those with a CUDA cache run on a CUDA device."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sterna.transport import sender
from sterna.transport.data_plane import Hop, Sent, Stopped
from sterna.transport.memory import staging
from sterna.transport.memory.chunks import Tile
from sterna.transport.memory.layout import KvCache
from sterna.transport.memory.staging import CpuCopier, make_buffer, make_copier
from tests.transport.planes import KINDS, Node, stage

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Torch would use two threads for one copy, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_copiers_thread_copies_alone_and_others_keep_their_number(two_cores: None) -> None:
    node = Node("tcp")
    inside: list[int] = []

    def copy() -> None:
        make_copier(node.cache, 1 << 20)
        inside.append(torch.get_num_threads())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    seen_later: list[int] = []
    later = threading.Thread(target=lambda: seen_later.append(torch.get_num_threads()))
    later.start()
    later.join()
    node.plane.close()
    assert (inside, seen_later, torch.get_num_threads()) == ([1], [2], 2)


def test_only_the_last_stage_of_a_marked_migration_waits_for_the_marked_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, destination = Node("tcp"), Node("tcp")
    fences = itertools.count()
    monkeypatch.setattr(source.cache, "fence", lambda: next(fences))
    waited: list[object] = []

    def copier(cache: KvCache, num_bytes: int) -> CpuCopier:
        made = CpuCopier(cache)
        gather = made.gather

        def watched(tile: Tile, ids: torch.Tensor, buffer: torch.Tensor, fence: Any) -> None:
            waited.append(fence)
            gather(tile, ids, buffer, fence)

        monkeypatch.setattr(made, "gather", watched)
        return made

    monkeypatch.setattr(sender, "make_copier", copier)
    source.plane.mark_steps(stage("m").migration_id)  # 0
    source.plane.mark_steps(stage("stopped").migration_id)  # 1
    source.plane.stop(stage("stopped").migration_id)
    assert isinstance(source.next_event(), Stopped)
    stages = (("m", 0, True), ("m", 1, False), ("m", 2, False), ("stopped", 0, False))
    for name, number, is_paced in stages:
        destination.receive(stage(name, number), [0])
        source.send(stage(name, number), destination, [4], is_paced=is_paced)
        assert isinstance(source.next_event(), Sent)
        destination.next_event()
    assert waited == [2, 0, 3, 4]
    source.plane.close()
    destination.plane.close()


def test_a_hop_waits_for_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead's copy of the stage has waited for those that might have written to its blocks."""
    lead, other = Node("tcp"), Node("tcp")
    fences: list[str] = []
    monkeypatch.setattr(lead.cache, "fence", lambda: fences.append("taken"))
    hop = replace(stage("m"), hop=Hop(0, 1))
    for is_paced in (False, True):
        other.receive(hop, [0])
        lead.send(hop, other, [4], is_paced=is_paced)
        assert isinstance(lead.next_event(), Sent)
        other.next_event()
    assert fences == []
    lead.plane.close()
    other.plane.close()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_travel_between_caches_on_a_cuda_device(kind: str) -> None:
    """Section 5: "Using Gloo needs to copy the KV cache between CPU and GPU memory, which is done
    in another CUDA stream to avoid blocking the inference computation." """
    source = Node(kind, device="cuda", page_bytes=4096)
    destination = Node(kind, device="cuda", page_bytes=4096, seed=1)
    source.copy(stage("m"), destination, [0, 5, 9, 2, 11], [7, 1, 3, 4, 20])
    assert torch.equal(destination.blocks([7, 1, 3, 4, 20]), source.blocks([0, 5, 9, 2, 11]))
    source.plane.close()
    destination.plane.close()


@pytest.mark.cuda
@needs_cuda
def test_a_gather_waits_for_the_steps_queued_before_the_send() -> None:
    source = Node("tcp", device="cuda", page_bytes=4096)
    destination = Node("tcp", page_bytes=4096)
    destination.receive(stage("m"), [0, 1])
    torch.cuda._sleep(200_000_000)
    source.kv.fill_(77)
    source.send(stage("m"), destination, [4, 5])
    destination.next_event()
    assert bool((destination.kv[:, :2] == 77).all())
    source.plane.close()
    destination.plane.close()


@pytest.mark.cuda
@needs_cuda
def test_a_gather_of_marked_steps_waits_for_no_later_ones() -> None:
    source = Node("tcp", device="cuda", page_bytes=4096)
    destination = Node("tcp", page_bytes=4096)
    # Else the first copy's kernels might be loaded, and memory be page-locked, behind the sleep.
    source.copy(stage("warm"), destination, [4, 5], [0, 1])
    source.kv.fill_(77)
    source.plane.mark_steps(stage("m").migration_id)
    torch.cuda._sleep(4_000_000_000)
    later = torch.cuda.Event()
    later.record()
    source.copy(stage("m"), destination, [4, 5], [0, 1])
    assert not later.query()
    assert bool((destination.kv[:, :2] == 77).all())
    source.plane.close()
    destination.plane.close()


@pytest.mark.cuda
@needs_cuda
def test_a_scatter_waits_for_the_steps_queued_before_the_receive() -> None:
    """A step still under way may write into a block that was freed and then reserved."""
    source = Node("tcp", page_bytes=4096)
    destination = Node("tcp", device="cuda", page_bytes=4096)
    torch.cuda._sleep(200_000_000)
    destination.kv.fill_(77)
    destination.receive(stage("m"), [0, 1])
    source.send(stage("m"), destination, [4, 5])
    destination.next_event()
    assert torch.equal(destination.blocks([0, 1]).cpu(), source.blocks([4, 5]))
    source.plane.close()
    destination.plane.close()


def test_a_thread_that_copies_uses_the_gpu_of_its_cache_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several ranks it would make a context on the first one, for which no memory is left."""
    calls: list[object] = []
    cache = SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(staging, "CudaCopier", lambda *_: calls.append("copier"))
    make_copier(cache, 1 << 20)  # type: ignore[arg-type]
    assert calls == [cache.device, "copier"]


@pytest.mark.cuda
@needs_cuda
def test_a_cuda_copier_moves_a_tile_there_and_back_beside_the_compute_stream() -> None:
    node = Node("tcp", device="cuda", page_bytes=4096)
    tile, ids = Tile(1, 2, 1, 2), torch.tensor([9, 3, 8])
    copier = make_copier(node.cache, 1 << 20)
    buffer = make_buffer(2 * 2 * 4096, node.layout.device)
    assert buffer.is_pinned()
    before = node.kv.clone()
    copier.gather(tile, ids, buffer, node.cache.fence())
    assert torch.equal(buffer.view(torch.int8).view(2, 2, 4096), before[1:, [3, 8]].cpu())
    node.kv.zero_()
    copier.scatter(tile, ids, buffer, node.cache.fence())
    assert torch.equal(node.kv[1:, [3, 8]], before[1:, [3, 8]])
    assert int(node.kv.count_nonzero()) == int(before[1:, [3, 8]].count_nonzero())
    node.plane.close()


@pytest.mark.cuda
@needs_cuda
def test_cuda_copiers_share_what_pytorch_takes_from_the_device() -> None:
    """The engine leaves little: a segment of 20 MiB for each of them would be too much."""
    node = Node("tcp", device="cuda", page_bytes=4096)
    before = torch.cuda.memory_reserved()
    # Of a size of their own, lest they take those of copiers that have ended.
    copiers = [make_copier(node.cache, (4 << 20) + 512) for _ in range(8)]
    assert torch.cuda.memory_reserved() - before < 80 << 20
    for copier in copiers:
        copier.close()
    node.plane.close()


@pytest.mark.cuda
@needs_cuda
def test_a_cuda_copier_takes_the_stream_and_the_memory_of_one_that_has_ended() -> None:
    node = Node("tcp", device="cuda", page_bytes=4096)
    first: Any = make_copier(node.cache, 1 << 20)
    stream, fused = first._stream, first._fused
    first.close()
    second: Any = make_copier(node.cache, 1 << 20)
    assert second._stream is stream
    assert second._fused is fused
    second.close()
    node.plane.close()
