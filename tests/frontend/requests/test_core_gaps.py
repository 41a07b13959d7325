"""Tokens that were lost on their way, and such as contradict what the client has."""

from sterna.frontend.requests.attempts import MAX_GAPS
from sterna.frontend.requests.request_effects import Deliver, Fail, Failure, SendAgain
from sterna.messages.actors import OwnerReply, RequestsMoved
from sterna.types import RequestId
from tests.frontend.front import ABORT, abort, again, output, started
from tests.frontend.requests.ownership_news import I0, I1, R1


def test_a_gap_that_stays_open_is_gone_on_behind():
    """It moved on from an instance that died before it had sent all of its tokens."""
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    assert under_test.tokens(I0, 2, 12) == []
    assert under_test.core.next_deadline_s == 11.0
    assert under_test.core.on_time(11.0) == [abort(I0), *again(I0, 1, 10)]


def test_a_request_whose_end_has_come_before_its_last_tokens_is_not_computed_again():
    """They are slow on their way from the instance that it moved on from. Another one, which is
    empty and ends, is no reason to doubt that they come."""
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    under_test.core.on_message(RequestsMoved(I1, (R1,), (2,), 0), (), 0.0)
    assert under_test.tokens(I1, 2, 12, ends=True) == []
    assert under_test.live(I1) == []
    assert under_test.tokens(I0, 1, 11) == [
        Deliver(R1, output(R1, 11), 0, False),
        Deliver(R1, output(R1, 12), 0, True),
    ]


def test_a_gap_before_an_end_that_stays_open_is_gone_on_behind():
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    under_test.tokens(I1, 2, 12, ends=True)
    under_test.live(I1)
    assert under_test.core.on_time(11.0) == again(I1, 1, 10)


def test_a_gap_that_comes_again_and_again_at_the_same_place_fails_the_request():
    """An instance that does not know this front end yet keeps what it has for it."""
    under_test = started(I0)
    attempt = R1
    for number in range(1, MAX_GAPS + 1):
        under_test.tokens(I0, 1, 11, of=attempt, now_s=20.0 * number)
        assert SendAgain(R1, f"{R1}+{number}", 0) in under_test.core.on_time(20.0 * number + 11.0)
        attempt = RequestId(f"{R1}+{number}")
    under_test.tokens(I0, 1, 11, of=attempt, now_s=100.0)
    assert under_test.core.on_time(111.0) == [abort(I0, attempt), Fail(R1, Failure.TOKENS_LOST)]
    assert under_test.core.num_delivered(R1) is None


def test_a_gap_behind_further_tokens_counts_as_the_first():
    under_test = started(I0)
    for number in range(MAX_GAPS + 2):
        attempt = RequestId(f"{R1}+{number}") if number else R1
        under_test.tokens(I0, number, 10 + number, of=attempt, now_s=20.0 * number)
        under_test.tokens(I0, number + 2, 99, of=attempt, now_s=20.0 * number)
        again = SendAgain(R1, f"{R1}+{number + 1}", number + 1)
        assert again in under_test.core.on_time(20.0 * number + 11.0)


def test_where_nothing_is_continued_a_gap_fails_the_request_and_frees_it_where_it_is():
    under_test = started(I0, config=ABORT)
    assert under_test.tokens(I0, 1, 11) == []
    assert under_test.core.on_time(3.0) == [abort(I0), Fail(R1, Failure.TOKENS_LOST)]


def test_a_request_taken_back_from_a_dead_destination_may_not_say_something_else():
    """I0 took it back from I1, whose last tokens had reached the client but not I0."""
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    under_test.core.on_message(RequestsMoved(I1, (R1,), (1,), 0), (), 0.0)
    under_test.tokens(I1, 1, 11)
    under_test.live(I0)
    under_test.core.on_message(OwnerReply(I0, 1, (R1,)), (), 0.0)
    assert under_test.tokens(I0, 1, 77) == [abort(I0), *again(I0, 1, 10, 11)]


def test_a_request_taken_back_that_says_the_same_goes_on():
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    under_test.core.on_message(RequestsMoved(I1, (R1,), (1,), 0), (), 0.0)
    under_test.tokens(I1, 1, 11)
    under_test.live(I0)
    under_test.core.on_message(OwnerReply(I0, 1, (R1,)), (), 0.0)
    assert under_test.tokens(I0, 1, 11) == []
    assert under_test.tokens(I0, 2, 12) == [Deliver(R1, output(R1, 12), 0, False)]


def test_of_a_span_that_contradicts_what_the_client_has_nothing_is_delivered():
    under_test = started(I0)
    under_test.tokens(I0, 0, 10, 11)
    assert under_test.tokens(I0, 1, 77, 78, ends=True) == [abort(I0), *again(I0, 1, 10, 11)]
