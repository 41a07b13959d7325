"""vLLM engine cores with workers of the V2 model runner, whose model is played.

The engine core, its scheduler, the worker's rows and its block tables are vLLM's own. V2 needs
Triton, so the kernels that write the rows are played by loops, and the model by a hash of all that
it would look at: the pages in the request's block tables, its row of tokens, its seed. A token
that differs shows a wrong page, row or seed.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.worker_base import CompilationTimes

from bench.kinds.tiny_models import build
from sterna.engine.vllm.hosted_core import HostedCore
from sterna.engine.vllm.scheduler import MigratingScheduler
from sterna.engine.vllm.worker import SternaWorkerExtension

BLOCK_SIZE = 16
WINDOW = 64
NUM_BLOCKS = 60
MAX_NUM_SEQS = 3
NUM_TOKEN_IDS = 512
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}


class PlayedSampler:
    """vLLM's states of a sampler, without its kernels."""

    use_flashinfer = False
    use_xpu_sampler = False

    def __init__(self) -> None:
        self.sampling_states = SamplingStates(MAX_NUM_SEQS, NUM_TOKEN_IDS)

    def add_request(self, row: int, params: Any) -> None:
        self.sampling_states.add_request(row, params)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()


class Nothing:
    """A part of the worker that has no state here."""

    def add_request(self, *args: Any) -> None: ...

    def remove_request(self, *args: Any) -> None: ...

    def apply_staged_writes(self) -> None: ...


class PlayedRunner:
    """What vLLM's V2 runner does with a scheduler's output before and after its model.

    Attributes:
        pages: int64[num_blocks, block_size], a value for each token in the cache.
    """

    device = torch.device("cpu")
    adaptive_verification = pooling_runner = pp_handler = encoder_cache = None
    kv_block_zeroer = None
    is_last_pp_rank = True

    finish_requests = GPUModelRunner.finish_requests
    add_requests = GPUModelRunner.add_requests
    update_requests = GPUModelRunner.update_requests
    _remove_request = GPUModelRunner._remove_request

    def __init__(self, num_groups: int, max_model_len: int) -> None:
        self.req_states = RequestState(
            max_num_reqs=MAX_NUM_SEQS,
            max_model_len=max_model_len,
            max_num_batched_tokens=64,
            num_speculative_steps=0,
            vocab_size=NUM_TOKEN_IDS,
            device=self.device,
        )
        self.block_tables = BlockTables(
            block_sizes=[BLOCK_SIZE] * num_groups,
            max_num_reqs=MAX_NUM_SEQS,
            max_num_batched_tokens=64,
            max_num_blocks_per_group=[max_model_len // BLOCK_SIZE + 1] * num_groups,
            device=self.device,
        )
        self.sampler = PlayedSampler()
        self.lora_state = LoraState(max_num_reqs=MAX_NUM_SEQS)
        self.model_state = Nothing()
        self.prompt_logprobs_worker = Nothing()
        self.pages = np.zeros((NUM_BLOCKS, BLOCK_SIZE), dtype=np.int64)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.finish_requests(output)
        self.add_requests(output)
        self.update_requests(output)
        self.block_tables.apply_staged_writes()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                self._compute(self.req_states.req_id_to_index[name], num_tokens)
                for name, num_tokens in output.num_scheduled_tokens.items()
            ],
        )

    def _compute(self, row: int, num_tokens: int) -> list[int]:
        """Write the pages of these tokens; the next token, unless a prompt is incomplete."""
        states = self.req_states
        begin = int(states.num_computed_tokens.gpu[row])
        assert begin == states.num_computed_tokens_np[row]
        total = int(states.total_len.gpu[row])
        end = begin + num_tokens
        assert end <= total
        tokens = states.all_token_ids.gpu[row, :total].numpy()
        for group in range(len(self.block_tables.block_tables)):
            blocks, places = self._places(row, group, range(begin, end))
            # In a model, too, a key depends on the position and on the layers before.
            self.pages[blocks, places] = 1 + tokens[begin:end] + 1000 * (1 + group)
        states.num_computed_tokens.gpu[row] = end
        if end < total:
            return []
        token = self._next(row, end, tokens)
        states.all_token_ids.gpu[row, total] = token
        states.total_len.gpu[row] = total + 1
        return [token]

    def _next(self, row: int, end: int, tokens: np.ndarray) -> int:
        looked_at = tokens.tobytes() + bytes([int(self.req_states.prompt_len.np[row]) % 256])
        for group in range(len(self.block_tables.block_tables)):
            first = max(0, end - WINDOW) if group else 0
            looked_at += self.pages[self._places(row, group, range(first, end))].tobytes()
        drawn = self.sampler.sampling_states
        if drawn.temperature.np[row]:
            looked_at += int(drawn.seeds.np[row]).to_bytes(8, signed=True)
        return 3 + zlib.crc32(looked_at) % (NUM_TOKEN_IDS - 3)

    def _places(self, row: int, group: int, positions: range) -> tuple[np.ndarray, np.ndarray]:
        at = np.array(positions)
        table = self.block_tables.block_tables[group].gpu[row].numpy()
        assert len(at) == 0 or at[-1] // BLOCK_SIZE < self.block_tables.num_blocks.np[group, row]
        return table[at // BLOCK_SIZE], at % BLOCK_SIZE


class PlayedWorker(SternaWorkerExtension):
    """A worker as its executor calls it."""

    rank = 0
    use_v2_model_runner = True
    model_runner: Any

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {
            "layers.0": FullAttentionSpec(block_size=BLOCK_SIZE, **HEADS),
            "layers.1": SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=WINDOW, **HEADS),
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def set_kv_cache_layout(self, *args: Any, **kwargs: Any) -> None: ...

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, configs: list[Any]) -> None:
        num_groups = len(configs[0].kv_cache_groups)
        self.model_runner = PlayedRunner(num_groups, max_model_len=512)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result: ModelRunnerOutput = self.model_runner.execute_model(output)
        return result

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self) -> None: ...


