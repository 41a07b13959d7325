"""Prompts that are more than tokens, for the tiny models: images and embeddings.

They are dictionaries as vLLM's `InputProcessor.process_inputs` takes them.
"""

from collections.abc import Sequence
from typing import Any

from bench.kinds.tiny_models import EMBEDDING_WIDTH, HIDDEN_SIZE, IMAGE, VISION_END, VISION_START

IMAGE_SIZE = (112, 84)
"""Pixels. Such an image takes twelve tokens."""


def image_prompt(token_ids: Sequence[int], *, seed: int = 0) -> dict[str, Any]:
    """A prompt of a random image between the first ten tokens and the others."""
    from PIL.Image import fromarray

    before, after = list(token_ids[:10]), list(token_ids[10:])
    return {
        "prompt_token_ids": [*before, VISION_START, IMAGE, VISION_END, *after],
        "multi_modal_data": {"image": fromarray(_pixels(seed))},
    }


def embeds_prompt(token_ids: Sequence[int], *, seed: int = 0) -> dict[str, Any]:
    """A prompt of as many random embeddings, as wide as those of the tiny models."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(len(token_ids), HIDDEN_SIZE, generator=generator) * EMBEDDING_WIDTH
    return {"prompt_embeds": embeds}


def _pixels(seed: int) -> Any:
    import numpy as np

    width, height = IMAGE_SIZE
    shape = (height // 14, width // 14, 3)
    # Of one colour in each patch, so that no resizing blurs them.
    patches = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return patches.repeat(14, axis=0).repeat(14, axis=1)
