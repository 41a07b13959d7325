"""Random LoRA adapters of the tiny models, strong enough that what a model says depends on them.

python -m bench.kinds.tiny_adapters MODEL FOLDER --seed 1
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

RANK = 8
ALPHA = 32
MODULES = ("q_proj", "v_proj")
"""The layers of attention that an adapter changes."""


def build_adapter(model: Path, folder: Path, *, seed: int) -> Path:
    """Write an adapter of the Llama in `model` into `folder`, and return the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not any(f".{module}." in name for module in MODULES):
            continue
        num_outputs, num_inputs = weight.shape
        base = f"base_model.model.{name.removesuffix('.weight')}"
        down = torch.randn(RANK, num_inputs, generator=generator) / num_inputs**0.5
        weights[f"{base}.lora_A.weight"] = down
        weights[f"{base}.lora_B.weight"] = torch.randn(num_outputs, RANK, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Write one adapter."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kinds.tiny_adapters", description="Write a random LoRA adapter."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(build_adapter(options.model, options.folder, seed=options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
