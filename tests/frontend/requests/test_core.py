"""A request's way through a front end's one state machine, from its arrival to its end."""

import pytest

from sterna.config import FrontendConfig
from sterna.frontend.requests.core import FrontendCore
from sterna.frontend.requests.request_effects import Deliver, Fail, Failure, ToInstance, ToScheduler
from sterna.messages.actors import (
    AddRequest,
    CancelDispatch,
    Dispatched,
    FinalAck,
    HandedBack,
    Membership,
    OwnerReply,
    RequestsMoved,
    TokenBatch,
    TokenSpan,
)
from sterna.types import InstanceId
from tests.frontend.front import (
    ABORT,
    AGAIN,
    CONFIG,
    abort,
    again,
    ask,
    membership,
    output,
    request,
    started,
)
from tests.frontend.requests.ownership_news import I0, I1, I2, ME, R1

# ------------------------------------------------------------------------------- without deaths


def test_a_request_is_dispatched_delivered_and_forgotten():
    core = FrontendCore(ME, CONFIG)
    core.on_message(membership(1, I0, scheduler="scheduler"), (), 0.0)
    assert core.on_request(ask(R1), request(R1), 0.0) == [ToScheduler(ask(R1))]
    assert core.on_message(Dispatched(R1, I0, 3), (), 0.1) == [
        ToInstance(I0, AddRequest(ME, R1, 3), request(R1))
    ]


def test_tokens_are_delivered_once_and_the_last_one_ends_the_request():
    under_test = started(I0)
    assert under_test.tokens(I0, 0, 10, 11) == [Deliver(R1, output(R1, 10, 11), 0, False)]
    core = under_test.core
    assert (core.owner(R1), core.num_delivered(R1)) == (I0, 2)
    assert under_test.tokens(I0, 1, 11, 12, ends=True) == [Deliver(R1, output(R1, 11, 12), 1, True)]
    assert (core.owner(R1), core.num_delivered(R1)) == (None, None)
    assert core.next_deadline_s is None


def test_an_instance_that_steps_what_nobody_waits_for_is_told_to_stop():
    under_test = started(I0)
    under_test.core.on_abort([R1], 0.5)
    assert under_test.tokens(I0, 0, 10) == [abort(I0)]


def test_an_abort_before_the_dispatch_leaves_nothing_behind():
    core = FrontendCore(ME, CONFIG)
    core.on_message(membership(1, I0, scheduler="scheduler"), (), 0.0)
    core.on_request(ask(R1), request(R1), 0.0)
    assert core.on_abort([R1], 0.1) == [ToScheduler(CancelDispatch(R1))]
    assert core.next_deadline_s is None


@pytest.mark.parametrize("config", [CONFIG, ABORT])
def test_the_scheduler_counts_no_longer_on_the_prompt_of_a_request_that_ended_without_a_token(
    config: FrontendConfig,
):
    """Its grammar may not compile, say: the engine has computed nothing."""
    core = FrontendCore(ME, config)
    core.on_message(membership(1, I0, scheduler="scheduler"), (), 0.0)
    core.on_request(ask(R1), request(R1), 0.0, (10, 11))
    core.on_message(Dispatched(R1, I0, 3), (), 0.1)
    refused = TokenBatch(I0, (TokenSpan(R1, 2, 0, True),))
    assert core.on_message(refused, [output(R1)], 0.2) == [
        Deliver(R1, output(R1), 0, True),
        ToScheduler(CancelDispatch(R1)),
    ]


def test_the_end_of_its_last_request_sends_the_final_ack_to_an_instance_that_is_emptied():
    under_test = started(I0, I1)
    emptied = membership(2, I0, I1, emptied=I0)
    assert under_test.core.on_message(emptied, (), 0.5) == []
    assert under_test.tokens(I0, 0, 10, ends=True) == [
        Deliver(R1, output(R1, 10), 0, True),
        ToInstance(I0, FinalAck(ME, 2, 1)),
    ]


def final_ack(instance_id: InstanceId, num_heard: int) -> ToInstance:
    return ToInstance(instance_id, FinalAck(ME, 2, num_heard))


def test_a_final_ack_says_how_much_has_come_so_that_what_is_on_its_way_voids_it():
    """News that the request has moved on, and its next tokens, have overtaken the last ones."""
    under_test = started(I0, I1)
    under_test.core.on_message(membership(2, I0, I1, emptied=I0), (), 0.5)
    moved = RequestsMoved(I1, (R1,), (2,), 2)
    assert under_test.core.on_message(moved, (), 1.0) == [final_ack(I0, 0)]
    assert under_test.tokens(I1, 2, 12) == []
    assert under_test.tokens(I0, 0, 10)[1:] == [final_ack(I0, 1)]
    assert under_test.tokens(I0, 1, 11)[2:] == [final_ack(I0, 2)]


def test_the_end_of_a_stream_may_overtake_the_news_of_where_it_has_been():
    under_test = started(I0, I1, I2)
    emptied = membership(2, I0, I1, I2, emptied=I1)
    assert under_test.core.on_message(emptied, (), 0.5) == [final_ack(I1, 0)]
    assert under_test.core.on_message(RequestsMoved(I2, (R1,), (2,), 2), (), 0.6) == []
    assert under_test.tokens(I2, 2, 12, ends=True) == []
    moved = RequestsMoved(I1, (R1,), (1,), 2)
    assert under_test.core.on_message(moved, (), 1.0) == [final_ack(I1, 1)]
    assert under_test.tokens(I0, 0, 10) == [Deliver(R1, output(R1, 10), 0, False)]
    assert under_test.tokens(I1, 1, 11) == [
        Deliver(R1, output(R1, 11), 0, False),
        Deliver(R1, output(R1, 12), 0, True),
        final_ack(I1, 2),
    ]


