"""Models of the shape of published ones, without weights: vLLM draws some (`--load-format dummy`).

    python -m bench.common.model_shapes FOLDER

The text means nothing. The tokenizer, and with it the vocabulary, is the small model's: the output
layer, and its part of a step, are smaller than the published model's.
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sterna.demo_model.small_model import default_cache_folder, ensure_small_model

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Layers and attention of Llama 3.1 8B, by its published configuration."""

_OF_THE_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id")


def write_shape(folder: Path, shape: Mapping[str, Any], tokenizer: Path) -> Path:
    """Write a model of this shape into the folder, and return the folder.

    Args:
        tokenizer: the folder of the model whose tokenizer and vocabulary it gets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = json.loads((tokenizer / "config.json").read_text())
    config = {**shape, **{name: own[name] for name in _OF_THE_TOKENIZER}}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def main() -> None:
    """Write the shape of Llama 3.1 8B."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.common.model_shapes", description="Write a model without weights."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="a model's (default: the small model's)"
    )
    options = parser.parse_args()
    tokenizer = options.tokenizer
    if tokenizer is None:
        tokenizer = ensure_small_model(default_cache_folder(os.environ), print)
    print(write_shape(options.folder, LLAMA_8B, tokenizer))


if __name__ == "__main__":
    main()
