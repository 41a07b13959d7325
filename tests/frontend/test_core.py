"""A request's way through a front end's one state machine, from its arrival to its end."""

import msgspec
import pytest

from sterna.config import FrontendConfig, OnInstanceFailure
from sterna.frontend.core import FrontendCore
from sterna.frontend.effects import (
    Deliver,
    Effect,
    Fail,
    Failure,
    SendAgain,
    ToInstance,
    ToScheduler,
)
from sterna.frontend.histories import PROGRESS_TOKENS
from sterna.messages import (
    AbortRequests,
    AddRequest,
    CancelDispatch,
    Dispatched,
    DispatchRequest,
    Farewell,
    HandedBack,
    Instance,
    Membership,
    OwnerQuery,
    OwnerReply,
    RequestsMoved,
    TokenBatch,
    TokenSpan,
)
from sterna.types import NORMAL, FrontendId, InstanceId, RequestId

ME = FrontendId(7)
I0, I1, I2, I3 = (InstanceId(f"i{number}") for number in range(4))
R1, R2, R3 = (RequestId(f"r{number}") for number in (1, 2, 3))
AGAIN = RequestId("r1+1")
CONFIG = FrontendConfig(gap_timeout_s=10.0, hold_timeout_s=60.0, owner_retry_s=0.25)
ABORT = FrontendConfig(on_instance_failure=OnInstanceFailure.ABORT, owner_timeout_s=1.0)


def ask(request_id: RequestId, num_tokens: int = 0) -> DispatchRequest:
    return DispatchRequest(ME, request_id, 64 + num_tokens, 0.0, NORMAL, NORMAL)


def request(request_id: RequestId) -> bytes:
    return msgspec.msgpack.encode([request_id, "all the rest"])


def output(request_id: RequestId, *token_ids: int) -> bytes:
    return msgspec.msgpack.encode([0, [[request_id, list(token_ids), "all the rest"]], "more"])


def membership(
    version: int,
    *instances: InstanceId,
    emptied: InstanceId | None = None,
    scheduler: str | None = None,
) -> Membership:
    members = tuple(
        Instance(each, f"tcp://{each}", each == emptied, emptied_since=version * (each == emptied))
        for each in instances
    )
    return Membership(version, members, (), scheduler)


class Front:
    """A core without a scheduler, so that the local rule places requests."""

    def __init__(self, *instances: InstanceId, config: FrontendConfig = CONFIG) -> None:
        self.core = FrontendCore(ME, config)
        self._version = 0
        assert self.live(*instances) == []

    def live(self, *instances: InstanceId, now_s: float = 0.0) -> list[Effect]:
        self._version += 1
        return self.core.on_message(membership(self._version, *instances), (), now_s)

    def request(self, request_id: RequestId = R1) -> list[Effect]:
        return self.core.on_request(ask(request_id), request(request_id), 0.0)

    def tokens(
        self,
        instance_id: InstanceId,
        first: int,
        *token_ids: int,
        of: RequestId = R1,
        ends: bool = False,
        now_s: float = 1.0,
    ) -> list[Effect]:
        batch = TokenBatch(instance_id, (TokenSpan(of, first, len(token_ids), ends),))
        return self.core.on_message(batch, [output(of, *token_ids)], now_s)

    def deny(self, instance_id: InstanceId, query_id: int) -> list[Effect]:
        return self.core.on_message(OwnerReply(instance_id, query_id, ()), (), 0.0)


def started(*instances: InstanceId, config: FrontendConfig = CONFIG) -> Front:
    """With one request, R1, on the first of these instances."""
    under_test = Front(*instances, config=config)
    assert under_test.request() == [add(instances[0], R1)]
    return under_test


def add(instance_id: InstanceId, request_id: RequestId, *token_ids: int) -> ToInstance:
    message = AddRequest(ME, request_id, 0, token_ids)
    return ToInstance(instance_id, message, request(request_id))


def again(instance_id: InstanceId, number: int, *token_ids: int, of: RequestId = R1):
    attempt_id = RequestId(f"{of}+{number}")
    return [
        SendAgain(of, attempt_id, len(token_ids)),
        add(instance_id, attempt_id, *token_ids),
    ]


def abort(instance_id: InstanceId, request_id: RequestId = R1) -> ToInstance:
    return ToInstance(instance_id, AbortRequests((request_id,)))


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


def test_the_end_of_its_last_request_is_the_farewell_to_an_instance_that_is_emptied():
    under_test = started(I0, I1)
    emptied = membership(9, I0, I1, emptied=I0)
    assert under_test.core.on_message(emptied, (), 0.5) == []
    assert under_test.tokens(I0, 0, 10, ends=True) == [
        Deliver(R1, output(R1, 10), 0, True),
        ToInstance(I0, Farewell(ME, 9, 1)),
    ]


def farewell(instance_id: InstanceId, num_heard: int) -> ToInstance:
    return ToInstance(instance_id, Farewell(ME, 9, num_heard))


