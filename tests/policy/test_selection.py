"""The requests that move from a source instance (Section 4.4.3, migration)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sterna.config import Victim
from sterna.policy.presets import LLUMNIX, LLUMNIX_BASE
from sterna.policy.selection import candidates_to_move
from sterna.types import HIGH, OUTPUT_LENGTHS, Immovable, InstanceView, Priority, RequestStatus
from tests.policy.builders import M, first_to_move, freeness, instance, queuing, running, views

FULL = 11_800
"""Reserved tokens with which the memory is short whatever runs besides, on an instance of M."""


def order(view: InstanceView, victim: Victim = Victim.SHORTEST) -> list[str]:
    policy = replace(LLUMNIX, victim=victim)
    return [each.request_id for each in candidates_to_move(view, policy)]


def test_lower_priorities_and_shorter_sequences_move_first() -> None:
    """Section 4.4.3: "prefers the requests with lower priorities and shorter sequence lengths when
    choosing the requests to migrate." """
    view = instance(
        running=[
            running("high-short", 16, priority=HIGH),
            running("long", 800),
            running("short", 160),
            running("high-long", 320, priority=HIGH),
        ],
        reserved_tokens=FULL,
    )
    assert order(view) == ["short", "long", "high-short", "high-long"]


def test_what_frees_most_memory_for_what_is_copied_can_move_first() -> None:
    """By hand: 1,000 tokens are copied to free 100, 1,100 to free 550, 320 to free all of them."""
    view = instance(
        running=[
            running("a", 1_008, num_tokens=1_000, num_shared_tokens=900),
            running("b", 1_104, num_tokens=1_100, num_shared_tokens=550),
            running("c", 320),
            running("d", 160),
        ],
        reserved_tokens=FULL,
    )
    assert order(view, Victim.FREEING) == ["d", "c", "b", "a"]
    assert order(view) == ["d", "c", "a", "b"]


BALANCE = replace(LLUMNIX, balance_ratio=1.2, balance_after_tokens=100)


def test_with_memory_only_long_outputs_move_for_balance() -> None:
    """Those that have generated most first, the lowest priority before them; where memory is short,
    the usual order holds."""
    requests = [
        running("short", 16, num_output_tokens=10),
        running("fed", 800, num_output_tokens=99),
        running("long", 320, num_output_tokens=100),
        running("longest", 480, num_output_tokens=300),
    ]
    rich, poor = instance(running=requests), instance(running=requests, reserved_tokens=FULL)
    assert [each.request_id for each in candidates_to_move(rich, BALANCE)] == ["longest", "long"]
    assert [each.request_id for each in candidates_to_move(poor, BALANCE)] == order(poor)
    assert order(rich) == order(poor) == ["short", "long", "longest", "fed"]


def test_with_a_horizon_what_is_expected_to_use_most_memory_moves_for_balance() -> None:
    """By hand, in 32 steps, with 92 outputs beyond 64 tokens, 72 of them beyond 96, and eight that
    count as longer than all: a request with 64 goes on with a chance of 0.8, one with 96 of 0.1."""
    requests = [
        running("young", 320, num_output_tokens=64),
        running("old", 1_600, num_output_tokens=96),
        running("younger", 640, num_output_tokens=48),
    ]
    num_ended = tuple({64: 20, 96: 72}.get(length, 0) for length in OUTPUT_LENGTHS)
    view = replace(instance(running=requests), num_ended=num_ended)
    by_length = replace(BALANCE, balance_after_tokens=64)
    by_coming = replace(by_length, balance_horizon_steps=32)
    assert [each.request_id for each in candidates_to_move(view, by_length)] == ["old", "young"]
    assert [each.request_id for each in candidates_to_move(view, by_coming)] == ["young", "old"]


def test_a_request_that_has_moved_stays_for_a_while_before_it_moves_for_balance() -> None:
    """As many tokens as one that has not moved has generated. Without memory it moves at once."""
    requests = [
        running("just moved", 480, num_output_tokens=300, num_earlier_tokens=201),
        running("moved", 320, num_output_tokens=300, num_earlier_tokens=200),
    ]
    rich, poor = instance(running=requests), instance(running=requests, reserved_tokens=FULL)
    assert [each.request_id for each in candidates_to_move(rich, BALANCE)] == ["moved"]
    assert order(poor) == ["moved", "just moved"]


def test_from_an_instance_with_a_headroom_requests_move_for_that_alone() -> None:
    requests = [
        running("normal", 160, num_output_tokens=10),
        running("high", 320, priority=HIGH, num_output_tokens=300),
    ]
    view = instance(running=requests)
    assert [each.request_id for each in candidates_to_move(view, BALANCE)] == ["normal"]


