"""Facts about an engine from vLLM's configuration, before the engine is built."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from sterna.engine.model_files import snapshot_folder
from sterna.engine.profiling.profile_file import cpu_model


def profile_key(config: VllmConfig, num_threads: int | None) -> dict[str, str]:
    """Key of a profile: the model, the options that change a step's time, the hardware.

    The size of the KV cache and the limits of a batch are not part of it: they do not change a
    target load in tokens. Two engines with equal keys have equal step times.

    Args:
        num_threads: of each rank's steps on CPU.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    speculative = config.speculative_config
    return {
        "model": _model(model.model, model.revision),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "enforce_eager": str(model.enforce_eager),
        "block_size": str(cache.block_size),
        "kv_cache_dtype": str(cache.cache_dtype),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "attention_backend": str(config.attention_config.backend),
        "async_scheduling": str(config.scheduler_config.async_scheduling),
        "lora": str(config.lora_config is not None),
        "speculative": "None" if speculative is None else str(speculative.method),
        "vllm": vllm.__version__,
        "hardware": _hardware(num_threads),
    }


KV_KEYS = (
    "dtype",
    "quantization",
    "block_size",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "attention_backend",
    "vllm",
)
"""The part of a profile's key that decides the content and the layout of a KV block, beside the
model."""


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NUM_SAMPLES = 32
SAMPLE_BYTES = 4096


def kv_format(config: VllmConfig, page_layouts: Iterable[str]) -> str:
    """The KV format: equal for engines with the same weights, layout and precision.

    Args:
        page_layouts: the layout of a page on each rank; it does not follow from the options,
            because vLLM chooses it by the hardware.
    """
    key = profile_key(config, num_threads=None)
    formats = [f"model={_weights_of(config.model_config, config.load_config.download_dir)}"]
    formats += [f"{name}={key[name]}" for name in KV_KEYS]
    formats.append(f"hf_overrides={config.model_config.hf_overrides}")
    formats.append(f"drafts={_drafts(config)}")
    formats += sorted(set(page_layouts))
    return "; ".join(formats)


def _drafts(config: VllmConfig) -> str | None:
    """Return what decides the content of the KV cache of layers that draft; None without any, as
    with n-grams."""
    speculation = config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return None
    model = speculation.draft_model_config
    weights = _weights_of(model, config.load_config.download_dir)
    return f"{speculation.method}, {weights}, {model.quantization}"


def _weights_of(model: ModelConfig, cache: str | None) -> str:
    """The model and what tells its weights from others under the same name: samples of those in a
    folder, or the commit of a repository, which each instance looks up when it starts. Those in an
    object store have their address alone.

    Args:
        cache: the folder of downloads; None for Hugging Face's own.
    """
    if model.model_weights:
        return str(model.model_weights)
    name = _model(model.model, None)
    if (digest := weights_digest(Path(model.model))) is not None:
        return f"{name}, weights {digest}"
    commit = getattr(model.revision, "resolved", None)
    if commit is None and (folder := snapshot_folder(model.model, model.revision, cache)):
        commit = folder.name
    return f"{name}@{commit or model.revision}"


def weights_digest(model: Path) -> str | None:
    """Return a digest of samples of a model's weights, or None where they are not in a folder.

    New weights may have the name of the old ones, with the same config.json.
    """
    if not model.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(model.iterdir()):
        if path.suffix not in WEIGHT_SUFFIXES or not path.is_file():
            continue
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as weights:
            for number in range(NUM_SAMPLES):
                weights.seek(num_bytes * number // NUM_SAMPLES)
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def total_tokens(config: VllmConfig) -> int | None:
    """M, the memory for requests in tokens, where it follows from the options; None where the
    engine determines it at its start."""
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is None or cache.cache_dtype != "auto" or _is_mixed(config):
        return None
    else:
        token_bytes = (
            # Keys and values.
            2
            * model.get_num_layers(parallel)
            * model.get_num_kv_heads(parallel)
            * model.get_head_size()
            * torch.empty((), dtype=model.dtype).element_size()
        )
        num_blocks = cache.kv_cache_memory_bytes // (token_bytes * cache.block_size)
    # vLLM reserves one block.
    return max(0, int((num_blocks - 1) * cache.block_size))


def _is_mixed(config: VllmConfig) -> bool:
    """Whether not all layers have the usual keys and values of all tokens."""
    model = config.model_config
    return bool(
        model.use_mla
        or model.is_hybrid
        or model.has_inner_state
        or model.get_sliding_window() is not None
        or model.attention_chunk_size is not None
        or config.speculative_config is not None
    )


def computes_in_software(config: VllmConfig) -> bool:
    """Whether this CPU has no instructions for the model's dtype; float32 is then several times as
    fast."""
    return bool(config.model_config.dtype == torch.bfloat16) and lacks_bfloat16()


def lacks_bfloat16() -> bool:
    """Whether models are computed by a CPU on which bfloat16 is computed in software: on x86, one
    without AVX-512."""
    return current_platform.is_cpu() and not _has_bfloat16()


def _has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _model(name: str, revision: str | None) -> str:
    """Name of the model, independent of the place of its folder."""
    config_file = Path(name) / "config.json"
    if not config_file.is_file():
        return name if revision is None else f"{name}@{revision}"
    digest = hashlib.sha256(config_file.read_bytes()).hexdigest()
    return f"{Path(name).resolve().name} (config.json {digest[:12]})"


def _hardware(num_threads: int | None) -> str:
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    threads = "all" if num_threads is None else num_threads
    return f"{cpu_model()}, {os.cpu_count()} cores, {threads} threads an instance"
