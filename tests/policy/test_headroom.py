"""Headrooms count only as far as the other instances can bear them (Sterna's own rule)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.policy.dispatch import choose
from sterna.policy.headroom import MAX_GROWTH, shared
from sterna.policy.pairing import move_helps, pair
from sterna.policy.presets import STERNA
from sterna.policy.virtual_usage import Candidate
from sterna.types import HIGH
from tests.policy.builders import (
    M,
    candidate,
    evenly_loaded,
    instance,
    new_request,
    queuing,
    running,
)

HEADROOM = M - 1_600


def host(instance_id: str = "host", normal_tokens: int = 0) -> Candidate:
    """An instance with a high-priority request of 160 tokens, and a normal one."""
    requests = [running(f"{instance_id}-high", 160, priority=HIGH)]
    if normal_tokens:
        requests.append(running(f"{instance_id}-normal", normal_tokens))
    return candidate(instance(instance_id, running=requests), STERNA)


def idle(instance_id: str) -> Candidate:
    return candidate(instance(instance_id), STERNA)


def full(instance_id: str) -> Candidate:
    return candidate(evenly_loaded(instance_id, M, 12), STERNA)


def test_without_headrooms_nothing_changes() -> None:
    candidates = (idle("i0"), full("i1"))
    assert tuple(shared(candidates)) == candidates


def test_one_of_many_instances_gives_its_whole_headroom() -> None:
    """31 of 32 give none, and have far more room than it takes."""
    first, *others = shared([host(), *(idle(f"i{k}") for k in range(31))])
    assert first.headroom_share == 1.0
    assert first.freeness == M - 160 - HEADROOM
    assert [each.headroom_share for each in others] == [1.0] * 31


def test_one_of_two_instances_gives_two_fifths_of_its_memory() -> None:
    share = shared([host(), idle("i1")])[0].headroom_share
    assert share * HEADROOM / M == pytest.approx(0.393, abs=0.001)


@pytest.mark.parametrize(("num_hosts", "num_others"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 14)])
def test_the_batches_of_normal_requests_grow_by_so_much_and_no_more(
    num_hosts: int, num_others: int
) -> None:
    """Batches are as large as balanced freeness has them; most requests are where one is large."""
    hosts = [host(f"h{k}") for k in range(num_hosts)]
    share = shared([*hosts, *(idle(f"i{k}") for k in range(num_others))])[0].headroom_share
    assert 0.0 < share < 1.0
    batches = [1.0 - share * HEADROOM / M] * num_hosts + [1.0] * num_others
    equal = sum(batches) / len(batches)
    found = sum(batch * batch for batch in batches) / sum(batches)
    assert found / equal == pytest.approx(1.0 + MAX_GROWTH)


def test_no_headroom_counts_where_all_instances_give_one() -> None:
    """There is nobody to whom normal requests could go: all of them are equal again."""
    assert [each.headroom_share for each in shared([host("i0"), host("i1")])] == [0.0, 0.0]


def test_a_headroom_is_no_larger_than_the_room_that_the_others_have() -> None:
    """Three instances are full but for 500 tokens of one, which is what 11,072 shrink to."""
    nearly = candidate(evenly_loaded("i3", M - 500, 1), STERNA)
    first, *_ = shared([host(), full("i1"), full("i2"), nearly])
    assert first.headroom_share == 500 / HEADROOM
    assert first.freeness == M - 160 - 500


def test_what_an_overloaded_instance_lacks_takes_no_room_from_the_others() -> None:
    """Its queue waits where it is: 500 tokens are free elsewhere, whatever it is short of."""
    overloaded = replace(evenly_loaded("i1", M, 12), queuing=(queuing("head", 3_200),))
    others = [candidate(overloaded, STERNA), full("i2")]
    nearly = candidate(evenly_loaded("i3", M - 500, 1), STERNA)
    on_its_way = candidate(evenly_loaded("i4", M, 12), STERNA, in_flight=[new_request(3_200)])
    assert shared([host(), *others, nearly, on_its_way])[0].headroom_share == 500 / HEADROOM


def test_a_headroom_of_a_single_token_counts_by_its_share_as_well() -> None:
    """Where the memory is one token above the target load, and nothing is free elsewhere."""
    high = running("high", 160, priority=HIGH)
    small = candidate(instance("i0", total_tokens=1_601, running=[high]), STERNA)
    assert small.freeness == 1_440
    first, _ = shared([small, full("i1")])
    assert (first.headroom_share, first.freeness) == (0.0, 1_441)


def test_requests_on_their_way_take_room_as_well() -> None:
    on_its_way = candidate(instance("i1"), STERNA, in_flight=[new_request(M)])
    assert shared([host(), on_its_way])[0].headroom_share == 0.0


def test_a_terminating_instance_has_no_room_and_gives_none() -> None:
    ending = candidate(instance("i1", is_terminating=True), STERNA)
    first, other = shared([host(), ending])
    assert (first.headroom_share, other.headroom_share) == (0.0, 1.0)
    both = [host("i0"), candidate(instance("i1", is_terminating=True), STERNA), idle("i2")]
    assert shared(both)[0].headroom_share == shared([host(), idle("i1")])[0].headroom_share


def test_a_terminating_instance_with_a_headroom_leaves_that_of_the_others_alone() -> None:
    """It has it by their share, and all of it where there are none: it takes no requests."""
    high = running("high", 160, priority=HIGH)
    ending = candidate(instance("i9", running=[high], is_terminating=True), STERNA)
    share = shared([host(), idle("i1")])[0].headroom_share
    both = shared([host(), ending, idle("i1")])
    assert [each.headroom_share for each in both] == [share, share, 1.0]
    assert [each.headroom_share for each in shared([ending, idle("i1")])] == [1.0, 1.0]


def test_a_normal_request_joins_a_high_one_rather_than_queue_elsewhere() -> None:
    """2,160 tokens are 560 above the target load, and 100 are left elsewhere: with the whole
    headroom, the instance with 10,000 tokens free would be the less free one."""
    busy_host = host(normal_tokens=2_000)
    candidates = [busy_host, candidate(evenly_loaded("i1", M - 100, 10), STERNA)]
    request = new_request(320)
    assert choose(request, candidates, STERNA) == "i1"
    assert choose(request, shared(candidates), STERNA) == "host"


def test_no_normal_request_is_moved_away_to_where_there_is_no_room() -> None:
    busy_host = host(normal_tokens=2_000)
    roomy = candidate(evenly_loaded("i1", M // 2, 5), STERNA)
    assert pair([busy_host, roomy], STERNA) == {"host": "i1"}
    assert pair(shared([busy_host, roomy]), STERNA) == {}


def test_a_high_priority_request_moves_where_the_headroom_that_counts_fits() -> None:
    """It takes its headroom along to an instance that has none yet. By hand, with three tenths of
    11,072 tokens: 64 - 3,322 = -3,258 here; there, -3,250 are more, and -3,266 less."""
    highs = [running("a", 4_000, priority=HIGH), running("b", 4_000, priority=HIGH)]
    source = candidate(instance("i0", running=highs, reserved_tokens=M - 8_064), STERNA)
    source = replace(source, headroom_share=0.3)
    for used_tokens, helps in ((8_600, True), (8_616, False)):
        destination = candidate(evenly_loaded("i1", used_tokens, 1), STERNA)
        assert move_helps(source, destination, STERNA) is helps


def test_a_normal_request_moves_to_where_a_headroom_counts_by_its_share() -> None:
    """By hand: 32 / 20 steps here; there, M - 1,360 - 3,322 - 632 = 7,358 / 3 with three tenths of
    the headroom, and -392 with all of it."""
    source = candidate(evenly_loaded("i0", 12_640, 20), STERNA)
    there = host("i1", normal_tokens=1_200)
    assert move_helps(source, replace(there, headroom_share=0.3), STERNA)
    assert not move_helps(source, there, STERNA)


def test_a_move_from_where_a_headroom_counts_by_its_share_must_narrow_the_gap() -> None:
    """By hand, with a quarter of 11,072 tokens, 2,768, kept free on an instance of 2,800: 32 / 2 =
    16 steps become 6,032 when the normal request of 6,000 leaves. 12,000 / 4 = 3,000 steps become
    1,200: a gap of 2,984 would be one of 4,832. 24,000 / 6 = 4,000 become 2,571: the gap of 3,984
    would be one of 3,461."""
    requests = [running("high", 160, priority=HIGH), running("normal", 6_000)]
    source = candidate(instance("i0", running=requests, reserved_tokens=3_712), STERNA)
    source = replace(source, headroom_share=0.25)
    assert source.freeness == 16
    for num_running, free_tokens, helps in ((4, 12_000, False), (6, 24_000, True)):
        others = [running(f"r{k}", 160) for k in range(num_running)]
        total_tokens = free_tokens + 160 * num_running
        roomy = candidate(instance("i1", total_tokens=total_tokens, running=others), STERNA)
        assert move_helps(source, roomy, STERNA) is helps


loads = st.integers(0, M // 16).map(lambda blocks: 16 * blocks)


@given(
    normal=st.lists(loads, min_size=0, max_size=5),
    hosts=st.lists(loads, min_size=1, max_size=5),
)
def test_a_share_is_a_share_and_what_counts_fits_the_others(
    normal: list[int], hosts: list[int]
) -> None:
    candidates = [host(f"h{k}", max(16, tokens)) for k, tokens in enumerate(hosts)]
    others = [
        candidate(evenly_loaded(f"i{k}", max(16, each), 1), STERNA) for k, each in enumerate(normal)
    ]
    result = shared([*candidates, *others])
    shares = {each.headroom_share for each in result[: len(hosts)]}
    assert len(shares) == 1
    share = shares.pop()
    assert 0.0 <= share <= 1.0
    room_tokens = sum(max(0.0, each.load.normal_free_tokens) for each in others)
    assert share * HEADROOM * len(hosts) <= room_tokens + 1e-6
    for before, after in zip(candidates, result, strict=False):
        assert after == replace(before, headroom_share=share)
        assert after.freeness >= before.freeness


def test_the_paper_counts_every_headroom_in_full() -> None:
    """Algorithm 1, line 7: GetHeadroom depends on the instance alone. The policy `llumnix` has it
    so, which is what the evaluation's figures run with."""
    assert host().freeness == pytest.approx(M - 160 - HEADROOM)
