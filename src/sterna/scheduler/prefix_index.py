"""The parts of a prompt that each instance has in its prefix cache, by what they report. Pure.

The blocks that an instance has are looked up by the hashes that its front end sends with the
prompt. Besides, what was sent to an instance will be there soon: until its report shows that it has
computed a prompt's last full block, or for a while at most, the prompt counts as cached there.
Otherwise requests with one prefix that arrive together would each be sent to another instance.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat, takewhile
from operator import and_, or_

from sterna.messages.actors import CacheReport, DispatchRequest
from sterna.scheduler.coming_prompts import ComingPrompts
from sterna.types import (
    CacheGroup,
    CacheLayout,
    FrontendId,
    InstanceId,
    RequestId,
    cache_key,
    unpacked,
)

COMING_LIMIT_S = 300.0
"""Longest time for which a prompt counts before it is computed. It may queue for long; news of its
end may be lost."""


class PrefixIndex:
    """The contents of the prefix caches of all instances (`prefix_copies.PrefixKnowledge`)."""

    def __init__(self) -> None:
        # For each key the instances that have its block, as bits.
        self._holders: dict[int, int] = {}
        self._instances: dict[InstanceId, _Instance] = {}
        self._places: list[InstanceId | None] = []
        self._bits: dict[CacheLayout, int] = {}
        # A report can arrive after its instance's death is known; ids are never used again.
        self._gone: set[InstanceId] = set()
        # The requests that were sent somewhere, the first in front, and where; and their prompts.
        self._coming: dict[RequestId, InstanceId] = {}
        self._coming_prompts = ComingPrompts()

    def contents(self) -> dict[InstanceId, frozenset[int]]:
        """The keys of the blocks that each instance has, of those that have reported."""
        return {each: frozenset(known.keys) for each, known in self._instances.items()}

    def on_report(self, report: CacheReport) -> None:
        """An instance reports."""
        if report.instance_id in self._gone:
            return
        if report.layout is not None:
            self._begin(report.instance_id, report.layout)
        instance = self._instances.get(report.instance_id)
        if instance is None:
            return
        reported = dict.fromkeys(unpacked(report.removed))
        removed = [key for key in reported if key in instance.keys]
        instance.keys.difference_update(removed)
        self._lose(removed, instance)
        # As objects, of 48 bytes each, which the index and the instance's set share.
        added = list(unpacked(report.added))
        instance.keys.update(added)
        self._gain(added, instance)
        for key in instance.last_keys.keys() & added:
            for request_id in instance.last_keys.pop(key):
                self._drop(request_id)

    def on_instance_left(self, instance_id: InstanceId) -> None:
        """An instance is gone for good."""
        self._gone.add(instance_id)
        self._forget(instance_id)

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None:
        """The request is sent to the instance, which will compute its prompt."""
        self._drop_expired(now_s)
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        hashes = unpacked(request.block_hashes)
        last_key = _last_key(hashes, instance.layout)
        if last_key is None or last_key in instance.keys:
            return
        self._drop(request.request_id)
        self._coming[request.request_id] = instance_id
        instance.coming[request.request_id] = _Coming(
            request.frontend_id, hashes, last_key, now_s + COMING_LIMIT_S
        )
        instance.last_keys.setdefault(last_key, []).append(request.request_id)
        self._coming_prompts.add(hashes, instance_id)

    def on_cancel(self, request_id: RequestId) -> None:
        """The request was not sent there, or has ended."""
        self._drop(request_id)

    def on_frontend_left(self, frontend_id: FrontendId) -> None:
        """The front end's requests have ended."""
        for request_id, instance_id in list(self._coming.items()):
            if self._instances[instance_id].coming[request_id].frontend_id == frontend_id:
                self._drop(request_id)

    def cached_tokens(self, request: DispatchRequest) -> Mapping[InstanceId, int]:
        """`NewRequest.cached` of the request."""
        hashes = unpacked(request.block_hashes)
        found: dict[InstanceId, int] = {}
        if not hashes:
            return found
        coming = self._coming_prompts.longest(hashes)
        for layout, bits in self._bits.items():
            # The last token is always computed, for the first one of the answer.
            max_tokens = min(len(hashes) * layout.hash_tokens, request.prompt_tokens - 1)
            self._find(hashes, layout, bits, max_tokens, found)
            self._enter_coming(coming, layout, max_tokens, found)
        return found

    def can_copy(self, source: InstanceId, destination: InstanceId) -> bool:
        """See `PrefixKnowledge`."""
        one, other = self._instances.get(source), self._instances.get(destination)
        if one is None or other is None:
            return False
        return one.layout == other.layout and one.layout.moves

    def _find(
        self,
        hashes: Sequence[int],
        layout: CacheLayout,
        bits: int,
        max_tokens: int,
        found: dict[InstanceId, int],
    ) -> None:
        """Enter the longest hit of each of these instances, which have this layout."""
        step = layout.alignment_tokens
        full = [each for each in layout.groups if each.needs_all]
        others = [each for each in layout.groups if not each.needs_all]
        if not others and [each.block_size for each in full] == [step]:
            self._find_in_group(hashes, full[0], layout, bits, max_tokens, found)
            return
        # For each end that a hit may have, the instances that have what groups need that keep all
        # blocks: the later it is, the fewer.
        reach = [bits] * (max_tokens // step)
        # With several groups, vLLM also takes the prompt's last token for what it drops.
        all_tokens = len(hashes) * layout.hash_tokens if len(layout.groups) > 1 else max_tokens
        for group in full:
            last_tokens = min(len(reach) * step + group.dropped_tokens, all_tokens)
            reach_of_group = self._reach(hashes, group, layout, last_tokens, bits)
            reach = [*map(and_, reach, reach_of_group)]
        most_dropped = max((each.dropped_tokens for each in others), default=0)
        del reach[max(0, (all_tokens - most_dropped) // step) :]
        tails = [self._tail(hashes, each, layout, len(reach) * step) for each in others]
        left, place = bits, len(reach)
        while left and place:
            eligible = left & reach[place - 1]
            are_same = partial(_are_left, left, eligible)
            floor = bisect_left(reach, True, 0, place - 1, key=are_same)
            left ^= self._find_between(floor, place, tails, layout, eligible, found)
            place = floor

    def _find_between(
        self,
        floor: int,
        place: int,
        tails: "Sequence[_Tail]",
        layout: CacheLayout,
        bits: int,
        found: dict[InstanceId, int],
    ) -> int:
        """Enter the longest hit of those of these instances that have one that ends above the first
        of these places, and not above the second; returns them."""
        left, floor_tokens = bits, floor * layout.alignment_tokens
        while left and place > floor:
            num_tokens = place * layout.alignment_tokens
            holders, shorter_tokens = left, num_tokens - 1
            for tail in tails:
                holders, shorter_tokens = tail.holders_at(num_tokens, holders, left, floor_tokens)
                if not holders:
                    break
            self._enter(holders, num_tokens, found)
            left ^= holders
            place = shorter_tokens // layout.alignment_tokens
        return bits ^ left

    def _reach(
        self,
        hashes: Sequence[int],
        group: CacheGroup,
        layout: CacheLayout,
        max_tokens: int,
        bits: int,
    ) -> list[int]:
        """For each end that a hit may have, the instances that have all blocks of the group that
        it needs."""
        run = self._run(hashes, group, layout, max_tokens, bits)
        step, block_size = layout.alignment_tokens, group.block_size
        if block_size <= step:
            first = (step + group.dropped_tokens) // block_size - 1
            return run[first :: step // block_size]
        # Hits also end inside blocks: anywhere before the last token up to which one is cached.
        keys = _keys(hashes, step, group, layout, max_tokens)
        num_ends = block_size // step
        reach: list[int] = []
        for number, before in enumerate([bits, *run]):
            ends = keys[number * num_ends : (number + 1) * num_ends]
            behind = accumulate(map(self._holders.get, reversed(ends), repeat(0)), or_)
            reach += [before & each for each in reversed([*behind])]
        return reach[group.dropped_tokens // step :]

    def _tail(
        self, hashes: Sequence[int], group: CacheGroup, layout: CacheLayout, max_tokens: int
    ) -> "_Tail":
        unit_tokens = min(group.block_size, layout.alignment_tokens)
        keys = _keys(hashes, unit_tokens, group, layout, max_tokens + group.dropped_tokens)
        return _Tail(group, unit_tokens, [*map(self._holders.get, keys, repeat(0))])

    def _run(
        self,
        hashes: Sequence[int],
        group: CacheGroup,
        layout: CacheLayout,
        max_tokens: int,
        bits: int,
    ) -> list[int]:
        """For each full block, the instances that have it and all before it, up to the last that
        any has."""
        keys = _keys(hashes, group.block_size, group, layout, max_tokens)
        holders = map(self._holders.get, keys, repeat(0))
        _, *run = takewhile(bool, accumulate(holders, and_, initial=bits))
        return run

    def _find_in_group(
        self,
        hashes: Sequence[int],
        group: CacheGroup,
        layout: CacheLayout,
        bits: int,
        max_tokens: int,
        found: dict[InstanceId, int],
    ) -> None:
        """Enter the longest hit of each of these instances, which need all blocks of this group.

        Engines evict the end of a prompt before its beginning: an instance that has a block has all
        before it. So a few blocks of a long prompt show where the hits end.
        """
        keys = _keys(hashes, group.block_size, group, layout, max_tokens)
        get = self._holders.get
        bits &= get(keys[0], 0) if keys else 0
        end = 1
        while bits:
            end = bisect_left(keys, True, end, key=partial(_is_lacked, get, bits))
            having = bits & get(keys[end], 0) if end < len(keys) else 0
            num_tokens = max(0, end * group.block_size - group.dropped_tokens)
            self._enter(bits & ~having, num_tokens, found)
            bits = having

    def _enter(self, holders: int, num_tokens: int, found: dict[InstanceId, int]) -> None:
        while holders:
            bit = holders & -holders
            holders ^= bit
            instance_id = self._places[bit.bit_length() - 1]
            assert instance_id is not None
            found[instance_id] = num_tokens

    def _enter_coming(
        self,
        coming: Mapping[InstanceId, int],
        layout: CacheLayout,
        max_tokens: int,
        found: dict[InstanceId, int],
    ) -> None:
        step = layout.alignment_tokens
        for instance_id, num_hashes in coming.items():
            if self._instances[instance_id].layout == layout:
                num_tokens = min(num_hashes * layout.hash_tokens, max_tokens) // step * step
                if num_tokens > found.get(instance_id, 0):
                    found[instance_id] = num_tokens

    def _begin(self, instance_id: InstanceId, layout: CacheLayout) -> None:
        """A new report of the instance; copies on their way there stay."""
        instance = self._instances.get(instance_id)
        if instance is not None and instance.layout == layout:
            self._lose_all(instance)
            return
        self._forget(instance_id)
        place = self._new_place(instance_id)
        self._instances[instance_id] = _Instance(place, layout)
        self._bits[layout] = self._bits.get(layout, 0) | 1 << place

    def _new_place(self, instance_id: InstanceId) -> int:
        if None in self._places:
            place = self._places.index(None)
            self._places[place] = instance_id
            return place
        self._places.append(instance_id)
        return len(self._places) - 1

    def _forget(self, instance_id: InstanceId) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        self._lose_all(instance)
        for request_id, coming in instance.coming.items():
            del self._coming[request_id]
            self._coming_prompts.remove(coming.hashes, instance_id)
        self._places[instance.place] = None
        self._bits[instance.layout] &= ~(1 << instance.place)
        if not self._bits[instance.layout]:
            del self._bits[instance.layout]

    def _lose_all(self, instance: "_Instance") -> None:
        self._lose(instance.keys, instance)
        instance.keys.clear()

    def _gain(self, keys: Iterable[int], instance: "_Instance") -> None:
        bit = 1 << instance.place
        before, holders = 0, bit
        for key in keys:
            # Most follow one that the same instances have. They share the number, which takes less
            # memory than the key where instances are many, and less time when it is looked up.
            if (found := self._holders.get(key, 0)) != before:
                before, holders = found, found | bit
            self._holders[key] = holders

    def _lose(self, keys: Iterable[int], instance: "_Instance") -> None:
        bit = 1 << instance.place
        before = holders = 0
        for key in keys:
            if (found := self._holders[key]) != before:
                before, holders = found, found & ~bit
            if holders:
                self._holders[key] = holders
            else:
                del self._holders[key]

    def _drop_expired(self, now_s: float) -> None:
        while self._coming:
            request_id, instance_id = next(iter(self._coming.items()))
            if self._instances[instance_id].coming[request_id].until_s > now_s:
                return
            self._drop(request_id)

    def _drop(self, request_id: RequestId) -> None:
        instance_id = self._coming.pop(request_id, None)
        if instance_id is None:
            return
        instance = self._instances[instance_id]
        coming = instance.coming.pop(request_id)
        self._coming_prompts.remove(coming.hashes, instance_id)
        others = [
            each for each in instance.last_keys.pop(coming.last_key, ()) if each != request_id
        ]
        if others:
            instance.last_keys[coming.last_key] = others


@dataclass(frozen=True, slots=True)
class _Coming:
    """A prompt that an instance has still to compute."""

    frontend_id: FrontendId
    hashes: Sequence[int]
    last_key: int
    until_s: float


@dataclass(slots=True)
class _Instance:
    """What is known of one instance.

    Attributes:
        place: its bit.
        last_keys: the prompts of which each key is the last.
    """

    place: int
    layout: CacheLayout
    keys: set[int] = field(default_factory=set)
    coming: dict[RequestId, _Coming] = field(default_factory=dict)
    last_keys: dict[int, list[RequestId]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The blocks of one group at which the tokens behind a hit look: of a window, or the one of a
    state.

    Attributes:
        unit_tokens: those of a block, or those for which there is a state.
        holders: for each unit of the prompt, the instances that have the block that ends with it.
    """

    group: CacheGroup
    unit_tokens: int
    holders: Sequence[int]

    def holders_at(
        self, num_tokens: int, bits: int, among: int, floor_tokens: int
    ) -> tuple[int, int]:
        """Return those of the instances that have the blocks for a hit of this length, and the next
        shorter length for which any of `among`, of which they are, may have them, or one that is
        not above the floor."""
        dropped_tokens = self.group.dropped_tokens
        place = (num_tokens + dropped_tokens) // self.unit_tokens
        first = self._first(place)
        while place > first and bits:
            place -= 1
            bits &= self.holders[place]
        if bits:
            return bits, num_tokens - 1
        shorter_tokens = num_tokens - 1
        # All that end behind this block, up to here, need it.
        lowest = max(first if self.group.chunk_tokens else 0, floor_tokens // self.unit_tokens)
        while place >= lowest and not self.holders[place] & among:
            shorter_tokens = place * self.unit_tokens - dropped_tokens
            place -= 1
        return 0, shorter_tokens

    def _first(self, end: int) -> int:
        """The first unit at which the tokens behind this one look."""
        chunk_tokens = self.group.chunk_tokens
        if chunk_tokens:
            return end * self.unit_tokens // chunk_tokens * chunk_tokens // self.unit_tokens
        return max(0, end - (self.group.num_last_blocks or 0))


def _is_lacked(get_holders: Callable[[int, int], int], bits: int, key: int) -> bool:
    """Whether any of these instances lacks the block of this key."""
    return get_holders(key, 0) & bits != bits


def _are_left(left: int, bits: int, holders: int) -> bool:
    """Whether these are the ones of the instances left that are among the holders."""
    return holders & left == bits


def _keys(
    hashes: Sequence[int],
    unit_tokens: int,
    group: CacheGroup,
    layout: CacheLayout,
    max_tokens: int,
) -> Sequence[int]:
    """The keys of the group at the end of each unit within these tokens."""
    step = unit_tokens // layout.hash_tokens
    keys = hashes[step - 1 : max_tokens // unit_tokens * step : step]
    mask = cache_key(0, group.index)
    return [each ^ mask for each in keys] if mask else keys


def _last_key(hashes: Sequence[int], layout: CacheLayout) -> int | None:
    """The key that shows that a prompt is computed: that of the last of its blocks at which a hit
    may end."""
    group = max(layout.groups, key=lambda each: each.needs_all, default=None)
    if group is None:
        return None
    unit_tokens = math.lcm(layout.alignment_tokens, group.block_size)
    end = len(hashes) * layout.hash_tokens // unit_tokens * unit_tokens
    return cache_key(hashes[end // layout.hash_tokens - 1], group.index) if end else None
