"""Large prompts that instances run: other requests may share them. Pure.

A request whose prompt begins as that of a running one needs no memory for what they share. Of what
prefix caches have else, the blocks are free, and a request needs memory for them. So instances
report their running requests with large prompts (`InstanceLoad.large_prompts`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from sterna.messages.actors import DispatchRequest
from sterna.policy.candidate_table import CandidateTable
from sterna.types import MAX_LARGE_PROMPTS, InstanceId, RequestId, unpacked


class RunningPrompts:
    """The large prompts that were sent last, by the ids of their requests.

    Those that were sent by a scheduler before this one are not known: nothing is shared with them.
    """

    def __init__(self) -> None:
        # Those that were of use last are the last ones.
        self._hashes: dict[RequestId, Sequence[int]] = {}

    def on_sent(self, request: DispatchRequest, num_instances: int) -> None:
        """A request with a large prompt is sent to one of as many instances."""
        self._hashes[request.request_id] = unpacked(request.block_hashes)
        while len(self._hashes) > MAX_LARGE_PROMPTS * max(1, num_instances):
            del self._hashes[next(iter(self._hashes))]

    def shared(
        self,
        request: DispatchRequest,
        cached: Mapping[InstanceId, int],
        candidates: CandidateTable,
    ) -> dict[InstanceId, int]:
        """The tokens of its prompt that running requests on these instances use, if these are more
        than half of it. To let in prompts that share less would evict what others need.

        Args:
            cached: the tokens of its prompt that are in the instances' prefix caches.
        """
        if request.demand_tokens < request.prompt_tokens:
            # The engines keep a part of it alone.
            return {}
        found: dict[InstanceId, int] = {}
        hashes = unpacked(request.block_hashes)
        # Exact for prompts of as many blocks as a block has tokens.
        block_tokens = request.prompt_tokens // max(1, len(hashes))
        for instance_id, cached_tokens in cached.items():
            candidate = candidates.find(instance_id)
            if candidate is None:
                continue
            num_tokens = 0
            for request_id in candidate.load.large_prompts:
                running = self._hashes.pop(request_id, None)
                if running is not None:
                    self._hashes[request_id] = running
                    num_tokens = max(num_tokens, block_tokens * _num_alike(running, hashes))
            if 2 * num_tokens > request.prompt_tokens:
                found[instance_id] = min(cached_tokens, num_tokens)
        return found


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of blocks with which both begin alike. A hash also says what is before its
    block."""
    places = range(min(len(one), len(other)))
    return bisect_left(places, True, key=lambda place: one[place] != other[place])
