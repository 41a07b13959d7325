"""Fences: points in the engine's work, and the thread that waits until it has passed them."""

import logging
import queue
import threading
from collections.abc import Callable

import torch

_logger = logging.getLogger(__name__)


class FenceWaiter:
    """Calls back when fences have passed. Its methods are for any thread and never block.

    All fences are behind steps on one stream and pass in their order, so that one thread, which
    sleeps meanwhile, waits for each in turn.
    """

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: that of the steps.
        """
        self._device = device
        self._waiting: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=self._run, name="sterna-kv-fence", daemon=True)
        self.thread.start()

    def call_after(self, fence: "torch.cuda.Event | None", call: Callable[[], None]) -> None:
        """Calls on the thread when the fence has passed; at once, and here, if there is none."""
        if fence is None:
            call()
        else:
            self._waiting.put((fence, call))

    def close(self) -> None:
        """Makes the thread end when the fences so far have passed."""
        self._waiting.put(None)

    def _run(self) -> None:
        if self._device.type == "cuda":
            # Else the first wait would leave a context, with its memory, on GPU 0.
            torch.cuda.set_device(self._device)
        while (waiting := self._waiting.get()) is not None:
            fence, call = waiting
            try:
                fence.synchronize()
            except RuntimeError:
                # The GPU has failed: so will the copy, and the engine's step.
                _logger.exception("kv fence failed")
            call()
