"""What clients see when instances die, and requests that make them die."""

from sterna.frontend.requests.attempts import PROGRESS_TOKENS
from sterna.frontend.requests.core import FrontendCore
from sterna.frontend.requests.request_effects import (
    Deliver,
    Effect,
    Fail,
    Failure,
    SendAgain,
    ToInstance,
    ToScheduler,
)
from sterna.messages.actors import (
    AddRequest,
    Dispatched,
    OwnerQuery,
    OwnerReply,
    TokenBatch,
    TokenSpan,
)
from sterna.types import InstanceId, RequestId
from tests.frontend.front import (
    ABORT,
    AGAIN,
    CONFIG,
    Front,
    abort,
    add,
    again,
    ask,
    membership,
    output,
    request,
    started,
)
from tests.frontend.requests.ownership_news import I0, I1, I2, I3, ME, R1, R2

# ------------------------------------------------------------------------------------- a death


def test_a_request_that_died_goes_on_behind_what_its_client_has_when_all_have_denied_it():
    under_test = started(I0, I1, I2)
    under_test.tokens(I0, 0, 10, 11)
    assert under_test.live(I1, I2) == [
        ToInstance(I1, OwnerQuery(ME, 1, (R1,))),
        ToInstance(I2, OwnerQuery(ME, 2, (R1,))),
    ]
    assert under_test.deny(I2, 2) == []
    assert under_test.deny(I1, 1) == again(I1, 1, 10, 11)
    assert under_test.core.owner(R1) == I1
    assert under_test.core.next_deadline_s is None


def test_the_scheduler_is_asked_where_it_goes_on_and_told_how_long_it_is():
    core = FrontendCore(ME, CONFIG)
    core.on_message(membership(1, I0, scheduler="scheduler"), (), 0.0)
    core.on_request(ask(R1), request(R1), 0.0)
    core.on_message(Dispatched(R1, I0, 1), (), 0.0)
    core.on_message(TokenBatch(I0, (TokenSpan(R1, 0, 1, False),)), [output(R1, 10)], 0.0)
    core.on_message(membership(2, I1, scheduler="scheduler"), (), 0.0)
    assert core.on_message(OwnerReply(I1, 1, ()), (), 0.0) == [
        SendAgain(R1, AGAIN, 1),
        ToScheduler(ask(AGAIN, num_tokens=1)),
    ]
    assert core.on_message(Dispatched(AGAIN, I1, 2), (), 0.0) == [
        ToInstance(I1, AddRequest(ME, AGAIN, 2, (10,)), request(AGAIN))
    ]


def test_what_comes_of_the_attempt_is_delivered_as_the_requests_own():
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    under_test.live(I1)
    under_test.deny(I1, 1)
    assert under_test.tokens(I1, 1, 11, of=AGAIN) == [Deliver(R1, output(R1, 11), 0, False)]
    assert under_test.tokens(I1, 2, 12, of=AGAIN, ends=True) == [
        Deliver(R1, output(R1, 12), 0, True)
    ]
    assert under_test.core.num_delivered(R1) is None


def test_late_tokens_of_the_attempt_that_died_are_not_mixed_in():
    """A request without a seed comes to other tokens when it goes on."""
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10)
    under_test.live(I1)
    under_test.deny(I1, 1)
    assert under_test.tokens(I0, 1, 99) == [abort(I0)]
    assert under_test.tokens(I1, 1, 11, of=AGAIN) == [Deliver(R1, output(R1, 11), 0, False)]


def test_tokens_that_waited_behind_a_gap_die_with_the_attempt():
    under_test = started(I0, I1)
    under_test.tokens(I0, 1, 99)
    under_test.live(I1)
    under_test.deny(I1, 1)
    assert under_test.tokens(I1, 0, 10, of=AGAIN) == [Deliver(R1, output(R1, 10), 0, False)]
    assert under_test.core.next_deadline_s is None


def test_a_request_that_another_instance_has_stays_there():
    under_test = started(I0, I1)
    under_test.live(I1)
    assert under_test.core.on_message(OwnerReply(I1, 1, (R1,)), (), 0.0) == []
    assert under_test.core.owner(R1) == I1
    assert under_test.tokens(I1, 0, 10) == [Deliver(R1, output(R1, 10), 0, False)]


def test_an_abort_goes_to_the_attempt_that_counts():
    under_test = started(I0, I1)
    under_test.live(I1)
    under_test.deny(I1, 1)
    assert under_test.core.on_abort([R1], 0.0) == [abort(I1, AGAIN)]
    assert under_test.core.num_delivered(R1) is None


def test_an_abort_while_its_owner_is_in_doubt_ends_the_request():
    under_test = started(I0, I1)
    under_test.live(I1)
    assert under_test.core.on_abort([R1], 0.0) == []
    assert under_test.deny(I1, 1) == []
    assert under_test.core.next_deadline_s is None


