"""Label of the updates of an engine's weights since its start, by calls of vLLM's development mode.

The KV format names the weights that were loaded from files. Trainers send an engine others while it
runs. What it computes then is of no use to an engine that has started later, or that did not get
the same calls: only engines with equal labels exchange KV blocks.

As in vLLM, requests go on with the KV that they have, and cached prefixes stay until the caller
resets the prefix cache. An engine that has done so has another label than one with KV of earlier
weights, which would come back from there.
"""

import hashlib
from collections.abc import Sequence

HARMLESS_CALLS = (
    "check_health",
    "compute_weight_checksums",
    "get_compilation_match_table",
    "get_encoder_timing_stats",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "release_late_interaction_query_cache",
    "shutdown_weight_transfer_engine",
)
"""Methods of vLLM's workers that leave the weights as they are. Others may change them."""

DIGEST_BYTES = 8


class WeightUpdates:
    """The updates of one engine's weights.

    Attributes:
        label: equal for engines with the same updates; "" without any.
    """

    def __init__(self) -> None:
        self.label = ""
        self._calls = b""

    def on_call(
        self, method: str, args: Sequence[object], payload: bytes, *, is_done: bool
    ) -> None:
        """Note a utility call that has ended.

        Args:
            payload: the call as it came: its bytes are the same on all engines that got it, and
                differ from those of any other call.
            is_done: whether it succeeded. Weights may have changed in part where it did not.
        """
        if method == "collective_rpc" and args[0] not in HARMLESS_CALLS:
            outcome = b"done" if is_done else b"failed"
            parts = self._calls + payload + outcome
            self._calls = hashlib.blake2b(parts, digest_size=DIGEST_BYTES).digest()
            self.label = f"{self._calls.hex()} with earlier KV"
        elif method == "reset_prefix_cache" and is_done:
            self.label = self._calls.hex()
