"""Sterna's part of a vLLM worker (`worker_extension_cls`): its KV data plane, and the sampling
state of requests that leave or arrive.

Methods run on the worker's own thread and are called by vLLM's `collective_rpc`. vLLM mixes this
class into its worker, hence the prefix of every name.
"""

import ctypes
import hashlib
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingType
from vllm.utils.torch_utils import current_stream
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from sterna.config import TransportConfig
from sterna.engine.vllm.kv_groups import spec_of
from sterna.engine.vllm.plane_link import PlaneServer
from sterna.engine.vllm.sampling.generators import (
    drawn_seed,
    generator_after,
    keep_generators_of_incomplete_prompts,
)
from sterna.engine.vllm.sampling.thinking_budgets import count_earlier_outputs
from sterna.transport.memory.layout import KvCache, KvLayout
from sterna.transport.plane import make_data_plane
from sterna.types import MigrationId

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

SEEDED = SamplingType.RANDOM_SEED

_PR_SET_PDEATHSIG = 1


class SternaWorkerExtension:
    """Mixed into vLLM's worker; `self` is that worker."""

    if TYPE_CHECKING:
        model_runner: "V1Runner | V2Runner"
        parallel_config: "ParallelConfig"
        rank: int
        use_v2_model_runner: bool

    def sterna_prepare(self, instance_process_id: int) -> None:
        """Prepare the worker; called also where the engine's requests cannot migrate."""
        if instance_process_id != os.getpid():
            # With several ranks, each has a process of its own.
            end_with_parent(instance_process_id)
        if self.use_v2_model_runner:
            return
        count_earlier_outputs(self.model_runner)
        if self.model_runner.device.type == "cpu":
            keep_generators_of_incomplete_prompts(self.model_runner)

    def sterna_take_place(self, place: int) -> None:
        """Make vLLM number this engine's ranks behind those of the engines before it, as it does
        with data parallelism: in the group of a trainer of weights, in lists with an entry for each
        worker, and in the names of checksums. Engines are alike but for this.

        Args:
            place: position of this engine, from 0.
        """
        self.parallel_config.data_parallel_index = place

    def sterna_open_plane(
        self, config: TransportConfig, notice_address: str, label: str
    ) -> tuple[str, str]:
        """Start this rank's data plane.

        Returns its command address for the instance and its endpoint for peers.
        """
        cache = kv_cache(self.model_runner, label)
        server = PlaneServer(
            self.rank, notice_address, lambda notify: make_data_plane(config, cache, notify)
        )
        self._sterna_plane = server
        return server.command_address, server.plane.endpoint

    def sterna_mark_steps(self, migration_id: MigrationId) -> None:
        """See `DataPlane.mark_steps`."""
        self._sterna_plane.plane.mark_steps(migration_id)

    def sterna_page_layout(self) -> str:
        """Return the properties that decide the layout of a KV page on this rank."""
        runner = self.model_runner
        layout = runner.cache_config.get_resolved_kv_cache_layout().name
        groups = [group for groups in runner.attn_groups for group in groups]
        backends = sorted({group.backend.get_name() for group in groups})
        # The CPU backend packs keys and values as its kernels for this processor read them.
        builders = [builder for group in groups for builder in group.metadata_builders]
        isas = sorted({str(builder.isa) for builder in builders if hasattr(builder, "isa")})
        is_v2 = self.use_v2_model_runner
        kernel_block_sizes = runner.kernel_block_sizes if is_v2 else runner._kernel_block_sizes
        kv_groups = [
            [(name, _format_of(spec_of(group, name))) for name in group.layer_names]
            for group in runner.kv_cache_config.kv_cache_groups
        ]
        digest = hashlib.sha256(repr(kv_groups).encode()).hexdigest()[:12]
        return (
            f"layout={layout}; backends={backends}; isas={isas}; "
            f"kernel_block_sizes={sorted(set(kernel_block_sizes))}; groups={digest}"
            # Pages of the two runners have not been compared.
            + ("; runner=V2" if is_v2 else "")
        )

    def sterna_export_generator(self, request_id: str) -> bytes | None:
        """Return the state of the request's random generator on a V1 worker, or None if it has no
        own one."""
        state: CachedRequestState | None = self.model_runner.requests.get(request_id)
        if state is None or state.generator is None:
            return None
        return bytes(state.generator.get_state().numpy().tobytes())

    def sterna_drawn_seed(self, request_id: str) -> int | None:
        """Return the seed that a V2 worker drew for a request without one; see `drawn_seed`."""
        return drawn_seed(self.model_runner, request_id)

    def sterna_import_request(
        self,
        state: CachedRequestState,
        generator_state: bytes | None,
        *,
        is_continued: bool = False,
    ) -> None:
        """Register a request that arrives with a history at a V1 worker.

        The worker treats it as one that missed a step, or was preempted.

        Args:
            generator_state: of a seeded request that migrated.
            is_continued: no other worker has exported its state; the generator of a seeded
                request has drawn once for each of its outputs.
        """
        runner = self.model_runner
        params = state.sampling_params
        if is_continued and params is not None and params.sampling_type == SEEDED:
            num_draws = len(state.output_token_ids)
            state.generator = generator_after(runner, params.seed, num_draws)
        elif generator_state is not None:
            state.generator = torch.Generator(device=runner.device)
            # The state's tensor lives on the CPU also for a generator of a CUDA device.
            state.generator.set_state(
                torch.frombuffer(bytearray(generator_state), dtype=torch.uint8)
            )
        # If the request was here before, its row may still be in the persistent batch.
        runner.input_batch.remove_request(state.req_id)
        # Log probabilities of the prompt were delivered with the first token.
        runner.num_prompt_logprobs.pop(state.req_id, None)
        if runner.uses_mrope:
            runner._init_mrope_positions(state)
        if hasattr(runner, "mamba_state_idx"):
            # Else the column of its state would be that of an earlier stay here.
            runner.mamba_state_idx.pop(state.req_id, None)
        runner.requests[state.req_id] = state


