"""vLLM's engine core inside this process, with Sterna's scheduler and worker extension."""

import copy
import fcntl
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig

from sterna.engine.cpu_cores import HeldCore, take_core
from sterna.engine.vllm.guard import is_cpu_build
from sterna.engine.vllm.sampling.structured_outputs import StructuredOutputs
from sterna.engine.vllm.scheduler import MigratingAsyncScheduler, MigratingScheduler
from sterna.own_log import keep_loggers
from sterna.types import InstanceId

WORKER_EXTENSION = "sterna.engine.vllm.worker.SternaWorkerExtension"
"""A name, because vLLM imports the class in the processes of the workers."""

STEP_THREAD_SWITCH_INTERVAL_S = 0.001
"""Longest time for which a thread may hold the interpreter when another waits, so that the asyncio
loop answers peers while the engine's thread prepares a step."""


logger = logging.getLogger(__name__)


class HostedCore(EngineCore):
    """vLLM's engine core, stepped by Sterna instead of by vLLM's own process."""

    # Attributes of vLLM's own process, which `_make_ready_response` reads.
    frontend_stats_publish_address = None
    engine_index = 0
    addresses = EngineZmqAddresses(inputs=[], outputs=[])

    held_core: HeldCore | None = None
    """The core on which this engine computes alone."""

    place = 0
    """That of the newest `call_utility`."""

    def __init__(
        self, config: VllmConfig, executor_class: type[Executor], *, log_stats: bool
    ) -> None:
        super().__init__(config, executor_class, log_stats)
        # The path that was last loaded for each number of a LoRA adapter.
        self.adapter_paths: dict[int, str] = {}
        self.structured_output_manager = StructuredOutputs(config)
        self.scheduler.structured_output_manager = self.structured_output_manager

    def unbound(self) -> AbstractContextManager[None]:
        """Context in which this thread starts others that may run on any core."""
        return nullcontext() if self.held_core is None else self.held_core.left()

    def shutdown(self) -> None:
        """End the engine as vLLM does."""
        super().shutdown()
        if self.held_core is not None:
            self.held_core.release()

    def _initialize_kv_caches(self, vllm_config: VllmConfig) -> KVCacheConfig:
        # In here vLLM runs the model for the first time, and compiles it.
        with compiling_once(vllm_config):
            return super()._initialize_kv_caches(vllm_config)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter as vLLM does, and also where its number has the weights of another
        path, as after a load in place: vLLM goes by numbers, and would keep those."""
        number, path = lora_request.lora_int_id, lora_request.lora_path
        if self.adapter_paths.get(number, path) != path:
            lora_request = msgspec.structs.replace(lora_request, load_inplace=True)
        is_loaded = super().add_lora(lora_request)
        self.adapter_paths[number] = path
        return bool(is_loaded)

    def ready_response(self) -> bytes:
        """Return the first message that vLLM's engine-core client expects of its engine."""
        return msgspec.msgpack.encode(EngineCoreProc._make_ready_response(self))

    def call_utility(self, method: str, args: tuple[Any, ...], answer: Any, place: int) -> None:
        """Call a method as vLLM's own process does; `answer` gets the UtilityOutput, later
        when the method returns a future.

        Args:
            place: position of this engine among those that get the call, from 0.
        """
        from vllm.v1.engine import UtilityOutput

        def result() -> Any:
            if place != self.place:
                self.collective_rpc("sterna_take_place", args=(place,))
                self.place = place
            function = getattr(self, method)
            return function(*EngineCoreProc._convert_msgspec_args(function, args))

        EngineCoreProc._invoke_utility_method(method, result, UtilityOutput(0), answer)