def test_without_any_instance_left_it_waits_for_one():
    under_test = started(I0)
    under_test.tokens(I0, 0, 10)
    assert under_test.live(now_s=5.0) == [SendAgain(R1, AGAIN, 1)]
    assert under_test.core.next_deadline_s == 65.0
    assert under_test.live(I1, now_s=20.0) == [add(I1, AGAIN, 10)]


def test_it_fails_under_its_own_id_when_no_instance_comes_in_time():
    under_test = started(I0)
    under_test.live(now_s=5.0)
    assert under_test.core.on_time(65.0) == [Fail(R1, Failure.NO_INSTANCE)]
    assert under_test.core.num_delivered(R1) is None
    assert under_test.live(I1, now_s=70.0) == []


def test_where_nothing_is_continued_it_fails_and_nothing_is_kept():
    """Section 5: "When an instance fails, the requests running on it will be aborted"."""
    under_test = started(I0, I1, config=ABORT)
    under_test.tokens(I0, 0, 10)
    under_test.live(I1, now_s=5.0)
    assert under_test.deny(I1, 1) == []
    assert under_test.core.on_time(6.0) == [Fail(R1, Failure.OWNER_DIED)]
    assert under_test.core.num_delivered(R1) is None


# ------------------------------------------------------------------- requests that kill instances


def die(under_test: Front, dead: InstanceId, *left: InstanceId) -> list[Effect]:
    """All that is left denies everything."""
    effects = under_test.live(*left)
    for effect in list(effects):
        if isinstance(effect, ToInstance) and isinstance(effect.message, OwnerQuery):
            effects += under_test.deny(effect.instance_id, effect.message.query_id)
    return [e for e in effects if not isinstance(getattr(e, "message", None), OwnerQuery)]


def test_a_request_with_which_two_instances_died_fails():
    under_test = started(I0, I1, I2)
    under_test.tokens(I0, 0, 10)
    assert die(under_test, I0, I1, I2) == again(I1, 1, 10)
    under_test.tokens(I1, 1, *range(PROGRESS_TOKENS - 1), of=AGAIN)
    assert die(under_test, I1, I2) == [Fail(R1, Failure.KILLED_INSTANCES)]
    assert under_test.core.num_delivered(R1) is None


def test_a_request_that_brings_tokens_between_deaths_survives_any_number_of_them():
    under_test = started(I0)
    live, attempt_id = I0, R1
    for number in range(1, 20):
        first = (number - 1) * PROGRESS_TOKENS
        token_ids = range(first, first + PROGRESS_TOKENS)
        under_test.tokens(live, first, *token_ids, of=attempt_id)
        live, attempt_id = InstanceId(f"i{number}"), RequestId(f"r1+{number}")
        known = range(number * PROGRESS_TOKENS)
        assert die(under_test, I0, live) == again(live, number, *known)


def two_suspects() -> Front:
    """R1 and R2, which waited for the dead I0 and I1 and are now on I2: only one may be tried."""
    under_test = started(I0)
    under_test.request(R2)
    assert die(under_test, I0, I1) == [*again(I1, 1), *again(I1, 1, of=R2)]
    assert die(under_test, I1, I2) == again(I2, 2)
    return under_test


def test_of_several_suspects_the_next_goes_on_when_the_one_before_has_brought_its_tokens():
    under_test = two_suspects()
    tokens = under_test.tokens(I2, 0, *range(PROGRESS_TOKENS - 1), of=RequestId("r1+2"))
    assert len(tokens) == 1
    effects = under_test.tokens(I2, PROGRESS_TOKENS - 1, 70, of=RequestId("r1+2"))
    assert effects[1:] == again(I2, 2, of=R2)


def test_of_several_suspects_the_one_that_is_tried_when_the_next_instance_dies_is_guilty():
    under_test = two_suspects()
    assert die(under_test, I2, I3) == [
        Fail(R1, Failure.KILLED_INSTANCES),
        *again(I3, 2, of=R2),
    ]
    effects = under_test.tokens(I3, 0, 10, of=RequestId("r2+2"), ends=True)
    assert effects == [Deliver(R2, output(R2, 10), 0, True)]


def test_a_suspect_whose_client_goes_makes_room_for_the_next():
    under_test = two_suspects()
    assert under_test.core.on_abort([R1], 0.0) == [
        abort(I2, RequestId("r1+2")),
        *again(I2, 2, of=R2),
    ]


def test_a_suspect_that_waits_for_its_trial_can_be_aborted():
    under_test = two_suspects()
    assert under_test.core.on_abort([R2], 0.0) == []
    assert under_test.core.num_delivered(R2) is None
    assert len(under_test.tokens(I2, 0, 10, of=RequestId("r1+2"), ends=True)) == 1
