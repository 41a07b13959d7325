"""Threads of an engine's steps on CPU, in a process of its own: vLLM fixes their number once."""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_random_llama

pytestmark = pytest.mark.vllm


def _threads_of_steps(folder: Path) -> int:
    """The number of threads for the steps of a core for which OpenMP was loaded with one."""
    from sterna.cli.serve.serve_command import engine_environment

    os.environ.update(engine_environment())
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from sterna.engine.vllm.hosted_core import build_core

    assert torch.get_num_threads() == 1
    config = EngineArgs(
        model=str(tiny_random_llama(folder, seed=5)),
        dtype="float32",
        load_format="dummy",
        kv_cache_memory_bytes=64 << 20,
        max_model_len=128,
        enforce_eager=True,
        distributed_executor_backend="uni",
    ).create_engine_config()
    found: list[int] = []

    def build() -> None:
        core: Any = build_core(config, log_stats=False, num_threads=3)
        found.append(torch.get_num_threads())
        core.shutdown()

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    return found[0]


def test_the_thread_of_the_steps_has_its_share_of_the_cores(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_threads_of_steps, (tmp_path,)) == 3