def test_an_instance_that_takes_a_request_back_gets_another_final_ack():
    """Its destination has died with the verdict unheard; then it moved to another one."""
    under_test = started(I0, I1, I2)
    core = under_test.core
    core.on_message(membership(2, I0, I1, I2, emptied=I0), (), 0.5)
    assert core.on_message(RequestsMoved(I1, (R1,), (0,), 2), (), 1.0) == [final_ack(I0, 0)]
    itself, other = membership(2, I0, I2, emptied=I0).instances
    queries = core.on_message(Membership(10, (itself, other), (), None), (), 2.0)
    assert core.on_message(OwnerReply(I0, queries[0].message.query_id, (R1,)), (), 2.1) == []
    assert core.on_message(RequestsMoved(I2, (R1,), (1,), 10), (), 2.2) == []
    assert under_test.tokens(I0, 0, 10)[1:] == [final_ack(I0, 1)]


def test_what_is_handed_back_has_been_heard():
    under_test = started(I0, I1)
    under_test.core.on_message(membership(2, I0, I1, emptied=I0), (), 0.5)
    effects = under_test.core.on_message(HandedBack(I0, (R1,)), (), 1.0)
    assert effects[-1] == final_ack(I0, 1)


@pytest.mark.parametrize("config", [CONFIG, ABORT])
def test_an_end_before_tokens_that_the_client_has_leaves_no_stream_without_an_end(
    config: FrontendConfig,
):
    """An instance that has died gave the later tokens; its source took the request back, and drew
    others."""
    under_test = started(I0, I1, config=config)
    under_test.tokens(I0, 0, 10)
    under_test.core.on_message(RequestsMoved(I1, (R1,), (1,), 1), (), 1.0)
    under_test.tokens(I1, 1, 11, 12)
    under_test.core.on_message(membership(2, I0), (), 2.0)
    under_test.core.on_message(OwnerReply(I0, 1, (R1,)), (), 2.0)
    effects = under_test.tokens(I0, 1, 11, ends=True)
    if config is ABORT:
        assert effects == [Fail(R1, Failure.TOKENS_LOST)]
    else:
        assert effects == [abort(I0), *again(I0, 1, 10, 11, 12)]


# ----------------------------------------------------------------------------- of another front end


@pytest.mark.parametrize("config", [CONFIG, ABORT])
def test_a_request_of_another_front_end_goes_on_behind_what_its_client_has(config: FrontendConfig):
    core = FrontendCore(ME, config)
    core.on_message(membership(1, I0, scheduler="scheduler"), (), 0.0)
    assert core.on_request(ask(R1), request(R1), 0.0, (10, 11)) == [
        ToScheduler(ask(R1, num_tokens=2))
    ]
    assert core.on_message(Dispatched(R1, I0, 1), (), 0.0) == [
        ToInstance(I0, AddRequest(ME, R1, 1, (10, 11)), request(R1))
    ]
    assert core.num_delivered(R1) == 2
    spans = (TokenSpan(R1, 1, 2, True),)
    assert core.on_message(TokenBatch(I0, spans), [output(R1, 11, 12)], 0.0) == [
        Deliver(R1, output(R1, 11, 12), 1, True)
    ]


def test_a_request_of_another_front_end_outlives_its_instance_as_well():
    core = FrontendCore(ME, CONFIG)
    core.on_message(membership(1, I0), (), 0.0)
    core.on_request(ask(R1), request(R1), 0.0, (10,))
    core.on_message(TokenBatch(I0, (TokenSpan(R1, 1, 1, False),)), [output(R1, 11)], 0.0)
    core.on_message(membership(2, I1), (), 0.0)
    assert core.on_message(OwnerReply(I1, 1, ()), (), 0.0) == again(I1, 1, 10, 11)


# ------------------------------------------------------------------------------- handed back


def test_a_request_that_is_handed_back_goes_on_elsewhere_behind_its_tokens():
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10, 11)
    effects = under_test.core.on_message(membership(2, I0, I1, emptied=I0), (), 2.0)
    assert effects == []
    effects = under_test.core.on_message(HandedBack(I0, (R1,)), (), 3.0)
    assert effects[:3] == [abort(I0), *again(I1, 1, 10, 11)]
    # What the instance had still sent is void.
    final_ack = ToInstance(I0, FinalAck(ME, 2, 3))
    assert under_test.tokens(I0, 2, 12) == [abort(I0), final_ack]
    assert under_test.tokens(I1, 2, 99, of=AGAIN) == [Deliver(R1, output(R1, 99), 0, False)]


def test_what_is_handed_back_after_its_client_has_gone_is_over():
    under_test = started(I0, I1)
    under_test.core.on_abort([R1], 1.0)
    assert under_test.core.on_message(HandedBack(I0, (R1,)), (), 2.0) == []


def test_a_front_end_that_continues_nothing_fails_what_is_handed_back():
    under_test = started(I0, I1, config=ABORT)
    effects = under_test.core.on_message(HandedBack(I0, (R1,)), (), 2.0)
    assert effects == [abort(I0), Fail(R1, Failure.HANDED_BACK)]
