"""Features of engines and requests that cannot migrate, by name.

With such a feature of the engine, the instance serves without migration; a request with one stays
on its instance. The log and `sterna requests` show the names.
"""

from typing import Any

from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from sterna.engine.vllm import offloading
from sterna.engine.vllm.kv_groups import MOVABLE


def immovable_engine_features(vllm_config: Any, kv_cache_config: Any) -> tuple[str, ...]:
    """Return the names of configured features whose state Sterna cannot move; () when none."""
    parallel = vllm_config.parallel_config
    features = {
        **dict.fromkeys(immovable_speculation(vllm_config, kv_cache_config), True),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        **dict.fromkeys(immovable_connector(vllm_config, kv_cache_config), True),
        "an encoder-cache connector": vllm_config.ec_transfer_config is not None,
        "drafts on vLLM's V2 model runner": vllm_config.use_v2_model_runner
        and vllm_config.speculative_config is not None,
        # The state of a request is in its page only in part; the rest is in its row of the batch.
        "ReplaySSM": getattr(vllm_config.cache_config, "use_replayssm", False),
        # The worker notes the experts of each block from its first token, and an adopted request
        # begins in the middle of one: an assertion of vLLM would end the engine.
        "routed experts in answers": vllm_config.aux_output_config.enable_return_routed_experts,
        "a model without a KV cache": not kv_cache_config.kv_cache_groups,
        "a pooling model": vllm_config.model_config.runner_type == "pooling",
        "an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "a diffusion model": vllm_config.model_config.is_diffusion,
        # The rotary positions of a request then depend on the output of the encoder.
        "pruning of multimodal inputs": prunes_multimodal_inputs(vllm_config.model_config),
        # Of such a group nothing is known: its state may be more than its pages.
        **{f"a KV cache group of {name}": True for name in unknown_managers(kv_cache_config)},
    }
    if (layout := vllm_config.cache_config.kv_cache_layout) is not None:
        # In other layouts a page is split into pieces by heads.
        is_compact = KVCacheLayout[layout].is_block_compact
        features[f"KV cache layout {layout}"] = not is_compact
    return tuple(name for name, is_used in features.items() if is_used)


def immovable_connector(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Return the names of what does not move of a KV connector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    if transfer.kv_connector != offloading.NAME:
        return [f"the KV connector {transfer.kv_connector}"]
    features = {
        # Of these a part of a block is saved as well, and copied before that.
        "KV offloading of recurrent states": kv_cache_config.has_mamba_layers,
        # Its workers hear of a request's end and arrival in one step.
        "KV offloading on vLLM's V2 model runner": vllm_config.use_v2_model_runner,
    }
    return [name for name, is_used in features.items() if is_used]


MOVABLE_METHODS = ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp")
"""The methods of speculative decoding whose whole state of a request is its tokens and the KV cache
of layers that belong to the groups."""


def immovable_speculation(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Return the names of what does not move of speculative decoding."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return []
    features = {
        f"speculative decoding by {speculation.method}": speculation.method not in MOVABLE_METHODS,
        # A module's KV cache of the last tokens is computed again with the next ones.
        "multi-token prediction with several modules": speculation.use_multi_module_mtp(),
        # A state for each draft, and the number of the one that counts in its row of the batch.
        "speculative decoding with recurrent states": kv_cache_config.has_mamba_layers,
    }
    return [name for name, is_used in features.items() if is_used]


def prunes_multimodal_inputs(model_config: Any) -> bool:
    """Whether tokens of images or videos are dropped after they were encoded."""
    multimodal = model_config.multimodal_config
    return multimodal is not None and bool(multimodal.is_multimodal_pruning_enabled())


def unknown_managers(kv_cache_config: Any) -> list[str]:
    """Return the names of the managers whose groups' state Sterna does not know, sorted."""
    managers = (
        KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role)
        for group in kv_cache_config.kv_cache_groups
    )
    return sorted({each.__name__ for each in managers if each not in MOVABLE})


def ends_thinking_by_phrase(vllm_config: Any) -> bool:
    """Whether a thinking budget ends by several tokens whose place depends on the drafts so far: V1
    workers count by steps, and an end that is not where they count it is said again."""
    reasoning = vllm_config.reasoning_config
    token_ids = None if reasoning is None else reasoning.reasoning_end_token_ids
    has_drafts = vllm_config.speculative_config is not None
    return not vllm_config.use_v2_model_runner and has_drafts and len(token_ids or ()) > 1


def immovable_request_feature(request: Request, *, ends_by_phrase: bool) -> str | None:
    """Return the name of the first feature of the request that cannot move; None when none.

    Args:
        ends_by_phrase: see `ends_thinking_by_phrase`.
    """
    sampling = request.sampling_params
    if ends_by_phrase and sampling is not None and sampling.thinking_token_budget is not None:
        return "a thinking budget that ends by several tokens, beside drafts"
    if request.lora_request is not None and request.lora_request.load_inplace:
        # Its weights change under the same number.
        return "a LoRA adapter with load_inplace"
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming input"
    return None
