"""Queue limit: the number of requests that may wait, and the refusal of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.http.queue_limit import (
    DEFAULT_RETRY_S,
    MAX_RETRY_S,
    MIN_RETRY_S,
    MOST_OF_ONE,
    QUEUING_KNOWN_S,
    Full,
    Generation,
    QueueLimit,
    Ticket,
    TooManyAtOnceError,
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
    for number in range(10_000):
        let_in(limit, is_urgent=number % 2 == 0)


def begin(
    limit: QueueLimit, name: str, ticket: Ticket, num_choices: int = 1, now_s: float = 0.0
) -> Generation:
    """Engine requests are asked for, and begin."""
    assert limit.reserve(ticket, num_choices, now_s) is None
    return limit.begin(name, ticket, num_choices)


def start(limit: QueueLimit, name: str, ticket: Ticket, now_s: float = 0.0) -> None:
    """The ticket's engine request has its first token."""
    begin(limit, name, ticket)
    limit.on_first_token(name, now_s)


def test_a_first_token_makes_room_and_the_end_of_that_request_does_not_make_more() -> None:
    limit = limit_of(1)
    first = let_in(limit)
    generation = begin(limit, "cmpl-1", first)
    refused(limit)
    limit.on_first_token("cmpl-1", 0.0)
    let_in(limit)
    limit.on_first_token("cmpl-1", 2.0)
    limit.end(generation)
    limit.leave(first)
    refused(limit)


def test_each_engine_request_of_a_request_waits_for_its_own_token() -> None:
    limit = limit_of(6)
    ticket = let_in(limit)
    generations = [begin(limit, f"cmpl-{prompt}", ticket, 2) for prompt in range(3)]
    assert refused(limit).num_waiting == 6
    limit.on_first_token("cmpl-1", 0.0)
    let_in(limit)
    assert refused(limit).num_waiting == 6
    for generation in generations:
        limit.end(generation)
    limit.leave(ticket)
    assert limit.num_waiting == 1


def test_they_wait_when_it_is_known_of_them_and_before_they_begin() -> None:
    limit = limit_of(4)
    ticket = let_in(limit)
    for _ in range(3):
        assert limit.reserve(ticket, 1, 0.0) is None
    assert limit.num_waiting == 3
    limit.begin("cmpl-0", ticket, 1)
    assert limit.num_waiting == 3
    limit.leave(ticket)
    assert limit.num_waiting == 1, "what never begins does not wait when its request has ended"


def test_a_request_with_more_of_them_than_there_is_room_for_is_refused() -> None:
    limit = limit_of(10)
    let_in(limit)
    many = let_in(limit)
    for _ in range(4):
        assert limit.reserve(many, 2, 0.0) is None
    full = Full(num_waiting=1, limit=10, retry_after_s=DEFAULT_RETRY_S, num_asked=10)
    assert limit.reserve(many, 2, 0.0) == full == many.refused
    limit.leave(many)
    assert limit.num_waiting == 1


def test_a_request_with_more_of_them_than_others_elsewhere_leave_room_for_is_refused() -> None:
    limit = limit_of(10)
    many = let_in(limit)
    limit.on_queuing(5, 0.0)
    full = Full(num_waiting=4, limit=10, retry_after_s=DEFAULT_RETRY_S, num_asked=7)
    assert limit.reserve(many, 7, 0.0) == full
    assert limit.reserve(many, 6, 0.0) is None


def test_where_nothing_else_waits_it_may_have_any_number_and_others_wait_for_room() -> None:
    limit = limit_of(10)
    many = let_in(limit)
    for prompt in range(1000):
        begin(limit, f"cmpl-{prompt}", many)
    assert refused(limit).num_waiting == 1000
    for prompt in range(990):
        limit.on_first_token(f"cmpl-{prompt}", 0.0)
        refused(limit)
    limit.on_first_token("cmpl-990", 0.0)
    let_in(limit)