def test_a_request_with_headroom_stays_where_headrooms_alone_make_a_source() -> None:
    """Section 4.4.2, high-priority requests: it is "the other normal requests" that "will be
    migrated away". The headroom of 11,072 tokens and 1,760 in use are more than the memory; by
    memory alone, 10,912 tokens are free for two requests, far above the threshold of 48 each."""
    high, normal = running("high", 1_600, priority=HIGH), running("normal", 160)
    assert order(instance(running=[high, normal])) == ["normal"]
    alone = instance(running=[high])
    assert freeness(alone, LLUMNIX) < LLUMNIX.source_freeness_steps
    assert order(alone) == []


@pytest.mark.parametrize("is_short", [False, True])
def test_a_request_with_headroom_moves_where_memory_is_short(is_short: bool) -> None:
    """By hand: 48 steps for each of two requests are 96 tokens."""
    highs = [running("a", 320, priority=HIGH), running("b", 640, priority=HIGH)]
    view = instance(running=highs, reserved_tokens=M - 960 - 96 + is_short)
    assert order(view) == (["a", "b"] if is_short else [])
    head = replace(
        instance(running=highs),
        queuing=(queuing("head", M - 960 - 48 * 3 + is_short), queuing("next", 160)),
    )
    assert order(head) == (["a", "b"] if is_short else [])


def test_a_request_with_headroom_moves_where_requests_have_lost_their_memory() -> None:
    policy = replace(LLUMNIX, preempted_make_source=True)
    lost = structs.replace(queuing("lost", 160), num_preemptions=1)
    view = instance(running=[running("high", 320, priority=HIGH)], queuing=[lost])
    assert first_to_move(view, LLUMNIX) is None
    assert first_to_move(view, policy) == view.running[0]
    never_lost = replace(view, queuing=(queuing("new", 160),))
    assert first_to_move(never_lost, policy) is None


@pytest.mark.parametrize(("total_tokens", "expected"), [(1_600, ["high"]), (1_601, [])])
def test_where_the_memory_leaves_no_headroom_a_high_priority_request_moves_like_any_other(
    total_tokens: int, expected: list[str]
) -> None:
    """The target load is 1,600 tokens: the headroom is what the memory has beyond it."""
    view = instance(total_tokens=total_tokens, running=[running("high", 320, priority=HIGH)])
    assert order(view) == expected


def test_every_request_leaves_a_terminating_instance() -> None:
    high = running("high", 320, priority=HIGH)
    assert order(instance(running=[high], is_terminating=True)) == ["high"]


def test_a_rank_above_one_with_headroom_stays_with_it() -> None:
    """What is to be moved before all others never stays behind them."""
    view = instance(running=[running(f"p{p}", 160, priority=Priority(p)) for p in (2, 1, 0)])
    assert order(view) == ["p0"]


def test_every_priority_with_a_headroom_stays_where_headrooms_alone_make_a_source() -> None:
    policy = replace(LLUMNIX, target_load_tokens={HIGH: 1_600, Priority(2): 800})
    high, urgent = running("high", 160, priority=HIGH), running("urgent", 160, priority=Priority(2))
    for others in ([high], [urgent], [high, urgent]):
        crowded = instance(running=[*others, running("normal", 160)])
        assert [each.request_id for each in candidates_to_move(crowded, policy)] == ["normal"]


def test_execution_priority_decides_and_scheduling_priority_does_not() -> None:
    """Section 4.4.1: the execution priority is what gives a request a lower instance load."""
    long = structs.replace(running("long", 800), scheduling_priority=HIGH)
    short = structs.replace(running("short", 160), execution_priority=HIGH)
    assert order(instance(running=[short, long], reserved_tokens=FULL)) == ["long", "short"]


def test_the_sequence_is_measured_in_tokens_and_not_in_blocks() -> None:
    """Both hold ten blocks."""
    view = instance(running=[running("a", 160, num_tokens=159), running("b", 160, num_tokens=147)])
    assert order(view) == ["b", "a"]


@pytest.mark.parametrize(
    ("victim", "expected"),
    [
        (Victim.SHORTEST, ["second", "third", "first", "high"]),
        (Victim.LONGEST, ["first", "third", "second", "high"]),
        (Victim.LAST_STARTED, ["third", "second", "first", "high"]),
    ],
)
def test_the_victim_rule_orders_requests_of_one_priority(
    victim: Victim, expected: list[str]
) -> None:
    view = instance(
        running=[
            running("first", 800),
            running("second", 160),
            running("high", 16, priority=HIGH),
            running("third", 320),
        ],
        reserved_tokens=FULL,
    )
    assert order(view, victim) == expected