class PlayedExecutor(Executor):  # type: ignore[misc]
    """An executor of one such worker.

    Attributes:
        outputs: all that the scheduler has said to it.
    """

    def _init_executor(self) -> None:
        self.worker = PlayedWorker()
        self.outputs: list[SchedulerOutput] = []

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        from concurrent.futures import Future

        if method == "execute_model":
            self.outputs.append(args[0])
        result = [getattr(self.worker, method)(*args, **(kwargs or {}))]
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result[0] if method == "execute_model" else result)
        return future

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return self.collective_rpc("execute_model", args=(scheduler_output,), non_block=non_block)

    def check_health(self) -> None: ...


def _apply_write(tensor: StagedWriteTensor) -> None:
    """Write staged rows, as the kernel of that name does."""
    begin = 0
    for row, start, end in zip(
        tensor._staged_write_indices,
        tensor._staged_write_starts,
        tensor._staged_write_cu_lens,
        strict=True,
    ):
        values = torch.tensor(tensor._staged_write_contents[begin:end], dtype=tensor.dtype)
        flat = tensor.gpu.view(-1)
        place = row * tensor.gpu.stride(0) + start
        flat[place : place + len(values)] = values
        begin = end
    tensor.clear_staged_writes()


def _apply_all(writer: FusedStagedWriter, tensors: list[StagedWriteTensor], *_: Any) -> None:
    for tensor in tensors:
        _apply_write(tensor)


@contextmanager
def v2_cores(folder: Path, num_cores: int, **options: Any) -> Iterator[list[HostedCore]]:
    """Cores with the same played model.

    Args:
        folder: where a model's configuration is written.
        options: of vLLM's `EngineArgs`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(buffer_utils, "is_uva_available", lambda: False)
        patch.setattr(StagedWriteTensor, "apply_write", _apply_write)
        patch.setattr(FusedStagedWriter, "apply", _apply_all)
        settings: dict[str, Any] = {
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": 512,
            "max_num_batched_tokens": 64,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": NUM_BLOCKS,
            "enable_prefix_caching": True,
            **options,
        }
        args = EngineArgs(
            model=str(build("llama", folder)),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            distributed_executor_backend="uni",
            **settings,
        )
        configs = [args.create_engine_config() for _ in range(num_cores)]
        # vLLM refuses V2 here when a configuration is made, for want of Triton.
        patch.setattr(VllmConfig, "use_v2_model_runner", True)
        cores = []
        for config in configs:
            config.scheduler_config.scheduler_cls = MigratingScheduler
            cores.append(HostedCore(config, PlayedExecutor, log_stats=False))
        yield cores
