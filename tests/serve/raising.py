"""A logits processor that makes a step of vLLM raise: `--logits-processors` loads it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

VARIABLE = "RAISING_FILE"
"""The environment variable with the path of a file that makes one step raise."""
MESSAGE = "this step was told to raise"


class Raising(LogitsProcessor):
    """Raises in the first step that finds the file, on whichever instance, and takes the file
    away."""

    def __init__(
        self, vllm_config: "VllmConfig", device: "torch.device", is_pin_memory: bool
    ) -> None:
        self._file = Path(os.environ[VARIABLE])

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        try:
            self._file.unlink()
        except FileNotFoundError:
            return logits
        raise RuntimeError(MESSAGE)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """It depends on no request."""
