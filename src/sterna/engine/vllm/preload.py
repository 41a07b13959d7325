"""Preloaded imports of vLLM: all modules that an engine and its front end need, for processes that
are forked from this one."""

import vllm.model_executor.models.llama  # most models of vLLM are built from it

import sterna.engine.vllm.engine
import sterna.engine.vllm.worker  # noqa: F401
from sterna.engine.vllm.guard import is_cpu_build

if is_cpu_build():
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401
