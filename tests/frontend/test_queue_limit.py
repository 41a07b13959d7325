"""How many requests may wait, and what is said to those that may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.queue_limit import (
    DEFAULT_RETRY_S,
    MAX_RETRY_S,
    MIN_RETRY_S,
    Full,
    QueueLimit,
    Ticket,
)


def limit_of(max_queued: int | None, reserve: float = 0.1) -> QueueLimit:
    return QueueLimit(max_queued, reserve)


def let_in(limit: QueueLimit, *, is_urgent: bool = False, now_s: float = 0.0) -> Ticket:
    ticket = limit.enter(now_s, is_urgent=is_urgent)
    assert isinstance(ticket, Ticket)
    return ticket


def refused(limit: QueueLimit, *, is_urgent: bool = False, now_s: float = 0.0) -> Full:
    full = limit.enter(now_s, is_urgent=is_urgent)
    assert isinstance(full, Full)
    return full


def test_one_more_than_the_limit_is_refused() -> None:
    limit = limit_of(3)
    for _ in range(3):
        let_in(limit)
    assert refused(limit) == Full(num_waiting=3, limit=3, retry_after_s=DEFAULT_RETRY_S)


def test_without_a_limit_nobody_is_refused() -> None:
    limit = limit_of(None)
    for _ in range(10_000):
        let_in(limit)


def begin(limit: QueueLimit, name: str, ticket: Ticket, now_s: float = 0.0) -> None:
    """The ticket's engine request has its first token."""
    limit.expect(name, ticket)
    limit.on_first_token(name, now_s)


def test_a_first_token_makes_room_and_the_end_of_that_request_does_not_make_more() -> None:
    limit = limit_of(1)
    first = let_in(limit)
    begin(limit, "cmpl-1", first)
    let_in(limit)
    limit.on_first_token("cmpl-1", 2.0)
    limit.forget("cmpl-1", first)
    first.release()
    refused(limit)


def test_requests_of_one_name_wait_each_for_its_own_token() -> None:
    """Some proxies give all requests of a session one X-Request-Id."""
    limit = limit_of(3)
    tickets = [let_in(limit) for _ in range(3)]
    for ticket in tickets:
        limit.expect("chatcmpl-session", ticket)
    for num_waiting in (2, 1, 0):
        limit.on_first_token("chatcmpl-session", 1.0)
        assert limit.num_waiting == num_waiting
    for ticket in tickets:
        limit.forget("chatcmpl-session", ticket)
        ticket.release()
    assert limit.num_waiting == 0


def test_a_request_that_ends_without_a_token_makes_room() -> None:
    limit = limit_of(1)
    let_in(limit).release()
    let_in(limit)


def test_a_request_waits_as_long_as_anybody_waits_for_it() -> None:
    """An answer in the background is worked on when its connection has long ended."""
    limit = limit_of(1)
    ticket = let_in(limit)
    limit.expect("resp_1", ticket)
    ticket.release()
    refused(limit)
    limit.forget("resp_1", ticket)
    assert limit.num_waiting == 0
    limit.expect("resp_2", ticket)
    refused(limit)
    limit.on_first_token("resp_2", 1.0)
    let_in(limit)


def test_two_requests_of_one_name_do_not_confuse_the_count() -> None:
    limit = limit_of(5)
    one, other = let_in(limit), let_in(limit)
    limit.expect("cmpl-x", one)
    limit.expect("cmpl-x", other)
    limit.on_first_token("cmpl-x", 0.0)
    limit.forget("cmpl-x", one)
    one.release()
    limit.on_first_token("cmpl-x", 0.0)
    limit.forget("cmpl-x", other)
    other.release()
    assert limit.num_waiting == 0


def test_a_token_of_a_request_that_nobody_knows_is_nothing() -> None:
    limit = limit_of(1)
    let_in(limit)
    limit.on_first_token("cmpl-unknown", 0.0)
    refused(limit)


def test_urgent_requests_have_a_reserve() -> None:
    limit = limit_of(20, reserve=0.1)
    for _ in range(20):
        let_in(limit)
    refused(limit)
    for _ in range(2):
        let_in(limit, is_urgent=True)
    assert refused(limit, is_urgent=True).limit == 22


def test_the_reserve_has_at_least_one_place() -> None:
    limit = limit_of(1, reserve=0.1)
    let_in(limit)
    let_in(limit, is_urgent=True)
    refused(limit, is_urgent=True)


def test_what_queues_on_the_instances_beyond_the_own_requests_counts() -> None:
    """Those are of other front ends, or were preempted."""
    limit = limit_of(5)
    let_in(limit)
    limit.on_queuing(4)
    let_in(limit)
    assert refused(limit).num_waiting == 5
    limit.on_queuing(0)
    let_in(limit)


def test_the_own_requests_that_the_instances_report_count_once() -> None:
    limit = limit_of(5)
    for _ in range(4):
        let_in(limit)
    limit.on_queuing(4)
    let_in(limit)


@pytest.mark.parametrize(
    ("starts_s", "now_s", "num_waiting", "retry_after_s"),
    [
        # Two starts a second, and ten that wait.
        ([0.0, 0.5, 1.0, 1.5], 2.0, 10, 5),
        # Fast: a second is the least that can be said.
        ([0.0, 0.001, 0.002], 0.003, 10, MIN_RETRY_S),
        # Nothing has started for a minute.
        ([0.0], 60.0, 10, MAX_RETRY_S),
    ],
)
def test_the_time_to_come_again_is_that_of_the_queue_at_its_pace(
    starts_s: list[float], now_s: float, num_waiting: int, retry_after_s: int
) -> None:
    limit = limit_of(num_waiting)
    for start_s in starts_s:
        begin(limit, f"cmpl-{start_s}", let_in(limit), start_s)
    for _ in range(num_waiting):
        let_in(limit)
    assert refused(limit, now_s=now_s).retry_after_s == retry_after_s


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["enter", "start", "hold", "release"]))
    ),
    max_queued=st.integers(1, 4),
)
def test_places_are_neither_lost_nor_given_twice(
    steps: list[tuple[int, str]], max_queued: int
) -> None:
    limit = limit_of(max_queued)
    tickets: list[Ticket] = []
    holders: list[int] = []
    started: list[bool] = []
    for number, step in steps:
        if step == "enter":
            is_full = limit.num_waiting >= max_queued
            entered = limit.enter(0.0, is_urgent=False)
            assert isinstance(entered, Full) == is_full
            if isinstance(entered, Ticket):
                tickets.append(entered)
                holders.append(1)
                started.append(False)
        elif number < len(tickets):
            if step == "start":
                tickets[number].start()
                started[number] = True
            elif step == "hold":
                tickets[number].hold()
                holders[number] += 1
            elif holders[number]:
                tickets[number].release()
                holders[number] -= 1
        waiting = [n for n, has in zip(holders, started, strict=True) if n and not has]
        assert limit.num_waiting == len(waiting)
