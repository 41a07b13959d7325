"""Hits in prefix caches of several KV cache groups: their definition, and the cost of a search."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sterna.messages.actors import CacheReport, DispatchRequest
from sterna.scheduler.prefix_index import PrefixIndex
from sterna.types import (
    NORMAL,
    CacheGroup,
    CacheLayout,
    FrontendId,
    InstanceId,
    RequestId,
    cache_key,
    packed,
)

HASH = 4
"""Tokens of a hash."""

LAYOUTS = {
    "full and a window": CacheLayout(HASH, 4, (CacheGroup(0, 4), CacheGroup(1, 4, 3))),
    "two windows": CacheLayout(HASH, 8, (CacheGroup(0, 8, 1), CacheGroup(1, 4, 3))),
    "full and chunks": CacheLayout(
        HASH, 4, (CacheGroup(0, 4), CacheGroup(1, 4, None, 10), CacheGroup(2, 4, None, 16))
    ),
    "blocks of several sizes": CacheLayout(
        HASH, 16, (CacheGroup(0, 16), CacheGroup(1, 4, 2), CacheGroup(2, 8))
    ),
    "full and a state": CacheLayout(HASH, 4, (CacheGroup(0, 4), CacheGroup(1, 16, 1))),
    "a state inside blocks": CacheLayout(HASH, 4, (CacheGroup(0, 16), CacheGroup(1, 16, 1))),
    "a window, and drafts": CacheLayout(HASH, 4, (CacheGroup(0, 4, 4, 0, 4),)),
    "full and a window, and drafts": CacheLayout(
        HASH, 4, (CacheGroup(0, 4, None, 0, 4), CacheGroup(1, 4, 4, 0, 4))
    ),
    "full and a state, and drafts": CacheLayout(
        HASH, 4, (CacheGroup(0, 4, None, 0, 4), CacheGroup(1, 16, 1))
    ),
    "a state inside blocks, and drafts": CacheLayout(
        HASH, 4, (CacheGroup(0, 16, None, 0, 4), CacheGroup(1, 16, 1))
    ),
    "blocks of several sizes, and drafts": CacheLayout(
        HASH, 16, (CacheGroup(0, 16, None, 0, 16), CacheGroup(1, 4, 3, 0, 4), CacheGroup(2, 16, 1))
    ),
}


def asked(num_hashes: int, num_more: int) -> DispatchRequest:
    """A request whose hashes are 1, 2, and so on."""
    num_tokens = num_hashes * HASH + num_more
    return DispatchRequest(
        *(FrontendId(0), RequestId("r"), num_tokens, 0.0, NORMAL, NORMAL),
        prompt_tokens=num_tokens,
        block_hashes=packed(range(1, num_hashes + 1)),
    )


def key_at(end: int, group: CacheGroup) -> int:
    return cache_key(end // HASH, group.index)


def keys_of(layout: CacheLayout, lacks: Iterable[tuple[int, int]], num_hashes: int) -> set[int]:
    """The keys of an instance that has all but these: group and hash."""
    ends = range(HASH, num_hashes * HASH + 1, HASH)
    every = {key_at(end, group) for group in layout.groups for end in ends}
    groups = layout.groups
    return every - {key_at(HASH * each, groups[group % len(groups)]) for group, each in lacks}


def longest_hit(request: DispatchRequest, layout: CacheLayout, keys: set[int]) -> int:
    """Tried from the last end on."""
    num_hashes = len(request.block_hashes) // 8
    step = layout.alignment_tokens
    # The last token is always computed.
    before_last = min(num_hashes * HASH, request.prompt_tokens - 1)
    most = before_last if len(layout.groups) == 1 else num_hashes * HASH
    last = before_last // step * step
    for end in range(last, 0, -step):
        if all(
            has(each, end + each.dropped_tokens, min(last + each.dropped_tokens, most), step, keys)
            for each in layout.groups
        ):
            return end
    return 0


def has(group: CacheGroup, end: int, last: int, step: int, keys: set[int]) -> bool:
    """Whether all that is needed of the group is there, up to this end."""
    size = group.block_size
    if end > last:
        return False
    if group.needs_all:
        whole = all(key_at(each, group) in keys for each in range(size, end + 1, size))
        # A part of the last block is in it up to one of these.
        parts = range(end, min(end // size * size + size, last) + 1, step)
        return whole and (end % size == 0 or any(key_at(each, group) in keys for each in parts))
    unit = min(size, step)
    if group.chunk_tokens:
        first = end // group.chunk_tokens * group.chunk_tokens // size * size
    else:
        first = max(0, end - (group.num_last_blocks or 0) * unit)
    return all(key_at(each, group) in keys for each in range(end, first, -unit))


def index_of(layout: CacheLayout, contents: Iterable[set[int]]) -> PrefixIndex:
    """An index of instances with these keys."""
    index = PrefixIndex()
    for number, keys in enumerate(contents):
        index.on_report(CacheReport(InstanceId(f"i{number}"), packed(keys), b"", layout))
    return index


NUM_HASHES = 18

LACKS = st.one_of(
    st.sets(st.tuples(st.integers(0, 1), st.integers(1, NUM_HASHES)), max_size=8),
    st.builds(
        lambda group, first: {(group, each) for each in range(first, NUM_HASHES + 1)},
        st.integers(0, 1),
        st.integers(1, NUM_HASHES),
    ),
)
"""Single blocks, or all from one on."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_hits_are_those_of_the_definition(name: str) -> None:
    layout = LAYOUTS[name]

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.builds(set.union, LACKS, LACKS), min_size=1, max_size=4),
        st.integers(1, NUM_HASHES),
        st.integers(0, HASH - 1),
    )
    def test(lacks: list[set[tuple[int, int]]], num_hashes: int, num_more: int) -> None:
        contents = [keys_of(layout, each, NUM_HASHES) for each in lacks]
        request = asked(num_hashes, num_more)
        hits = [longest_hit(request, layout, each) for each in contents]
        expected = {InstanceId(f"i{number}"): hit for number, hit in enumerate(hits) if hit}
        assert index_of(layout, contents).cached_tokens(request) == expected

    test()


class _Counted(dict[int, int]):
    """Counts what is looked up."""

    num_gets = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.num_gets += 1
        return super().get(key, default)


@pytest.mark.parametrize("distance", [1, 8, 1_000_000], ids=["no", "too few", "all"])
def test_each_block_is_looked_up_once_in_each_group(distance: int) -> None:
    """Also where windows lack blocks everywhere, so that no end of the prompt is a hit."""
    num_hashes = 2_000
    layout = CacheLayout(HASH, HASH, (CacheGroup(0, HASH), CacheGroup(1, HASH, 8)))
    lacks = [(1, each) for each in range(1, num_hashes + 1) if each % distance == 0]
    contents = [keys_of(layout, lacks, num_hashes), keys_of(layout, [(0, 1)], num_hashes)]
    index = index_of(layout, contents)
    index._holders = counted = _Counted(index._holders)
    found = index.cached_tokens(asked(num_hashes, 1))
    expected = {1: 0, 8: 7 * HASH, 1_000_000: num_hashes * HASH}[distance]
    assert found.get(InstanceId("i0"), 0) == expected
    assert counted.num_gets <= 2 * num_hashes
