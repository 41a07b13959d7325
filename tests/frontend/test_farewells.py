"""An instance that is being emptied is told when nothing of a front end is with it any more."""

from sterna.frontend.dispatch import Dispatcher
from sterna.frontend.effects import Effect, ToInstance
from sterna.messages import Dispatched, Farewell, OwnerReply
from sterna.types import RequestId
from tests.frontend.test_dispatch import (
    I0,
    I1,
    I2,
    ME,
    R1,
    R2,
    add,
    dispatcher,
    membership,
    request,
)
from tests.frontend.test_ownership import moved, span


def farewells(under_test: Dispatcher, **delivered: int) -> list[Effect]:
    """What is said where so many tokens of these requests, or all, are with their clients."""
    return under_test.farewells(lambda each: delivered.get(each, 1000))


def farewell(version: int, num_moved: int = 0) -> Effect:
    return ToInstance(I0, Farewell(ME, version, num_moved), None)


def test_an_instance_without_requests_is_told_at_once() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert farewells(under_test) == [farewell(2)]
    assert farewells(under_test) == []


def test_an_instance_is_told_when_the_last_request_there_has_ended_or_moved() -> None:
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    request(under_test, R2)
    under_test.on_moved(moved(I0, 0, R1, R2), 0.5)
    under_test.on_membership(membership(2, I0, I1, scheduler=None, terminating=(I0,)), 1.0)
    assert farewells(under_test) == []
    under_test.on_ended(R1)
    assert farewells(under_test) == []
    under_test.on_moved(moved(I1, 1, R2), 2.0)
    assert farewells(under_test) == [farewell(2, 2)]


def test_what_moves_to_an_instance_after_the_farewell_is_followed_by_another_one() -> None:
    """Its migration was under way: the instance must not end before the tokens have arrived."""
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    under_test.on_moved(moved(I1, 0, R1), 0.5)
    under_test.on_membership(membership(2, I0, I1, scheduler=None, terminating=(I0,)), 1.0)
    assert farewells(under_test) == [farewell(2)]
    under_test.on_moved(moved(I0, 1, R1), 2.0)
    assert farewells(under_test) == []
    under_test.on_ended(R1)
    assert farewells(under_test) == [farewell(2, 1)]
    # One that has ended here is none that would keep the instance.
    under_test.on_moved(moved(I0, 1, R1), 3.0)
    assert farewells(under_test) == [farewell(2, 2)]


def test_it_is_said_once_for_each_emptying_whoever_supervises() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert farewells(under_test) == [farewell(2)]
    under_test.on_membership(membership(3, I0, I1, terminating=(I0,), since=2), 2.0)
    assert farewells(under_test) == []
    # The news of the undo in between was lost with the supervisor.
    under_test.on_membership(membership(5, I0, I1, terminating=(I0,), since=5), 3.0)
    assert farewells(under_test) == [farewell(5)]


def test_an_abort_goes_before_the_farewell() -> None:
    under_test = dispatcher(I0, scheduler=None)
    request(under_test, R1)
    under_test.on_membership(membership(2, I0, I1, scheduler=None, terminating=(I0,)), 1.0)
    effects = [*under_test.on_abort([R1]), *farewells(under_test)]
    assert effects[-1] == farewell(2)
    assert len(effects) == 2


def test_after_an_undo_the_next_emptying_has_its_own_farewell() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert farewells(under_test) == [farewell(2)]
    under_test.on_membership(membership(3, I0, I1), 2.0)
    assert farewells(under_test) == []
    under_test.on_membership(membership(4, I0, I1, terminating=(I0,)), 3.0)
    assert farewells(under_test) == [farewell(4)]


def test_a_request_that_the_scheduler_sends_to_an_instance_being_emptied_goes_elsewhere() -> None:
    """The scheduler had not heard yet."""
    under_test = dispatcher(I0, I1)
    request(under_test, R1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.on_dispatched(Dispatched(R1, I0, 1), 1.1)[-1] == add(R1, I1)


# ------------------------------------------------------------------- tokens on their way


def emptied_with(*request_ids: RequestId) -> Dispatcher:
    """These requests were sent to I0, which is being emptied since then."""
    under_test = dispatcher(I0, I1, I2, scheduler=None)
    for request_id in request_ids:
        request(under_test, request_id)
        under_test.on_moved(moved(I0, 0, request_id), 0.5)
    with_i0 = membership(2, I0, I1, I2, scheduler=None, terminating=(I0,))
    under_test.on_membership(with_i0, 1.0)
    return under_test


def test_news_of_a_move_that_overtake_the_last_tokens_do_not_end_what_they_come_from() -> None:
    """They travel over another connection."""
    under_test = emptied_with(R1)
    under_test.on_moved(moved(I1, 3, R1), 2.0)
    assert farewells(under_test, r1=2) == []
    assert farewells(under_test, r1=3) == [farewell(2, 1)]


def test_so_do_tokens_of_the_next_owner() -> None:
    under_test = emptied_with(R1)
    under_test.on_tokens(I1, [span(R1, 3)])
    assert farewells(under_test, r1=2) == []
    assert farewells(under_test, r1=3) == [farewell(2, 1)]


def test_the_last_token_of_a_request_may_overtake_those_that_are_awaited_too() -> None:
    under_test = emptied_with(R1)
    under_test.on_tokens(I1, [span(R1, 3)])
    under_test.on_last_token(R1)
    assert farewells(under_test, r1=2) == []
    under_test.on_ended(R1)
    assert farewells(under_test, r1=2) == [farewell(2, 1)]


def test_nobody_waits_for_tokens_of_a_request_that_was_aborted() -> None:
    under_test = emptied_with(R1)
    under_test.on_moved(moved(I1, 3, R1), 2.0)
    under_test.on_abort([R1])
    assert farewells(under_test, r1=2) == [farewell(2, 1)]


def test_where_a_stream_is_closed_none_of_its_tokens_are_awaited() -> None:
    under_test = emptied_with(R1)
    under_test.on_moved(moved(I1, 3, R1), 2.0)
    assert under_test.farewells(lambda each: None) == [farewell(2, 1)]


def test_tokens_of_two_moves_may_both_be_on_their_way() -> None:
    under_test = emptied_with(R1)
    under_test.on_moved(moved(I1, 3, R1), 2.0)
    under_test.on_moved(moved(I2, 5, R1), 2.0)
    assert farewells(under_test, r1=2) == []
    assert farewells(under_test, r1=3) == [farewell(2, 1)]


def test_an_owner_of_whom_others_have_told_first_may_have_tokens_on_their_way() -> None:
    """The request went by I0 from I1 to I2, and its news comes last."""
    under_test = dispatcher(I1, I0, I2, scheduler=None)
    request(under_test, R1)
    with_i0 = membership(2, I1, I0, I2, scheduler=None, terminating=(I0,))
    under_test.on_membership(with_i0, 1.0)
    assert farewells(under_test) == [farewell(2)]
    under_test.on_moved(moved(I2, 5, R1), 2.0)
    under_test.on_moved(moved(I0, 3, R1), 2.0)
    assert farewells(under_test, r1=4) == []
    assert farewells(under_test, r1=5) == [farewell(2, 1)]


def test_who_has_it_after_a_death_says_with_its_tokens_from_where_on() -> None:
    under_test = emptied_with(R1)
    left = membership(3, I0, I1, scheduler=None, terminating=(I0,), since=2)
    queries = under_test.on_membership(left, 2.0)
    numbers = {each.instance_id: each.message.query_id for each in queries}
    under_test.on_owner_reply(OwnerReply(I1, numbers[I1], (R1,)))
    assert farewells(under_test) == []
    under_test.on_tokens(I1, [span(R1, 4)])
    assert farewells(under_test, r1=3) == []
    assert farewells(under_test, r1=4) == [farewell(2, 1)]
