"""Large prompts that instances run, by what was sent there: other requests may share them. Pure.

A request whose prompt begins as that of a running one needs no memory for what they share.
Instances report which blocks their prefix caches have, but not which of these a request uses; those
in no use are free, and a request needs memory for them. So the scheduler goes by what it has sent:
as many requests as an instance has are taken to be the last ones that were sent there.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sterna.messages.actors import DispatchRequest
from sterna.policy.candidate_table import CandidateTable
from sterna.types import InstanceId, unpacked

LARGE_SHARE = 0.1
"""A prompt is large that needs more than this share of an instance's memory. In vain an instance
keeps at most as much memory free for smaller ones."""

MAX_PROMPTS = 8
"""Prompts that are known of each instance, the last ones that differ: nearly as many large ones as
can run there."""


@dataclass(frozen=True, slots=True)
class _Sent:
    hashes: Sequence[int]
    number: int
    session: str


class Alike(NamedTuple):
    """A beginning of a prompt that was sent to an instance: its tokens, and the number of the last
    request there that has it."""

    num_tokens: int
    number: int


class RunningPrompts:
    """The large prompts that were sent to each instance last."""

    def __init__(self) -> None:
        self._num_sent: Counter[InstanceId] = Counter()
        self._sent: dict[InstanceId, list[_Sent]] = {}

    def on_sent(self, request: DispatchRequest, instance_id: InstanceId, *, is_large: bool) -> None:
        """A request is sent to the instance."""
        self._num_sent[instance_id] += 1
        if not is_large:
            return
        hashes = unpacked(request.block_hashes)
        # One of those that have most of the prompt stands for all.
        others = [
            each for each in self._sent.get(instance_id, ()) if not _num_alike(each.hashes, hashes)
        ]
        sent = _Sent(hashes, self._num_sent[instance_id], request.session)
        self._sent[instance_id] = [*others, sent][-MAX_PROMPTS:]

    def on_instance_left(self, instance_id: InstanceId) -> None:
        """An instance is gone for good."""
        self._num_sent.pop(instance_id, None)
        self._sent.pop(instance_id, None)

    def alike(
        self, request: DispatchRequest, cached: Mapping[InstanceId, int]
    ) -> dict[InstanceId, Alike]:
        """What of its prompt is cached on these instances and was sent there before: more than half
        of it. To let in prompts that share less would evict what others need.

        Args:
            cached: `NewRequest.cached` of it.
        """
        found: dict[InstanceId, Alike] = {}
        hashes = unpacked(request.block_hashes)
        for instance_id, cached_tokens in cached.items():
            for sent in self._sent.get(instance_id, ()):
                if request.session and sent.session == request.session:
                    # A turn before this one, which has ended.
                    continue
                if num_alike := _num_alike(sent.hashes, hashes):
                    # Exact for prompts of as many blocks as a block has tokens.
                    num_tokens = num_alike * (request.prompt_tokens // len(hashes))
                    new = Alike(min(cached_tokens, num_tokens), sent.number)
                    found[instance_id] = max(new, found.get(instance_id, new))
        return found

    def shared(
        self, alike: Mapping[InstanceId, Alike], candidates: CandidateTable
    ) -> dict[InstanceId, int]:
        """The tokens of these that running requests use, as the instances are known now.

        None where an instance has more to compute than a quarter of that: a request that comes
        while the prompt is being computed would compute it again.
        """
        found: dict[InstanceId, int] = {}
        for instance_id, (num_tokens, number) in alike.items():
            candidate = candidates.find(instance_id)
            if candidate is None or num_tokens < 4 * candidate.uncomputed_tokens:
                continue
            if number > self._num_sent[instance_id] - candidate.num_requests:
                found[instance_id] = num_tokens
        return found


def _num_alike(sent: Sequence[int], hashes: Sequence[int]) -> int:
    """The number of blocks with which both begin alike, if these are most of the second prompt,
    else 0. A hash also says what is before its block."""
    places = range(min(len(sent), len(hashes)))
    num_alike = bisect_left(places, True, key=lambda place: sent[place] != hashes[place])
    return num_alike if 2 * num_alike > len(hashes) else 0