def test_ties_go_to_the_smaller_id() -> None:
    assert order(instance(running=[running("b", 160), running("a", 160)])) == ["a", "b"]


@pytest.mark.parametrize("reason", Immovable)
def test_an_immovable_request_is_not_chosen(reason: Immovable) -> None:
    stuck, free = running("stuck", 16, immovable=reason), running("free", 160)
    assert first_to_move(instance(running=[stuck, free]), LLUMNIX) == free
    assert first_to_move(instance(running=[stuck]), LLUMNIX) is None


def test_an_instance_without_requests_has_none_to_move() -> None:
    assert first_to_move(instance(), LLUMNIX) is None


def test_running_requests_leave_to_make_room_for_queuing_ones() -> None:
    """Section 4.4.2, queuing requests: migration "in effect is de-fragmentation for the queuing
    request": it stays, and those that hold its memory leave."""
    view = instance(running=[running("r", 160)], queuing=[queuing("q", 16)])
    assert order(view) == ["r"]
    assert order(instance(queuing=[queuing("q", 16)])) == []


def test_from_a_terminating_instance_the_queue_moves_first_and_in_its_order() -> None:
    """Section 4.4.2: "the remaining requests will be migrated to other instances": all of them,
    and those that wait, whose move copies nothing, before those that run."""
    view = instance(
        running=[running("r", 160)],
        queuing=[
            queuing("head", 800, priority=HIGH),
            queuing("stuck", 48, immovable=Immovable.UNSUPPORTED_REQUEST_FEATURE),
            queuing("last", 16),
        ],
        is_terminating=True,
    )
    assert order(view) == ["head", "last", "r"]


def test_without_priorities_a_high_one_moves_like_any_other() -> None:
    view = instance(running=[running("high", 16, priority=HIGH), running("normal", 160)])
    assert first_to_move(view, LLUMNIX_BASE) == view.running[0]
    assert first_to_move(view, LLUMNIX) == view.running[1]


def test_the_order_knows_every_rank_of_priority() -> None:
    """A rank is compared with other ranks, never with zero as if it were a truth value."""
    ranks = [3, 0, 2, -1, 1]
    view = instance(
        running=[running(f"p{p}", 160, priority=Priority(p)) for p in ranks],
        reserved_tokens=FULL,
    )
    assert order(view) == ["p-1", "p0", "p1", "p2", "p3"]


@given(views(), st.sampled_from(Victim))
def test_the_request_that_was_judged_is_the_request_that_moves(
    view: InstanceView, victim: Victim
) -> None:
    """No candidate is anything but a movable request of this very instance, each is there once,
    and the one selected is the first of them."""
    policy = replace(LLUMNIX, victim=victim)
    candidates = candidates_to_move(view, policy)
    movable = [each for each in (*view.running, *view.queuing) if each.immovable is None]
    if not view.is_terminating:
        movable = [each for each in movable if each.status is RequestStatus.RUNNING]
        without_headrooms = freeness(view, replace(policy, has_priorities=False))
        has_headrooms = view.total_tokens > policy.target_load_tokens[HIGH]
        if has_headrooms and without_headrooms >= policy.source_freeness_steps:
            movable = [each for each in movable if each.execution_priority < HIGH]
    assert sorted(each.request_id for each in candidates) == sorted(
        each.request_id for each in movable
    )
    chosen = first_to_move(view, policy)
    assert chosen is (candidates[0] if candidates else None)
    if chosen is not None and chosen.status is RequestStatus.RUNNING:
        assert chosen.execution_priority == min(
            each.execution_priority for each in movable if each.status is RequestStatus.RUNNING
        )


@given(views())
def test_several_migrations_at_once_take_different_requests(view: InstanceView) -> None:
    """A request that has begun to move is immovable, so that asking again comes to an end."""
    for _ in range(len(view.running) + len(view.queuing) + 1):
        chosen = first_to_move(view, LLUMNIX)
        if chosen is None:
            break
        moving = structs.replace(chosen, immovable=Immovable.MIGRATING)
        view = replace(
            view,
            running=tuple(moving if each is chosen else each for each in view.running),
            queuing=tuple(moving if each is chosen else each for each in view.queuing),
        )
    assert first_to_move(view, LLUMNIX) is None
