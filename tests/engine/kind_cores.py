"""vLLM engine cores of each kind of model, each in a process of its own, stepped by hand.

vLLM builds one kind of model in a process: another one finds the first one's groups of processes.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from bench.kinds.cases import nothing_more
from bench.kinds.tiny_models import KINDS, build
from tests.engine.vllm_cores import compiler_hidden

Answer = TypeVar("Answer")

PLAIN_KINDS = tuple(name for name in KINDS if name != "mimo")
"""Kinds that differ in their KV cache or their positions; MiMo has a layer that drafts besides, and
is a Llama without that."""


_cores: list[Any] = []


class KindCore:
    """A core in another process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, function: Callable[..., Answer], *args: Any, **settings: Any) -> Answer:
        """Call `function(core, *args, **settings)` in the core's process, or
        `function(cores, *args, **settings)` where there are several; its failure is raised here."""
        return self._pool.submit(_call, partial(function, **settings), args).result()


@contextmanager
def kind_core(
    kind: str,
    folder: Path,
    *,
    num_cores: int = 1,
    prepare: Callable[[Path], dict[str, Any]] = nothing_more,
    **options: Any,
) -> Iterator[KindCore]:
    """A core of this kind of `bench.kinds.tiny_models`, whose model is written to `folder/model`.

    Args:
        num_cores: cores of the same model in the one process.
        prepare: writes into the folder what the engine needs besides, and returns further options.
        options: of vLLM's `EngineArgs`, beside those that keep it small.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_start, kind, folder, num_cores, prepare, options).result()
        yield KindCore(pool)


def _start(
    kind: str,
    folder: Path,
    num_cores: int,
    prepare: Callable[[Path], dict[str, Any]],
    options: dict[str, Any],
) -> None:
    from sterna.cli.serve.serve_command import engine_environment

    os.environ.update(engine_environment())
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        _interpret_kernels()
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.engine.arg_utils import EngineArgs

    from sterna.engine.vllm.hosted_core import build_core

    made = KINDS[kind]
    model = build(kind, folder / "model")
    values = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        **made.options,
        **prepare(folder),
        **options,
    }
    args = EngineArgs(
        model=str(model),
        dtype=made.dtype,
        enforce_eager=True,
        distributed_executor_backend="uni",
        scheduler_cls="sterna.engine.vllm.scheduler.MigratingScheduler",
        worker_extension_cls="sterna.engine.vllm.worker.SternaWorkerExtension",
        **values,
    )
    # As in an instance: images arrive whole.
    args._api_process_count, args._api_process_rank = 2, 0
    for _ in range(num_cores):
        # A core that drafts by n-grams compiles something.
        with compiler_hidden():
            core = build_core(args.create_engine_config(), log_stats=False)
        # vLLM has one connector a process: each core gets its own back when it steps.
        core.kv_connector_of_worker = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        _cores.append(core)


def _interpret_kernels() -> None:
    """Let vLLM use Triton, by whose interpreter kernels run on CPU (`TRITON_INTERPRET=1`).

    vLLM uses it on CPU where it has a compiler for CPUs, which no released Triton has.
    """
    from triton.backends import backends

    assert os.environ["TRITON_INTERPRET"] == "1"
    backends["cpu"] = SimpleNamespace(driver=None, compiler=None)


def _call(function: Callable[..., Answer], args: tuple[Any, ...]) -> Answer:
    return function(_cores[0] if len(_cores) == 1 else _cores, *args)