@contextmanager
def compiling_once(config: VllmConfig) -> Iterator[None]:
    """For the first run of a model that is not in vLLM's compilation cache: only one instance of a
    machine runs it, and those that wait find it in the cache.

    A mark in the cache says that it is there, so that later starts do not wait for each other.
    """
    if config.model_config.enforce_eager or envs.VLLM_DISABLE_COMPILE_CACHE:
        yield
        return
    mark = Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache" / "sterna" / config.compute_hash()
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        lock = open(mark.with_suffix(".lock"), "w")  # noqa: SIM115
    except OSError as error:
        logger.warning("model may be compiled by each instance error=%s", error)
        yield
        return
    with lock:
        if not mark.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            # As it is closed, the lock is free for the next one.
            lock.close()
            yield
            return
        model = config.model_config.model
        logger.info("model not compiled before, others wait for it model=%s", model)
        yield
        mark.touch()


def world_size(args: Namespace | AsyncEngineArgs) -> int:
    """Return the number of ranks of an instance."""
    return int(
        args.tensor_parallel_size * args.pipeline_parallel_size * args.prefill_context_parallel_size
    )


def executor_backend(num_ranks: int) -> str:
    """Return the name of vLLM's executor: the worker of an instance with one rank runs in the
    instance's process."""
    return "uni" if num_ranks == 1 else "mp"


def engine_config(args: Namespace, instance_id: InstanceId | None = None) -> VllmConfig:
    """Return vLLM's configuration for one instance, from the options of `vllm serve`.

    Args:
        instance_id: None where the options are only to be checked.

    Raises:
        ValueError: vLLM refuses the options; the message is vLLM's.
    """
    if args.reasoning_parser_plugin:
        # As `vllm serve` does before anything asks for a parser by its name.
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    # vLLM writes into the values of some options.
    engine_args = AsyncEngineArgs.from_cli_args(copy.deepcopy(args))
    engine_args.distributed_executor_backend = executor_backend(world_size(engine_args))
    engine_args.worker_extension_cls = WORKER_EXTENSION
    # As in the front ends: images arrive whole, and no cache must be kept equal to theirs.
    engine_args._api_process_count = 2
    engine_args._api_process_rank = 0
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    keep_loggers()
    for transfer in (config.kv_transfer_config, config.ec_transfer_config):
        if transfer is not None and instance_id is not None:
            # Drawn when the options are read, for all instances. Connectors find memory and peers
            # by it, as those of vLLM's data parallelism do by the rank that vLLM adds.
            transfer.engine_id = f"{transfer.engine_id}_{instance_id}"
    is_async = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = (
        MigratingAsyncScheduler if is_async else MigratingScheduler
    )
    return config


def build_core(
    config: VllmConfig,
    *,
    log_stats: bool,
    num_threads: int | None = None,
    binds: bool = False,
) -> HostedCore:
    """Load the model and make the engine core; must run on the thread that steps it.

    Args:
        num_threads: of each rank's steps on CPU; None: as many as OpenMP takes.
        binds: whether this thread computes on a core of its own, if one is free.
    """
    sys.setswitchinterval(STEP_THREAD_SWITCH_INTERVAL_S)
    if is_cpu_build():
        if num_threads is not None:
            # The variable is for ranks with a process of their own; OpenMP read it here long ago.
            os.environ["OMP_NUM_THREADS"] = str(num_threads)
            torch.set_num_threads(num_threads)
        # What vLLM 0.32 writes so, its CPU build cannot load (`finalize_loading` is missing); each
        # start would compile again. Without, PyTorch's own cache is used.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
        if config.model_config.enforce_eager:
            # Otherwise vLLM compiles parts of its sampler when the first request asks for log
            # probabilities: by a C++ compiler, in the middle of a step, for up to ten seconds.
            torch.compiler.set_stance("force_eager")
    if (lora := config.lora_config) is not None:
        # One place more than a batch needs, so that an adapter can be loaded for a request that
        # queues while the batch has as many as it may.
        lora.max_cpu_loras = max(lora.max_cpu_loras or 0, lora.max_loras + 1)
    core = HostedCore(config, Executor.get_class(config), log_stats=log_stats)
    if binds and (held := take_core()) is not None:
        # Not before: the model may have been compiled, by processes that need all cores.
        held.bind()
        core.held_core = held
        logger.info("engine computes on a core of its own core=%d", held.number)
    return core
