"""KV offloading on vLLM's CPU build, which has the connector but no copies for it.

The scheduler's side and the pool are vLLM's. Here are the copies between the KV cache and the pool,
each made a step after it was ordered: a block that gets another owner too early is saved wrong.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's pool in the host's memory, filled from a cache in the same memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> "HostWorker":
        """Return the worker's side."""
        return HostWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)


class HostWorker(OffloadingWorker):
    """Copies pages to and from the pool, when it is asked what has finished.

    Attributes:
        num_loaded: blocks that came out of the pool, in all groups.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_chunks: int, blocks_per_chunk: int
    ) -> None:
        # One block a chunk: vLLM's default.
        assert blocks_per_chunk == 1
        self._caches = kv_caches
        self._pool = [
            torch.zeros((num_chunks, each.page_size_bytes), dtype=torch.int8)
            for each in kv_caches.tensors
        ]
        self._ordered: dict[int, tuple[bool, GPULoadStoreSpec, Any]] = {}
        self._fresh: set[int] = set()
        self._finished: list[TransferResult] = []
        self.num_loaded = 0

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Order the copy of blocks into the pool."""
        return self._order(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Order the copy of blocks out of the pool."""
        return self._order(job_id, False, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Make the copies that were ordered before the last call, and return all that are made."""
        for job_id in list(self._ordered.keys() - self._fresh):
            self._make(job_id)
        self._fresh.clear()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Make these copies now."""
        for job_id in job_ids & self._ordered.keys():
            self._make(job_id)

    def _order(self, job_id: int, is_store: bool, blocks: GPULoadStoreSpec, chunks: Any) -> bool:
        self._ordered[job_id] = is_store, blocks, chunks
        self._fresh.add(job_id)
        return True

    def _make(self, job_id: int) -> None:
        is_store, blocks, chunks = self._ordered.pop(job_id)
        self.num_loaded += 0 if is_store else len(blocks.block_ids)
        for tensor, block_ids, chunk_ids in self._pages(blocks, chunks):
            cache, pool = self._caches.tensors[tensor].tensor, self._pool[tensor]
            if is_store:
                pool[chunk_ids] = cache[block_ids]
            else:
                cache[block_ids] = pool[chunk_ids]
        self._finished.append(TransferResult(job_id, success=True))

    def _pages(
        self, blocks: GPULoadStoreSpec, chunks: Any
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The number of a tensor, and its blocks and the pool's chunks for them, for each."""
        first = 0
        for size, layers in zip(blocks.group_sizes, self._caches.group_data_refs, strict=True):
            here = slice(first, first + size)
            block_ids = torch.from_numpy(blocks.block_ids[here]).long()
            chunk_ids = torch.from_numpy(chunks.block_ids[here]).long()
            for layer in layers:
                yield layer.tensor_idx, block_ids, chunk_ids
            first += size
