"""Converter of a Llama model: from a GGUF file to a Hugging Face folder of bfloat16 weights.

vLLM's CPU engine does not run GGUF, and transformers loads it in ways that change from release
to release. So the weights, the configuration and the tokenizer are written here from the file's
own fields. Only the small model's architecture is covered: Llama with a byte-level BPE tokenizer.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Progress = Callable[[str], None]

SPECIAL_TOKEN = 3
"""The token type that GGUF gives to control tokens such as <|im_start|>."""

# Each tensor of a layer, by its name in GGUF and in a Hugging Face checkpoint.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_llama_gguf(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write config, generation config, tokenizer and weights of `gguf_file` into `folder`.

    Quantized weights are expanded to float32 and rounded to bfloat16. Memory: the whole model
    in bfloat16 and one tensor in float32.

    Raises:
        ValueError: the file holds another architecture, tokenizer or set of tensors.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = {name: entry.contents() for name, entry in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{gguf_file} is not a Llama model with a byte-level BPE tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    has_output_layer = any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", llama_config(fields, has_output_layer))
    _write_json(folder / "generation_config.json", _special_token_ids(fields))
    write_tokenizer(fields, folder)
    _write_weights(reader, fields, folder / "model.safetensors", progress)


def llama_config(fields: Mapping[str, Any], has_output_layer: bool) -> dict[str, Any]:
    """The model's `config.json`, from the GGUF fields."""
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # GGUF stores the epsilon in float32; its shortest decimal is the original number.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not has_output_layer,
        **_special_token_ids(fields),
    }


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, the chat template included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    if fields.get("tokenizer.ggml.pre") != "smollm":
        raise ValueError(f"unknown pre-tokenizer {fields.get('tokenizer.ggml.pre')!r}")
    # "smollm" splits every digit off before the usual byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == SPECIAL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _special_token_ids(fields)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)


def half_split_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection from GGUF's to Hugging Face's rotary layout.

    GGUF rotates neighbouring rows of a head (0 with 1, 2 with 3, ...); Hugging Face rotates row i
    with row i + head_size / 2.

    Args:
        rows: float32[num_heads * head_size, hidden_size].
    """
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def _write_weights(reader: Any, fields: Mapping[str, Any], file: Path, progress: Progress) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    num_tensors = len(reader.tensors)
    for index, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = half_split_rows(values, fields["llama.attention.head_count"])
        elif tensor.name.endswith("attn_k.weight"):
            values = half_split_rows(values, fields["llama.attention.head_count_kv"])
        # A copy, because the reader's arrays are read-only maps of the file.
        weights[hugging_face_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
        if index % 68 == 0 or index == num_tensors:
            progress(f"converting the weights: {index} of {num_tensors} tensors")
    expected = len(LAYER_TENSORS) * fields["llama.block_count"] + 2
    if len(weights) - ("lm_head.weight" in weights) != expected:
        raise ValueError(f"{len(weights)} tensors where {expected} are expected")
    save_file(weights, file, metadata={"format": "pt"})
    # safetensors makes the file readable by its owner only; the cache may be shared.
    file.chmod(0o644)


def hugging_face_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of the GGUF tensor `name`.

    Raises:
        ValueError: a Llama model has no such tensor.
    """
    if name in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_TENSORS:
        raise ValueError(f"a Llama model has no tensor {name!r}")
    return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"


def _special_token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