def test_one_request_has_no_more_of_them_than_a_front_end_begins_in_a_moment() -> None:
    """Not even where nothing else waits, and without a limit: a million would stop all streams for
    minutes."""
    for limit in (limit_of(10), QueueLimit(None, 0.0)):
        many = let_in(limit)
        for _ in range(8):
            assert limit.reserve(many, MOST_OF_ONE // 8, 0.0) is None
        with pytest.raises(TooManyAtOnceError, match=r"4,097 prompts and choices: .*in parts"):
            limit.reserve(many, 1, 0.0)
        assert limit.num_waiting == MOST_OF_ONE
        limit.leave(many)
        assert limit.num_waiting == 0


def test_of_those_that_queue_on_instances_none_of_its_own_counts_as_anothers() -> None:
    limit = limit_of(10)
    many = let_in(limit)
    for prompt in range(1000):
        begin(limit, f"cmpl-{prompt}", many)
    limit.on_first_token("cmpl-0", 0.0)
    limit.on_queuing(999, 0.0)
    assert refused(limit).num_waiting == 999
    limit.on_queuing(1005, 0.0)
    assert refused(limit).num_waiting == 1005


def test_a_request_that_has_started_is_not_refused_any_more() -> None:
    """Its next turn, or the next step of a beam search, waits as well, but was let in."""
    limit = limit_of(3)
    ticket = let_in(limit)
    start(limit, "resp_1", ticket)
    for _ in range(3):
        let_in(limit)
    begin(limit, "resp_1", ticket, 2)
    assert refused(limit).num_waiting == 5


def test_requests_of_one_name_wait_each_for_its_own_token() -> None:
    """Some proxies give all requests of a session one X-Request-Id."""
    limit = limit_of(3)
    tickets = [let_in(limit) for _ in range(3)]
    generations = [begin(limit, "chatcmpl-session", ticket) for ticket in tickets]
    for num_waiting in (2, 1, 0):
        limit.on_first_token("chatcmpl-session", 1.0)
        assert limit.num_waiting == num_waiting
    for ticket, generation in zip(tickets, generations, strict=True):
        limit.end(generation)
        limit.leave(ticket)
    assert limit.num_waiting == 0


def test_a_request_that_ends_without_a_token_makes_room() -> None:
    limit = limit_of(1)
    limit.leave(let_in(limit))
    let_in(limit)


def test_a_request_waits_as_long_as_anybody_waits_for_it() -> None:
    """An answer in the background is worked on when its connection has long ended."""
    limit = limit_of(1)
    ticket = let_in(limit)
    generation = begin(limit, "resp_1", ticket)
    limit.leave(ticket)
    refused(limit)
    limit.end(generation)
    assert limit.num_waiting == 0
    begin(limit, "resp_2", ticket)
    refused(limit)
    limit.on_first_token("resp_2", 1.0)
    let_in(limit)


def test_what_is_asked_for_behind_the_answer_waits_as_well() -> None:
    limit = limit_of(10)
    ticket = let_in(limit)
    limit.leave(ticket)
    assert limit.reserve(ticket, 2, 0.0) is None
    assert limit.num_waiting == 2


def test_two_requests_of_one_name_do_not_confuse_the_count() -> None:
    limit = limit_of(5)
    one, other = let_in(limit), let_in(limit)
    first, second = begin(limit, "cmpl-x", one), begin(limit, "cmpl-x", other)
    limit.on_first_token("cmpl-x", 0.0)
    limit.end(first)
    limit.leave(one)
    limit.on_first_token("cmpl-x", 0.0)
    limit.end(second)
    limit.leave(other)
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
    limit.on_queuing(4, 0.0)
    let_in(limit)
    assert refused(limit).num_waiting == 5
    limit.on_queuing(0, 0.0)
    let_in(limit)


def test_fewer_that_queue_on_the_instances_than_wait_here_make_no_room() -> None:
    """Those that are on their way to an instance do not queue there yet."""
    limit = limit_of(5)
    for _ in range(5):
        let_in(limit)
    limit.on_queuing(2, 0.0)
    assert refused(limit).num_waiting == 5


def test_what_was_reported_counts_no_more_when_no_report_has_followed() -> None:
    """The scheduler has died in a burst, and has no successor yet."""
    limit = limit_of(1000)
    limit.on_queuing(1005, 0.0)
    late_s = QUEUING_KNOWN_S - 0.1
    assert limit.full(late_s, is_urgent=False) == Full(1005, 1000, DEFAULT_RETRY_S)
    limit.on_queuing(1004, late_s)
    assert refused(limit, now_s=late_s + 1.0).num_waiting == 1004
    assert limit.full(10.0, is_urgent=False) is None
    begin(limit, "cmpl-1", let_in(limit, now_s=10.0), 1000, 10.0)
    assert refused(limit, now_s=10.0).num_waiting == 1000, "its own it counts itself"


def test_the_own_requests_that_the_instances_report_count_once() -> None:
    limit = limit_of(5)
    for _ in range(4):
        let_in(limit)
    limit.on_queuing(4, 0.0)
    let_in(limit)


@pytest.mark.parametrize(
    ("starts_s", "now_s", "num_waiting", "retry_after_s"),
    [
        # Two starts a second, and ten that wait.
        ([60.0, 60.5, 61.0, 61.5], 62.0, 10, 5),
        # Part of a second counts as one.
        ([60.0, 60.5, 61.0, 61.5], 62.0, 9, 5),
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
        start(limit, f"cmpl-{start_s}", let_in(limit), start_s)
    for _ in range(num_waiting):
        let_in(limit)
    assert refused(limit, now_s=now_s).retry_after_s == retry_after_s


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["enter", "reserve", "begin", "token", "end", "leave"]),
            st.integers(1, 3),
        )
    ),
    max_queued=st.integers(1, 6),
)
def test_places_are_neither_lost_nor_given_twice(
    steps: list[tuple[int, str, int]], max_queued: int
) -> None:
    limit = limit_of(max_queued)
    tickets: list[Ticket] = []
    # Each ticket's engine requests: those that are to begin, and those that wait since.
    reserved: list[int] = []
    begun: list[list[tuple[Generation, int]]] = []
    for number, step, num in steps:
        waiting = sum(reserved) + sum(each[1] for its in begun for each in its)
        assert limit.num_waiting == waiting
        if step == "enter":
            entered = limit.enter(0.0, is_urgent=False)
            assert isinstance(entered, Full) == (waiting >= max_queued)
            if isinstance(entered, Ticket):
                tickets.append(entered)
                reserved.append(1)
                begun.append([])
            continue
        if number >= len(tickets):
            continue
        ticket, name = tickets[number], f"cmpl-{number}"
        if step == "reserve":
            was_new = ticket.is_new
            if limit.reserve(ticket, num, 0.0) is None:
                reserved[number] += num - was_new
        elif step == "begin" and not ticket.is_new:
            begun[number].append((limit.begin(name, ticket, num), num))
            reserved[number] -= min(num, reserved[number])
        elif step == "token":
            limit.on_first_token(name, 0.0)
            its = begun[number]
            for place, (generation, num_waiting) in enumerate(its):
                if num_waiting:
                    its[place] = (generation, num_waiting - 1)
                    break
        elif step == "end" and begun[number]:
            limit.end(begun[number].pop()[0])
        elif step == "leave":
            limit.leave(ticket)
            reserved[number] = 0
    for ticket, its in zip(tickets, begun, strict=True):
        for generation, _ in its:
            limit.end(generation)
        limit.leave(ticket)
    assert limit.num_waiting == 0


def test_a_request_that_was_let_in_keeps_its_place_whatever_others_report() -> None:
    """It asks for no more than it has."""
    limit = limit_of(4)
    ticket = let_in(limit)
    limit.on_queuing(1000, 0.0)
    refused(limit)
    assert limit.reserve(ticket, 1, 0.0) is None
    assert limit.num_waiting == 1
    assert isinstance(limit.reserve(ticket, 1, 0.0), Full)
