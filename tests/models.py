"""Models for tests: the small real one, tiny random ones, and a tiny GGUF file."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from sterna.demo_model.small_model import default_cache_folder, ensure_small_model

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, prepared where it is not yet (about 10 s)."""
    return ensure_small_model(default_cache_folder(os.environ), print)


def tiny_random_llama(
    path: Path,
    *,
    seed: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    max_model_len: int = 2048,
) -> Path:
    """Writes a random Llama with SmolLM2's tokenizer into `path` and returns it.

    Its numbers of heads split among tensor-parallel ranks, as SmolLM2's 9 and 3 do not. Weights
    are scaled so that every layer matters: what it says depends on all of its context, and a
    wrong KV block changes it.
    """
    import torch
    from safetensors.torch import save_file

    head_size, vocab_size = 32, 49152
    hidden_size, intermediate_size = num_heads * head_size, 2 * num_heads * head_size
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        # By the square root of the inputs' number, so that activations keep their size.
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": random(vocab_size, hidden_size) * hidden_size**0.5,
        "model.norm.weight": torch.ones(hidden_size, dtype=torch.bfloat16),
        # Random logits of this width make the likeliest token clear of the next.
        "lm_head.weight": random(vocab_size, hidden_size) * 4,
    }
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (hidden_size, hidden_size),
            "self_attn.k_proj": (num_kv_heads * head_size, hidden_size),
            "self_attn.v_proj": (num_kv_heads * head_size, hidden_size),
            "self_attn.o_proj": (hidden_size, hidden_size),
            "mlp.gate_proj": (intermediate_size, hidden_size),
            "mlp.up_proj": (intermediate_size, hidden_size),
            "mlp.down_proj": (hidden_size, intermediate_size),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            ones = torch.ones(hidden_size, dtype=torch.bfloat16)
            weights[f"model.layers.{layer}.{name}.weight"] = ones
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": max_model_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(small_model() / name, path / name)
    return path


def write_tiny_gguf(
    file: Path, *, architecture: str = "llama", without: str = ""
) -> dict[str, np.ndarray]:
    """Writes a one-layer random Llama as GGUF; returns its weights by Hugging Face name.

    Args:
        without: the GGUF name of a tensor to leave out.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
    from tokenizers.pre_tokenizers import ByteLevel

    rng = np.random.default_rng(7)
    num_heads, num_kv_heads, hidden_size, intermediate_size = 4, 2, 64, 96
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    kv_size = hidden_size * num_kv_heads // num_heads
    shapes = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(tokens), hidden_size)),
        "output_norm.weight": ("model.norm.weight", (hidden_size,)),
    }
    for name, hf_name, shape in (
        ("attn_norm", "input_layernorm", (hidden_size,)),
        ("attn_q", "self_attn.q_proj", (hidden_size, hidden_size)),
        ("attn_k", "self_attn.k_proj", (kv_size, hidden_size)),
        ("attn_v", "self_attn.v_proj", (kv_size, hidden_size)),
        ("attn_output", "self_attn.o_proj", (hidden_size, hidden_size)),
        ("ffn_norm", "post_attention_layernorm", (hidden_size,)),
        ("ffn_gate", "mlp.gate_proj", (intermediate_size, hidden_size)),
        ("ffn_up", "mlp.up_proj", (intermediate_size, hidden_size)),
        ("ffn_down", "mlp.down_proj", (hidden_size, intermediate_size)),
    ):
        shapes[f"blk.0.{name}.weight"] = (f"model.layers.0.{hf_name}.weight", shape)
    weights: dict[str, np.ndarray] = {}
    for name, (hf_name, shape) in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        kind = GGMLQuantizationType.F32
        if len(shape) == 2:
            kind = GGMLQuantizationType.Q4_1
            packed = quantize(values, kind)
            values = dequantize(packed, kind)
        if name != without:
            writer.add_tensor(name, packed if len(shape) == 2 else values, raw_dtype=kind)
        if name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            values = _rows_in_hugging_face_order(values, head_size=hidden_size // num_heads)
        weights[hf_name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _rows_in_hugging_face_order(values: np.ndarray, head_size: int) -> np.ndarray:
    # GGUF's rows 2i and 2i + 1 of a head rotate together; Hugging Face's are i and i + half.
    ordered = np.empty_like(values)
    half = head_size // 2
    for row in range(values.shape[0]):
        head, place = divmod(row, head_size)
        ordered[head * head_size + place // 2 + (place % 2) * half] = values[row]
    return ordered
