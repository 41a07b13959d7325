"""What must hold in the simulated cluster after every event, whatever was decided. Pure.

- One owner a request: at most one instance may step it. A source whose request is drained keeps
  it, suspended, until the destination has committed (Section 4.2).
- No request is lost: one that was on an instance is on one until its last token.
- Tokens in order, each once: its owner goes on exactly where the delivered tokens end.
- Blocks conserved: each block of an instance is free, a request's, or a reservation's; a request
  holds what its tokens take.

And when all has ended: every request has all its tokens, and no instance holds anything.
"""

from collections.abc import Callable, Mapping, Sequence

from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.requests import EmulatedRequest
from sterna.types import InstanceId, RequestId
from tests.engine.emulated.builders import num_held

Cores = Mapping[InstanceId, EmulatedCore]

Delivered = Callable[[RequestId], int]
"""How many tokens of a request have been delivered to its client."""


class Checker:
    """Looks at the engines after every event.

    Args:
        config: of all engines.
        num_delivered: tells the tokens that clients have got.
    """

    def __init__(self, config: EmulatedEngineConfig, num_delivered: Delivered) -> None:
        self._config = config
        self._num_delivered = num_delivered
        # The requests that were on an instance after the last event, with their lengths.
        self._known: dict[RequestId, int] = {}

    def violations(self, cores: Cores) -> list[str]:
        """What does not hold at this moment, in words; nothing when all is well."""
        found: list[str] = []
        present: dict[RequestId, int] = {}
        owners: dict[RequestId, InstanceId] = {}
        for instance_id, core in cores.items():
            found += self._block_violations(instance_id, core)
            for request in core.requests():
                request_id = request.request_id
                present[request_id] = request.output_tokens
                if core.is_drained(request_id):
                    continue
                if request_id in owners:
                    found.append(f"{request_id} can run on {owners[request_id]} and {instance_id}")
                owners[request_id] = instance_id
                found += self._token_violations(instance_id, request)
        for request_id, output_tokens in self._known.items():
            if request_id not in present and self._num_delivered(request_id) < output_tokens:
                found.append(f"{request_id} has not ended and is on no instance")
        self._known = present
        return found

    def final_violations(
        self, cores: Cores, request_ids: Sequence[RequestId], output_tokens: Sequence[int]
    ) -> list[str]:
        """What does not hold when nothing is to come any more."""
        found = self.violations(cores)
        for request_id, num_asked in zip(request_ids, output_tokens, strict=True):
            num_delivered = self._num_delivered(request_id)
            if num_delivered != num_asked:
                found.append(f"{request_id} has {num_delivered} of {num_asked} tokens at the end")
        for instance_id, core in cores.items():
            found += [f"{instance_id} still holds {each.request_id}" for each in core.requests()]
            if core.num_reservations > 0:
                found.append(f"{instance_id} still holds {core.num_reservations} reservations")
        return found

    def _block_violations(self, instance_id: InstanceId, core: EmulatedCore) -> list[str]:
        num_free, num_reserved = core.num_free_blocks, core.num_reserved_blocks
        num_all = num_free + num_held(core) + num_reserved
        if num_free >= 0 and num_all == self._config.num_blocks:
            return []
        return [
            f"{instance_id} has {num_free} free, {num_held(core)} held and {num_reserved} reserved "
            f"blocks of {self._config.num_blocks}"
        ]

    def _token_violations(self, instance_id: InstanceId, request: EmulatedRequest) -> list[str]:
        found = []
        request_id = request.request_id
        num_delivered = self._num_delivered(request_id)
        if request.num_output_tokens != num_delivered:
            found.append(
                f"{request_id} is at token {request.num_output_tokens} on {instance_id}, "
                f"its client at {num_delivered}"
            )
        if num_delivered >= request.output_tokens:
            found.append(f"{request_id} has ended and can run on {instance_id}")
        # During a step the block of the token that is being computed is held already.
        least = self._config.blocks_of(request.num_computed_tokens)
        most = self._config.blocks_of(request.num_tokens)
        if not least <= request.num_blocks <= most:
            found.append(
                f"{request_id} holds {request.num_blocks} blocks on {instance_id}, "
                f"its tokens take {least} to {most}"
            )
        return found
