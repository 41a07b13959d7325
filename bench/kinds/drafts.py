"""Speculative decoding of the tiny models: options of engines that draft.

Each function writes what an engine needs besides its model, and returns options of vLLM's
`EngineArgs`. A KV cache of drafting layers that is lost shows only in the number of drafts that are
accepted, so these drafts are mostly right: they are made with the model's own weights.
"""

from pathlib import Path
from typing import Any

from bench.kinds.tiny_models import EMBEDDING_WIDTH, HIDDEN_SIZE

NUM_DRAFTS = 3
"""Drafts a step."""


def ngram(folder: Path) -> dict[str, Any]:
    """Drafts are what followed the last tokens where they were before."""
    return _speculation("ngram", prompt_lookup_max=3, prompt_lookup_min=1)


def draft_model(folder: Path) -> dict[str, Any]:
    """The model of `folder / "model"` drafts for itself."""
    return _speculation("draft_model", model=str(folder / "model"))


def eagle(folder: Path) -> dict[str, Any]:
    """Drafts of an EAGLE head with all layers of the Llama of `folder / "model"`.

    A head's first layer has no norm, so the model's embeddings are given one length, and the head
    gets them with length one; what its layers add to them is as much longer. Then it says what the
    model would say, but for the first token of the prompt, which no head sees.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model, head = folder / "model", folder / "eagle"
    weights = load_file(model / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    embeddings *= EMBEDDING_WIDTH / embeddings.square().mean(dim=1, keepdim=True).sqrt()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    prefix = "model.layers."
    layers = {
        name.removeprefix("model."): tensor / EMBEDDING_WIDTH
        if name.endswith(("o_proj.weight", "down_proj.weight"))
        else tensor
        for name, tensor in weights.items()
        if name.startswith(prefix) and name != f"{prefix}0.input_layernorm.weight"
    }
    same, nothing = torch.eye(HIDDEN_SIZE) / EMBEDDING_WIDTH, torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
    layers["fc.weight"] = torch.cat([same, nothing], dim=1)
    head.mkdir()
    save_file(layers, head / "model.safetensors")
    (head / "config.json").write_text((model / "config.json").read_text())
    return _speculation("eagle", model=str(head))


def next_token_layer(folder: Path) -> dict[str, Any]:
    """Drafts of the layer that a model such as MiMo has for them (multi-token prediction)."""
    return _speculation("mtp")


def _speculation(method: str, **settings: Any) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": method,
            "num_speculative_tokens": NUM_DRAFTS,
            **settings,
        }
    }