def test_a_farewell_says_how_much_has_come_so_that_what_is_on_its_way_voids_it():
    """News that the request has moved on, and its next tokens, have overtaken the last ones."""
    under_test = started(I0, I1)
    under_test.core.on_message(membership(9, I0, I1, emptied=I0), (), 0.5)
    moved = RequestsMoved(I1, (R1,), (2,), 9)
    assert under_test.core.on_message(moved, (), 1.0) == [farewell(I0, 0)]
    assert under_test.tokens(I1, 2, 12) == []
    assert under_test.tokens(I0, 0, 10)[1:] == [farewell(I0, 1)]
    assert under_test.tokens(I0, 1, 11)[2:] == [farewell(I0, 2)]


def test_the_end_of_a_stream_may_overtake_the_news_of_where_it_has_been():
    under_test = started(I0, I1, I2)
    emptied = membership(9, I0, I1, I2, emptied=I1)
    assert under_test.core.on_message(emptied, (), 0.5) == [farewell(I1, 0)]
    assert under_test.tokens(I2, 2, 12, ends=True) == []
    moved = RequestsMoved(I1, (R1,), (1,), 9)
    assert under_test.core.on_message(moved, (), 1.0) == [farewell(I1, 1)]
    assert under_test.tokens(I0, 0, 10) == [Deliver(R1, output(R1, 10), 0, False)]
    assert under_test.tokens(I1, 1, 11) == [
        Deliver(R1, output(R1, 11), 0, False),
        Deliver(R1, output(R1, 12), 0, True),
        farewell(I1, 2),
    ]


def test_an_instance_that_takes_a_request_back_is_said_farewell_again():
    """Its destination has died with the verdict unheard; then it moved to another one."""
    under_test = started(I0, I1, I2)
    core = under_test.core
    core.on_message(membership(9, I0, I1, I2, emptied=I0), (), 0.5)
    assert core.on_message(RequestsMoved(I1, (R1,), (0,), 9), (), 1.0) == [farewell(I0, 0)]
    itself, other = membership(9, I0, I2, emptied=I0).instances
    queries = core.on_message(Membership(10, (itself, other), (), None), (), 2.0)
    assert core.on_message(OwnerReply(I0, queries[0].message.query_id, (R1,)), (), 2.1) == []
    assert core.on_message(RequestsMoved(I2, (R1,), (1,), 10), (), 2.2) == []
    assert under_test.tokens(I0, 0, 10)[1:] == [farewell(I0, 1)]


def test_what_is_handed_back_has_been_heard():
    under_test = started(I0, I1)
    under_test.core.on_message(membership(9, I0, I1, emptied=I0), (), 0.5)
    effects = under_test.core.on_message(HandedBack(I0, (R1,)), (), 1.0)
    assert effects[-1] == farewell(I0, 1)


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


# -------------------------------------------------------------------- lost and contradicting tokens


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


def test_a_gap_that_comes_again_at_the_same_place_fails_the_request():
    under_test = started(I0)
    under_test.tokens(I0, 1, 11)
    under_test.core.on_time(11.0)
    under_test.tokens(I0, 1, 11, of=AGAIN, now_s=20.0)
    assert under_test.core.on_time(30.0) == [abort(I0, AGAIN), Fail(R1, Failure.TOKENS_LOST)]
    assert under_test.core.num_delivered(R1) is None


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
    under_test.tokens(I1, 1, 11)
    under_test.live(I0)
    under_test.core.on_message(OwnerReply(I0, 1, (R1,)), (), 0.0)
    assert under_test.tokens(I0, 1, 11) == []
    assert under_test.tokens(I0, 2, 12) == [Deliver(R1, output(R1, 12), 0, False)]


def test_of_a_span_that_contradicts_what_the_client_has_nothing_is_delivered():
    under_test = started(I0)
    under_test.tokens(I0, 0, 10, 11)
    assert under_test.tokens(I0, 1, 77, 78, ends=True) == [abort(I0), *again(I0, 1, 10, 11)]


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


# ------------------------------------------------------------------------------- handed back


def test_a_request_that_is_handed_back_goes_on_elsewhere_behind_its_tokens():
    under_test = started(I0, I1)
    under_test.tokens(I0, 0, 10, 11)
    effects = under_test.core.on_message(membership(2, I0, I1, emptied=I0), (), 2.0)
    assert effects == []
    effects = under_test.core.on_message(HandedBack(I0, (R1,)), (), 3.0)
    assert effects[:3] == [abort(I0), *again(I1, 1, 10, 11)]
    # What the instance had still sent is void.
    farewell = ToInstance(I0, Farewell(ME, 2, 3))
    assert under_test.tokens(I0, 2, 12) == [abort(I0), farewell]
    assert under_test.tokens(I1, 2, 99, of=AGAIN) == [Deliver(R1, output(R1, 99), 0, False)]


def test_what_is_handed_back_after_its_client_has_gone_is_over():
    under_test = started(I0, I1)
    under_test.core.on_abort([R1], 1.0)
    assert under_test.core.on_message(HandedBack(I0, (R1,)), (), 2.0) == []


def test_a_front_end_that_continues_nothing_fails_what_is_handed_back():
    under_test = started(I0, I1, config=ABORT)
    effects = under_test.core.on_message(HandedBack(I0, (R1,)), (), 2.0)
    assert effects == [abort(I0), Fail(R1, Failure.HANDED_BACK)]