def end_with_parent(process_id: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, which is one of the
    process with this id: that of the engine's steps, which first has vLLM end its ranks.

    vLLM's ranks end by themselves when their parent has, but not one that is stopped, or waits in a
    collective for a rank that is gone: it would keep its GPU.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != process_id:
        # It has ended before.
        os.kill(os.getpid(), signal.SIGKILL)


def kv_cache(model_runner: "V1Runner | V2Runner", label: str = "") -> KvCache:
    """Return the layout of the runner's KV cache in its single allocation, group by group.

    Must be called on the worker's own thread.
    Page (layer, block) starts at offset + layer * layer_stride + block * block_stride.
    """
    config = model_runner.kv_cache_config
    storage = _first_tensor(model_runner.kv_caches[0]).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    groups = []
    for group in config.kv_cache_groups:
        runs = [
            KvLayout.from_strided(
                raw,
                offset=tensor.offset,
                num_layers=len(tensor.layers),
                layer_stride=tensor.layer_stride,
                num_blocks=config.num_blocks,
                block_stride=tensor.block_stride,
                page_bytes=spec_of(group, tensor.layers[0]).page_size_bytes,
            )
            for tensor in config.kv_cache_tensors
            if tensor.layers[0] in group.layer_names
        ]
        groups.append(KvLayout.joined(runs))
    # The stream of this thread's steps, which is not CUDA's default one.
    stream = current_stream() if storage.device.type == "cuda" else None
    return KvCache(groups, label=label, compute_stream=stream)


def _format_of(spec: Any) -> str:
    """Return what decides the content of a layer's page."""
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        # One page holds the state; its size in tokens is the limit of a request.
        spec = replace(spec, block_size=1)
    return repr(spec)


def _first_tensor(cache: Any) -> torch.Tensor:
    """Return a tensor of a layer's cache; a recurrent layer has several."""
    return cache if isinstance(cache, torch.Tensor) else cache[0]
