"""vLLM engine cores of a tiny random model, stepped by hand in the process of the tests."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.models import tiny_random_llama

SMALL: dict[str, Any] = {
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 61,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 4,
    "enable_chunked_prefill": True,
}
"""Options with which prompts are computed in chunks, and requests have 60 blocks."""


@contextmanager
def tiny_core(folder: Path, *, load_format: str = "dummy", **options: Any) -> Iterator[Any]:
    """An engine core with these engine options beside those that keep it small.

    Args:
        folder: where its model is written.
        load_format: "auto" for weights with which every token depends on all those before.
        options: of vLLM's `EngineArgs`; `max_model_len` is needed.
    """
    from sterna.cli.serve.serve_command import engine_environment

    with patch.dict(os.environ, engine_environment()):
        from vllm.engine.arg_utils import EngineArgs

        from sterna.engine.vllm.hosted_core import build_core

        model = tiny_random_llama(folder, seed=5, max_model_len=options["max_model_len"])
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            load_format=load_format,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            distributed_executor_backend="uni",
            **{"enable_prefix_caching": False, **options},
        ).create_engine_config()
        with compiler_hidden():
            core = build_core(config, log_stats=False)
        try:
            yield core
        finally:
            core.shutdown()


@contextmanager
def compiler_hidden() -> Iterator[None]:
    """Context for building a core where anything may have been compiled before.

    vLLM's CPU worker looks into everything that every loaded module names, and trips over the
    library object of llvmlite.
    """
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden
