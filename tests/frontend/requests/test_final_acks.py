"""An instance that is being emptied is told when nothing of a front end is with it any more."""

from sterna.frontend.requests.dispatcher import Dispatcher
from sterna.frontend.requests.request_effects import Effect, ToInstance
from sterna.messages.actors import Dispatched, FinalAck, RequestsMoved
from tests.frontend.requests.test_dispatcher import (
    I0,
    I1,
    ME,
    R1,
    R2,
    add,
    dispatcher,
    membership,
    request,
)
from tests.frontend.requests.test_ownership import moved


def final_ack(version: int, num_heard: int = 0) -> Effect:
    return ToInstance(I0, FinalAck(ME, version, num_heard), None)


def tell(under_test: Dispatcher, message: RequestsMoved, now_s: float) -> None:
    under_test.on_news(message.instance_id)
    under_test.on_moved(message, now_s)


def test_an_instance_without_requests_is_told_at_once() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    assert under_test.final_acks() == []


def test_an_instance_is_told_when_the_last_request_there_has_ended_or_moved() -> None:
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    request(under_test, R2)
    tell(under_test, moved(I0, 0, R1, R2), 0.5)
    under_test.on_membership(membership(2, I0, I1, scheduler=None, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == []
    under_test.on_ended(R1)
    assert under_test.final_acks() == []
    tell(under_test, moved(I1, 1, R2), 2.0)
    assert under_test.final_acks() == [final_ack(2, 1)]


def test_what_moves_to_an_instance_after_the_final_ack_is_followed_by_another_one() -> None:
    """Its migration was under way: the instance must not end before the tokens have arrived."""
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    tell(under_test, moved(I1, 0, R1), 0.5)
    under_test.on_membership(membership(2, I0, I1, scheduler=None, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    tell(under_test, moved(I0, 1, R1), 2.0)
    assert under_test.final_acks() == []
    under_test.on_ended(R1)
    assert under_test.final_acks() == [final_ack(2, 1)]
    # One that has ended here is none that would keep the instance.
    tell(under_test, moved(I0, 1, R1), 3.0)
    assert under_test.final_acks() == [final_ack(2, 2)]


def test_what_was_on_its_way_is_followed_by_another_final_ack() -> None:
    """News of a move may overtake tokens from before it: they come over another connection."""
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    under_test.on_news(I1)
    assert under_test.final_acks() == []
    under_test.on_news(I0)
    assert under_test.final_acks() == [final_ack(2, 1)]
    assert under_test.final_acks() == []


def test_it_is_said_once_for_each_emptying_whoever_supervises() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    under_test.on_membership(membership(3, I0, I1, terminating=(I0,), since=2), 2.0)
    assert under_test.final_acks() == []
    # The news of the undo in between was lost with the supervisor.
    under_test.on_membership(membership(5, I0, I1, terminating=(I0,), since=5), 3.0)
    assert under_test.final_acks() == [final_ack(5)]


def test_an_abort_goes_before_the_final_ack() -> None:
    under_test = dispatcher(I0, scheduler=None)
    request(under_test, R1)
    under_test.on_membership(membership(2, I0, I1, scheduler=None, terminating=(I0,)), 1.0)
    effects = [*under_test.on_abort([R1]), *under_test.final_acks()]
    assert effects[-1] == final_ack(2)
    assert len(effects) == 2


def test_after_an_undo_the_next_emptying_has_its_own_final_ack() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    under_test.on_membership(membership(3, I0, I1), 2.0)
    assert under_test.final_acks() == []
    under_test.on_membership(membership(4, I0, I1, terminating=(I0,)), 3.0)
    assert under_test.final_acks() == [final_ack(4)]


def test_a_request_that_the_scheduler_sends_to_an_instance_being_emptied_goes_elsewhere() -> None:
    """The scheduler had not heard yet."""
    under_test = dispatcher(I0, I1)
    request(under_test, R1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.on_dispatched(Dispatched(R1, I0, 1), 1.1)[-1] == add(R1, I1)


def test_a_final_ack_that_could_not_be_sent_is_sent_again() -> None:
    """An idle front end has no other event, and the instance would not end without it."""
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    for now_s in (1.0, 2.0):
        assert under_test.final_acks() == [final_ack(2)]
        under_test.on_final_ack_unsent(I0, now_s)
        assert under_test.final_acks() == []
        # Another membership changes nothing about it.
        under_test.on_membership(membership(int(now_s) + 2, I0, I1, terminating=(I0,)), now_s)
        assert under_test.next_deadline_s == now_s + 1.0
        under_test.on_time(now_s + 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    assert under_test.next_deadline_s is None


def test_a_final_ack_that_could_not_be_sent_is_void_when_news_come() -> None:
    under_test = dispatcher(I0, I1)
    under_test.on_membership(membership(2, I0, I1, terminating=(I0,)), 1.0)
    assert under_test.final_acks() == [final_ack(2)]
    under_test.on_final_ack_unsent(I0, 1.0)
    under_test.on_news(I0)
    assert under_test.final_acks() == [final_ack(2, 1)]
    under_test.on_time(2.0)
    assert under_test.final_acks() == []
