"""Staging buffers: host memory between cache and wire, and the copies to and from the cache."""

import contextlib
import ctypes
from collections import defaultdict
from typing import Protocol

import torch

from sterna.transport.memory.chunks import Tile
from sterna.transport.memory.layout import KvCache


class Copier(Protocol):
    """Copies chunks between the cache and staging buffers, for one thread of the plane."""

    def gather(
        self,
        tile: Tile,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        fence: "torch.cuda.Event | None",
    ) -> None:
        """Fuses the tile's pages into the buffer, which is filled on return.

        Args:
            block_ids: int64[num_blocks of the tile's group], on the CPU.
            buffer: uint8[the tile's bytes], on the CPU.
            fence: work that the engine must finish first (`KvLayout.fence`).
        """

    def scatter(
        self,
        tile: Tile,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        fence: "torch.cuda.Event | None",
    ) -> None:
        """Splits the buffer into the tile's pages, which are in place on return."""

    def close(self) -> None:
        """Leaves what the copier has to the next one."""


def make_copier(cache: KvCache, num_bytes: int) -> Copier:
    """A copier for the calling thread, for chunks of at most `num_bytes`."""
    if cache.device.type == "cuda":
        # Else the first `torch.cuda.stream` would leave a context, with its memory, on GPU 0.
        torch.cuda.set_device(cache.device)
        return CudaCopier(cache, num_bytes)
    _keep_to_one_core()
    return CpuCopier(cache)


class CpuCopier:
    """Copies within host memory: the buffer is the fused chunk itself."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def gather(
        self,
        tile: Tile,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        fence: "torch.cuda.Event | None",
    ) -> None:
        self._cache.gather(tile, block_ids, buffer)

    def scatter(
        self,
        tile: Tile,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        fence: "torch.cuda.Event | None",
    ) -> None:
        self._cache.scatter(tile, block_ids, buffer)

    def close(self) -> None:
        pass


_Kit = tuple["torch.cuda.Stream", torch.Tensor]

_KITS: defaultdict[tuple[torch.device, int], list[_Kit]] = defaultdict(list)
"""Streams and memory of copiers that have ended, by the device and the number of bytes. PyTorch
keeps freed memory for the stream that used it: with streams in turn, each would get some. What is
never freed may be used on another stream than that of its pool."""


class CudaCopier:
    """Copies between device and host, "in another CUDA stream to avoid blocking the inference
    computation" (Section 5).

    Fusion happens on the device, so that one copy crosses the bus for every chunk. The host
    waits for each chunk, because its buffer is reused right after, and because no copy may be in
    progress when `stop` says that all have ended.
    """

    def __init__(self, cache: KvCache, num_bytes: int) -> None:
        self._cache = cache
        self._kits = _KITS[cache.device, num_bytes]
        try:
            self._stream, self._fused = self._kits.pop()
        except IndexError:
            # PyTorch hands out 32 streams of each priority in turn, then the same ones again. The
            # engine's own has normal priority; this one has another: the two never coincide.
            self._stream = torch.cuda.Stream(cache.device, priority=-1)
            # In the pool of this thread's own stream, which all copiers share: PyTorch takes 20 MiB
            # from the device for the first chunk in the pool of a stream.
            self._fused = torch.empty(num_bytes, dtype=torch.uint8, device=cache.device)
            # The memory may have been freed by work that is still queued there.
            self._stream.wait_stream(torch.cuda.current_stream(cache.device))

    def gather(
        self,
        tile: Tile,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        fence: "torch.cuda.Event | None",
    ) -> None:
        if fence is not None:
            # This thread sleeps; a stream that waits would have it poll the driver below.
            fence.synchronize()
        with torch.cuda.stream(self._stream):
            ids = block_ids.to(self._cache.device, non_blocking=True)
            self._cache.gather(tile, ids, self._fused)
            buffer.copy_(self._fused[: buffer.numel()], non_blocking=True)
        self._stream.synchronize()

    def scatter(
        self,
        tile: Tile,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        fence: "torch.cuda.Event | None",
    ) -> None:
        if fence is not None:
            # This thread sleeps; a stream that waits would have it poll the driver below.
            fence.synchronize()
        with torch.cuda.stream(self._stream):
            ids = block_ids.to(self._cache.device, non_blocking=True)
            self._fused[: buffer.numel()].copy_(buffer, non_blocking=True)
            self._cache.scatter(tile, ids, self._fused)
        self._stream.synchronize()

    def close(self) -> None:
        self._kits.append((self._stream, self._fused))


def make_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8[num_bytes] on the host, page-locked when the cache is on CUDA.

    Every page is touched here, because the first use of fresh memory is several times slower.
    """
    is_cuda = device.type == "cuda"
    # Page-locking happens in the context of the thread's current device.
    with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda).fill_(0)


def page_lock(buffer: torch.Tensor, device: torch.device) -> None:
    """Page-locks mapped memory in place, so that CUDA copies to and from it directly.

    Raises:
        torch.cuda.CudaError: the driver refuses.
    """
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))


def page_unlock(buffer: torch.Tensor, device: torch.device) -> None:
    """Undoes `page_lock`; must be called before the memory is unmapped."""
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            torch.cuda.check_error(cudart.cudaHostUnregister(buffer.data_ptr()))


def _keep_to_one_core() -> None:
    """Makes torch run this thread's copies on this thread alone.

    Otherwise OpenMP starts a team for every thread of the plane, which competes with the engine's
    team and waits at barriers: on a busy machine one block takes 8 ms instead of 0.1 ms.
    `torch.set_num_threads` would also change the number for threads that the engine starts later,
    while OpenMP's own setting holds for the calling thread only.
    """
    # The first call in a thread sets torch's default, which must not come after ours.
    torch.get_num_threads()
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(1)
