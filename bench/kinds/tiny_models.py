"""Tiny random models, one for each kind of KV cache that vLLM has.

    python -m bench.kinds.tiny_models gemma3 FOLDER

Weights are drawn so that every layer and every cached page matters: what a model says depends on
all of its context, and a wrong page changes it. (vLLM's `--load-format dummy` gives constant text.)
A model takes two to eight megabytes. Its tokenizer has a token for each byte, and others up to 512.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
HIDDEN_SIZE = 128
WINDOW = 64
"""Tokens of a sliding window, and of a chunk."""
EMBEDDING_WIDTH = 0.5
"""Standard deviation of the values of embeddings."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model.

    Attributes:
        config: makes the `transformers` configuration.
        architecture: the name of vLLM's class, where it is not the configuration's own.
        dtype: what vLLM's CPU build can compute it in.
        options: of vLLM's `EngineArgs`, where the kind needs others than usual.
        groups: the managers of its KV cache groups in vLLM, in order.
        files: further files, with their content in JSON.
        special_tokens: tokens with a meaning, by their ids, beside those of every kind.
        more_weights: makes further weights out of the model's, for layers that `transformers` does
            not have.
    """

    config: Callable[[], Any]
    groups: tuple[str, ...]
    architecture: str | None = None
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    special_tokens: dict[int, str] = field(default_factory=dict)
    more_weights: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def _common(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_common(3), head_dim=32)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(
        **_common(6),
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=kinds,
        query_pre_attn_scalar=32,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **_common(4),
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )


def _llama4() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **_common(4),
        head_dim=32,
        intermediate_size_mlp=2 * HIDDEN_SIZE,
        attention_chunk_size=WINDOW,
        no_rope_layer_interval=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    )


def _deepseek() -> Any:
    from transformers import DeepseekV2Config

    values = _common(3) | {"num_key_value_heads": 4}
    return DeepseekV2Config(
        **values,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=3,
    )


def _granite4() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_common(4),
        num_local_experts=0,
        shared_intermediate_size=2 * HIDDEN_SIZE,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_expand=2,
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **_common(4),
        head_dim=32,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=HIDDEN_SIZE,
        shared_expert_intermediate_size=HIDDEN_SIZE,
        num_experts=4,
        num_experts_per_tok=2,
    )


def _mimo() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_common(1), head_dim=32, num_nextn_predict_layers=1)


def _next_token_layer(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights of MiMo's layer for the token after the next: the model's only layer again.

    It is given the next token's embedding with a length of its own, which is that of the model's
    embeddings times `1 / EMBEDDING_WIDTH`; what it adds to that is as much longer.
    """
    import torch

    prefix = "model.mtp_layers.0."
    layer = {
        name.replace("model.layers.0.", prefix): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith("model.layers.0.")
    }
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        layer[prefix + name] /= EMBEDDING_WIDTH
    nothing, same = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE), torch.eye(HIDDEN_SIZE)
    layer[prefix + "input_proj.weight"] = torch.cat([nothing, same], dim=1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"{prefix}{name}.weight"] = torch.ones(HIDDEN_SIZE)
    return layer


VISION_START, VISION_END, IMAGE, VIDEO = range(VOCAB_SIZE - 4, VOCAB_SIZE)
"""Tokens of the kind that sees images."""


def _qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig

    text = _common(3)
    return Qwen2VLConfig(
        text_config={
            **{name: text[name] for name in text if name != "tie_word_embeddings"},
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "hidden_size": HIDDEN_SIZE,
        },
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )


QWEN2_VL_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        # An image has at most 64 tokens.
        "min_pixels": 56 * 56,
        "max_pixels": 64 * 28 * 28,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    },
}

FULL, SLIDING, CHUNKED, STATE = (
    "FullAttentionManager",
    "SlidingWindowManager",
    "ChunkedLocalAttentionManager",
    "MambaManager",
)

KINDS = {
    "llama": Kind(_llama, (FULL,)),
    "fp8_kv": Kind(_llama, (FULL,), options={"kv_cache_dtype": "fp8"}),
    "gemma3": Kind(_gemma3, (SLIDING, SLIDING, FULL)),
    "gpt_oss": Kind(_gpt_oss, (SLIDING, FULL)),
    "llama4": Kind(_llama4, (CHUNKED, CHUNKED, CHUNKED, FULL), "Llama4ForCausalLM"),
    # The CPU build's latent attention has blocks of 16 and no prefix caching.
    "deepseek": Kind(
        _deepseek, (FULL,), options={"block_size": 16, "enable_prefix_caching": False}
    ),
    # Its prefix caching fails on CPU: the scan does not return states in between.
    "granite4": Kind(
        _granite4, (STATE, STATE, STATE, FULL), options={"enable_prefix_caching": False}
    ),
    # The CPU build computes gated delta nets in bfloat16 only.
    "qwen3_next": Kind(_qwen3_next, (STATE, STATE, STATE, FULL), dtype="bfloat16"),
    "mimo": Kind(_mimo, (FULL,), "MiMoForCausalLM", more_weights=_next_token_layer),
    "qwen2_vl": Kind(
        _qwen2_vl,
        (FULL,),
        options={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}},
        files=QWEN2_VL_FILES,
        special_tokens={
            VISION_START: "<|vision_start|>",
            VISION_END: "<|vision_end|>",
            IMAGE: "<|image_pad|>",
            VIDEO: "<|video_pad|>",
        },
    ),
}


def build(kind: str, folder: Path, *, seed: int = 5) -> Path:
    """Write the model of this kind into the folder, and return the folder.

    Raises:
        KeyError: there is no such kind; `KINDS` has them.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made = KINDS[kind]
    config = made.config()
    generator = torch.Generator().manual_seed(seed)
    sees = hasattr(config, "vision_config")
    model_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = model_class.from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            _draw(name, weights, generator)
    model.to(getattr(torch, made.dtype)).save_pretrained(folder)
    if made.more_weights is not None:
        save_file(made.more_weights(model.state_dict()), folder / "more.safetensors")
    if made.architecture is not None:
        _name_architecture(folder / "config.json", made.architecture)
    for file_name, content in made.files.items():
        (folder / file_name).write_text(json.dumps(content, indent=2))
    write_tokenizer(folder, made.special_tokens)
    return folder


def write_tokenizer(folder: Path, special_tokens: dict[int, str]) -> None:
    """Write a tokenizer of single bytes and these special tokens, for `VOCAB_SIZE` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [special_tokens.get(number, f"<{number}>") for number in range(len(words), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(special_tokens.values()),
    )
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)


def _draw(name: str, weights: Any, generator: Any) -> None:
    """Draw the weights, wide enough that each of them is heard; vectors, such as norms, stay."""
    if weights.dim() < 2:
        return
    if "lm_head" in name:
        width = 1.0
    elif "embed" in name:
        width = EMBEDDING_WIDTH
    elif any(part in name for part in ("q_proj", "k_proj", "q_a_proj", "q_b_proj")):
        width = 0.24
    else:
        width = 0.12 * math.sqrt(HIDDEN_SIZE / weights.shape[-1])
    weights.normal_(0.0, width, generator=generator)


def _name_architecture(config_file: Path, architecture: str) -> None:
    values = json.loads(config_file.read_text())
    values["architectures"] = [architecture]
    config_file.write_text(json.dumps(values, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Write one model."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kinds.tiny_models", description="Write a tiny random model."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    print(build(options.kind, options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
