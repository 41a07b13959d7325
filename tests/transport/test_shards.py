"""Every block comes to each rank that holds it, and crosses between the instances once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.transport.shards import Shards


@st.composite
def shards(draw: st.DrawFn) -> Shards:
    num_ranks = draw(st.sampled_from([1, 2, 4, 6, 8, 16]))
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    return Shards(num_ranks, tuple(draw(st.lists(st.sampled_from(divisors), max_size=4))))


def one_block_each(known: Shards) -> list[list[int]]:
    """A block in every group, whose id is the group's number."""
    return [[group] for group in range(len(known.of_groups))]


@given(shards())
def test_every_rank_has_the_blocks_of_all_groups_once(known: Shards) -> None:
    blocks = one_block_each(known)
    had: list[Counter[int]] = [Counter() for _ in range(known.num_ranks)]
    ways = [(lead, lead) for lead in known.leads] + known.hops
    for lead, rank in ways:
        had[rank].update(each for group in known.part(blocks, lead, rank) for each in group)
    assert all(each == Counter(range(len(blocks))) for each in had)


@given(shards())
def test_what_ranks_hold_alike_crosses_once(known: Shards) -> None:
    blocks = one_block_each(known)
    crossing = Counter(
        each for lead in known.leads for group in known.part(blocks, lead, lead) for each in group
    )
    for group, num_alike in enumerate(known.of_groups):
        assert crossing[group] == known.num_ranks // num_alike


@given(shards())
def test_a_hop_has_a_block_and_begins_where_the_source_sends_it(known: Shards) -> None:
    blocks = one_block_each(known)
    for lead, rank in known.hops:
        forwarded = known.part(blocks, lead, rank)
        assert any(forwarded)
        assert lead != rank
        assert lead in known.leads
        received = known.part(blocks, lead, lead)
        assert all(ids == received[group] for group, ids in enumerate(forwarded) if ids)


def test_a_latent_cache_beside_sharded_states() -> None:
    known = Shards(4, (4, 1))
    assert known.leads == [0, 1, 2, 3]
    assert known.hops == [(0, 1), (0, 2), (0, 3)]
    assert known.part([[7], [8]], 0, 0) == [[7], [8]]
    assert known.part([[7], [8]], 2, 2) == [[], [8]]
    assert known.part([[7], [8]], 0, 2) == [[7], []]


@pytest.mark.parametrize(("num_ranks", "of_groups"), [(4, (3,)), (2, (1, 0)), (2, (4,))])
def test_ranks_are_a_multiple_of_those_that_hold_the_same(
    num_ranks: int, of_groups: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks} ranks cannot hold the same"):
        Shards(num_ranks, of_groups)
