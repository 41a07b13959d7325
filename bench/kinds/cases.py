"""Cases of `sterna bench kinds`: a model, options of its engine, and how a request is made.

A further kind is a row of `CASES`: a tiny model of `tiny_models.KINDS`, what the engine needs
besides (an adapter, a draft model), and requests that are more than tokens (an image).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kinds.drafts import draft_model, eagle, next_token_layer, ngram
from bench.kinds.prompts import image_prompt
from bench.kinds.tiny_adapters import RANK, build_adapter
from bench.kinds.tiny_models import KINDS, build
from sterna.engine.vllm.guard import is_cpu_build

SERVE_OPTIONS = {
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
"""Options of vLLM's `EngineArgs` where neither the model nor the case has others."""

SHARE_OF_GPU = 0.05
"""vLLM starts an engine only where this part of a GPU's memory is free; two instances share one."""

POOL_BYTES = 32 << 20
"""KV offloading's pool in the host's memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request as vLLM's `InputProcessor.process_inputs` takes it.

    Attributes:
        prompt: a dictionary of vLLM's.
        more: further arguments, such as `lora_request`.
    """

    prompt: Mapping[str, Any]
    more: Mapping[str, Any]


def nothing_more(folder: Path) -> dict[str, Any]:
    """No option besides those of the model."""
    return {}


def tokens_alone(token_ids: Sequence[int], folder: Path, vllm_config: Any) -> Question:
    """A request of nothing but tokens."""
    return Question({"prompt_token_ids": list(token_ids)}, {})


@dataclass(frozen=True, slots=True)
class Case:
    """The measurement of one row.

    Attributes:
        title: its name on pages.
        model: of `tiny_models.KINDS`.
        prepare: writes what the engine needs besides the model into the folder, and returns options
            of `EngineArgs`, which overrule those of the model.
        ask: makes a request from the tokens of its prompt, the case's folder and vLLM's
            configuration.
        is_alone: whether tokens depend on the batch on vLLM's CPU build, without any migration, so
            that a request can be compared only if it has no neighbours.
        is_in_readme: whether the README's table, which is short, has it.
    """

    title: str
    model: str
    prepare: Callable[[Path], Mapping[str, Any]] = nothing_more
    ask: Callable[[Sequence[int], Path, Any], Question] = tokens_alone
    is_alone: bool = False
    is_in_readme: bool = True

    def serve_arguments(self, folder: Path, dtype: str | None = None) -> list[str]:
        """Write the model into the folder; returns the arguments of `sterna serve`.

        Args:
            dtype: to compute in; None: the model's own.
        """
        made = KINDS[self.model]
        model = build(self.model, folder / "model")
        options = {**SERVE_OPTIONS, "dtype": made.dtype, **made.options, **self.prepare(folder)}
        if not is_cpu_build():
            options["gpu_memory_utilization"] = SHARE_OF_GPU
        if dtype is not None:
            options["dtype"] = dtype
        return [str(model), *as_arguments(options)]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line for these options of `EngineArgs`."""
    arguments = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                arguments.append(f"--{flag}")
            case False:
                arguments.append(f"--no-{flag}")
            case dict():
                arguments += [f"--{flag}", json.dumps(value)]
            case _:
                arguments += [f"--{flag}", str(value)]
    return arguments


def _with_adapter(folder: Path) -> dict[str, Any]:
    build_adapter(folder / "model", folder / "adapter", seed=1)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}


def _for_adapter(token_ids: Sequence[int], folder: Path, vllm_config: Any) -> Question:
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, str(folder / "adapter"))
    return Question({"prompt_token_ids": list(token_ids)}, {"lora_request": adapter})


def _with_image(token_ids: Sequence[int], folder: Path, vllm_config: Any) -> Question:
    return Question(image_prompt(token_ids), {})


def with_offloading(folder: Path) -> dict[str, Any]:
    """Options of an engine that saves prompts and outputs in a pool of the host's memory."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": POOL_BYTES, "offload_prompt_only": False}
    if is_cpu_build():
        extra["spec_name"] = "HostOffloadingSpec"
        extra["spec_module_path"] = "bench.kinds.host_offloading"
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


CASES = {
    "llama": Case("Llama", "llama"),
    "fp8_kv": Case("Llama, KV cache in FP8", "fp8_kv", is_in_readme=False),
    "gemma3": Case("Gemma 3", "gemma3"),
    "gpt_oss": Case("gpt-oss", "gpt_oss"),
    "llama4": Case("Llama 4", "llama4"),
    "deepseek": Case("DeepSeek V2", "deepseek", is_alone=True),
    "granite4": Case("Granite 4", "granite4"),
    "qwen3_next": Case("Qwen3-Next", "qwen3_next", is_alone=True),
    "lora": Case("Llama, LoRA adapter", "llama", _with_adapter, _for_adapter),
    "qwen2_vl": Case("Qwen2-VL, an image", "qwen2_vl", ask=_with_image),
    "draft_model": Case("Llama, drafts of a model", "llama", draft_model, is_alone=True),
    "ngram": Case("Llama, n-gram drafts", "llama", ngram, is_alone=True, is_in_readme=False),
    "eagle": Case("Llama, EAGLE drafts", "llama", eagle, is_alone=True, is_in_readme=False),
    "mimo": Case(
        "MiMo, multi-token prediction", "mimo", next_token_layer, is_alone=True, is_in_readme=False
    ),
    "offloading": Case("Llama, KV offloading", "llama", with_offloading, is_in_readme=False),
    "granite4_ngram": Case("Granite 4, n-gram drafts", "granite4", ngram, is_in_readme=False),
}
"""The cases by the names that `--kinds` takes, in the order of the tables."""
