"""Large prompts that instances run: other requests may share them. Pure.

A request whose prompt begins as that of a running one needs no memory for what they share. Of what
prefix caches have else, the blocks are free, and a request needs memory for them. So instances
report their running requests with large prompts (`InstanceLoad.large_prompts`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice

from sterna.messages.actors import DispatchRequest
from sterna.policy.candidate_table import CandidateTable
from sterna.types import MAX_LARGE_PROMPTS, InstanceId, RequestId, unpacked


class RunningPrompts:
    """The large prompts that were sent to instances, by the ids of their requests.

    Those that were sent by a scheduler before this one are not known: nothing is shared with them.

    Attributes:
        num_compared: comparisons of two whole prompts so far; each takes some microseconds.
    """

    def __init__(self) -> None:
        self.num_compared = 0
        self._hashes: dict[RequestId, Sequence[int]] = {}
        self._block_tokens: int | None = None

    def on_sent(self, request: DispatchRequest, candidates: CandidateTable) -> None:
        """A request with a large prompt is sent to one of these instances."""
        self._hashes[request.request_id] = unpacked(request.block_hashes)
        # As many as they name, and as many that they do not name yet.
        num_named = MAX_LARGE_PROMPTS * max(1, len(candidates))
        if len(self._hashes) > 3 * num_named:
            kept = set(islice(reversed(self._hashes), num_named))
            for candidate in candidates:
                kept.update(candidate.load.large_prompts)
            self._hashes = {each: self._hashes[each] for each in self._hashes if each in kept}

    def shared(
        self,
        request: DispatchRequest,
        cached: Mapping[InstanceId, int],
        candidates: CandidateTable,
    ) -> dict[InstanceId, int]:
        """The tokens of its prompt that running requests on these instances use and prefix caches
        have, if these are more than half of it. To let in prompts that share less would evict what
        others need.

        Args:
            request: of which the engines report cached blocks.
            cached: the tokens of its prompt that are in the instances' prefix caches.
        """
        if request.demand_tokens < request.prompt_tokens:
            # The engines keep a part of it alone.
            return {}
        hashes = unpacked(request.block_hashes)
        block_tokens = self._tokens_of_a_block(request.prompt_tokens // len(hashes))
        # A hash also says what is before its block: that of the middle one tells most others apart.
        middle = slice(len(hashes) // 2, len(hashes) // 2 + 1)
        found: dict[InstanceId, int] = {}
        for instance_id, cached_tokens in cached.items():
            candidate = candidates.find(instance_id)
            if candidate is None or 2 * cached_tokens <= request.prompt_tokens:
                continue
            running = map(self._hashes.get, candidate.load.large_prompts)
            alike = [each for each in running if each and each[middle] == hashes[middle]]
            if alike:
                self.num_compared += len(alike)
                num_alike = max(_num_alike(each, hashes) for each in alike)
                found[instance_id] = min(cached_tokens, num_alike * block_tokens)
        return found

    def _tokens_of_a_block(self, num_tokens: int) -> int:
        """The least that any request has said: exact for prompts of as many blocks as a block has
        tokens, and too much for one that has outputs beside its blocks."""
        known = self._block_tokens
        self._block_tokens = num_tokens if known is None else min(known, num_tokens)
        return self._block_tokens


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of blocks with which both begin alike."""
    places = range(min(len(one), len(other)))
    return bisect_left(places, True, key=lambda place: one[place] != other[place])
