"""vLLM engine cores of each kind of model, each in a process of its own, stepped by hand.

vLLM builds one kind of model in a process: another one finds the first one's groups of processes.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

Answer = TypeVar("Answer")

_cores: list[Any] = []


class KindCore:
    """A core in another process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Call `function(core, *args)` in the core's process, or `function(cores, *args)` where
        there are several; its failure is raised here."""
        return self._pool.submit(_call, function, args).result()


@contextmanager
def kind_core(kind: str, folder: Path, *, num_cores: int = 1, **options: Any) -> Iterator[KindCore]:
    """A core of this kind of `bench.kinds.tiny_models`, whose model is written into the folder.

    Args:
        num_cores: cores of the same model in the one process.
        options: of vLLM's `EngineArgs`, beside those that keep it small.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_start, kind, folder, num_cores, options).result()
        yield KindCore(pool)


def _start(kind: str, folder: Path, num_cores: int, options: dict[str, Any]) -> None:
    from sterna.cli.serve.serve_command import engine_environment

    os.environ.update(engine_environment())
    from vllm.engine.arg_utils import EngineArgs

    from bench.kinds.tiny_models import KINDS, build
    from sterna.engine.vllm.hosted_core import build_core

    made = KINDS[kind]
    values = {
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        **made.options,
        **options,
    }
    args = EngineArgs(
        model=str(build(kind, folder)),
        dtype=made.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        scheduler_cls="sterna.engine.vllm.scheduler.MigratingScheduler",
        worker_extension_cls="sterna.engine.vllm.worker.SternaWorkerExtension",
        **values,
    )
    for _ in range(num_cores):
        _cores.append(build_core(args.create_engine_config(), log_stats=False))


def _call(function: Callable[..., Answer], args: tuple[Any, ...]) -> Answer:
    return function(_cores[0] if len(_cores) == 1 else _cores, *args)
