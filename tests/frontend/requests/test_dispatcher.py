"""Every request gets an instance: the scheduler's choice, or the front end's own."""

import pytest

from sterna.config import FrontendConfig
from sterna.errors import ConfigurationError
from sterna.frontend.requests.dispatcher import Dispatcher
from sterna.frontend.requests.request_effects import Effect, Fail, Failure, ToInstance, ToScheduler
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    CancelDispatch,
    Dispatched,
    DispatchRequest,
    Held,
    InstanceMember,
    Membership,
    TokenSpan,
)
from sterna.types import NORMAL, InstanceId, RequestId
from tests.frontend.requests.ownership_news import ME, moved

I0, I1, I2 = InstanceId("i0"), InstanceId("i1"), InstanceId("i2")
R1, R2 = RequestId("r1"), RequestId("r2")
CONFIG = FrontendConfig(scheduler_timeout_s=0.5, scheduler_retry_s=2.0, hold_timeout_s=60.0)


def membership(
    version: int,
    *instances: InstanceId,
    scheduler: str | None = "scheduler",
    terminating: tuple[InstanceId, ...] = (),
    since: int | None = None,
) -> Membership:
    members = tuple(
        InstanceMember(
            each,
            f"tcp://{each}",
            each in terminating,
            emptied_since=(since or version) if each in terminating else 0,
        )
        for each in instances
    )
    return Membership(version, members, (), scheduler)


def dispatcher(*instances: InstanceId, scheduler: str | None = "scheduler") -> Dispatcher:
    result = Dispatcher(ME, CONFIG)
    assert result.on_membership(membership(1, *instances, scheduler=scheduler), 0.0) == []
    return result


def ask(request_id: RequestId, waited_s: float = 0.0) -> DispatchRequest:
    return DispatchRequest(ME, request_id, 64, 0.0, NORMAL, NORMAL, waited_s=waited_s)


def add(request_id: RequestId, instance_id: InstanceId, dispatch_number: int = 0) -> ToInstance:
    return ToInstance(
        instance_id, AddRequest(ME, request_id, dispatch_number), payload_of(request_id)
    )


def payload_of(request_id: RequestId) -> bytes:
    return f"payload of {request_id}".encode()


def request(under_test: Dispatcher, request_id: RequestId, now_s: float = 0.0) -> list[Effect]:
    return under_test.on_request(ask(request_id), payload_of(request_id), now_s)


def test_a_request_goes_where_the_scheduler_says():
    under_test = dispatcher(I0, I1)
    assert request(under_test, R1) == [ToScheduler(ask(R1))]
    assert under_test.on_dispatched(Dispatched(R1, I1, 12), 0.1) == [add(R1, I1, 12)]
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None


def test_without_an_answer_in_time_the_scheduler_is_bypassed():
    """Section 5: "When the global scheduler fails, [it] temporarily falls back to a
    scheduler-bypassing mode, thus not affecting the service availability"."""
    under_test = dispatcher(I0)
    request(under_test, R1, now_s=10.0)
    assert under_test.next_deadline_s == 10.5
    assert under_test.on_time(10.4) == []
    assert under_test.on_time(10.5) == [ToScheduler(CancelDispatch(R1)), add(R1, I0)]


# ------------------------------------------------------- requests that wait at the scheduler


def waiting(*instances: InstanceId) -> Dispatcher:
    """A front end, one of whose requests the scheduler holds since 10.1 s."""
    under_test = dispatcher(*instances)
    request(under_test, R1, now_s=10.0)
    assert under_test.on_held(Held((R1,)), 10.1) == []
    return under_test


def test_a_request_waits_as_long_as_the_scheduler_says_that_it_holds_it():
    under_test = waiting(I0, I1)
    for now_s in (10.5, 10.9, 11.3):
        assert under_test.on_time(now_s) == []
        under_test.on_held(Held(), now_s)
    assert under_test.on_dispatched(Dispatched(R1, I1, 12), 11.4) == [add(R1, I1, 12)]
    assert under_test.next_deadline_s is None


def test_a_scheduler_that_falls_silent_is_bypassed_by_what_waits_there():
    under_test = waiting(I0)
    assert under_test.next_deadline_s == 10.6
    assert under_test.on_time(10.5) == []
    assert under_test.on_time(10.6) == [ToScheduler(CancelDispatch(R1)), add(R1, I0)]
    # The next request is not asked for.
    assert request(under_test, R2, now_s=10.7) == [add(R2, I0)]
    assert under_test.on_dispatched(Dispatched(R1, I0, 12), 10.8) == [
        ToScheduler(CancelDispatch(R1))
    ]


def test_that_others_are_held_is_no_answer_for_a_request():
    under_test = waiting(I0)
    request(under_test, R2, now_s=10.2)
    under_test.on_held(Held(), 10.5)
    assert under_test.on_time(10.7) == [ToScheduler(CancelDispatch(R2)), add(R2, I0)]
    assert under_test.on_dispatched(Dispatched(R1, I0, 12), 10.8) == [add(R1, I0, 12)]


def test_any_answer_shows_that_the_scheduler_holds_the_others_still():
    under_test = waiting(I0)
    request(under_test, R2, now_s=10.2)
    under_test.on_dispatched(Dispatched(R2, I0, 11), 10.5)
    assert under_test.next_deadline_s == 11.0


def test_another_scheduler_is_asked_for_what_waited_at_the_first():
    under_test = waiting(I0)
    (asked,) = under_test.on_membership(membership(2, I0, scheduler="successor"), 10.4)
    # It has waited since 10.0.
    assert asked == ToScheduler(ask(R1, waited_s=pytest.approx(0.4)))
    assert under_test.on_time(10.8) == []
    assert under_test.on_time(10.9) == [ToScheduler(CancelDispatch(R1)), add(R1, I0)]


def test_without_a_scheduler_what_waited_there_is_dispatched_here():
    under_test = waiting(I0)
    assert under_test.on_membership(membership(2, I0, scheduler=None), 10.4) == [add(R1, I0)]


def test_the_end_of_a_client_ends_the_wait():
    under_test = waiting(I0)
    assert under_test.on_abort([R1]) == [ToScheduler(CancelDispatch(R1))]
    assert under_test.next_deadline_s is None


# ----------------------------------------------------------------- a scheduler that is silent


def test_no_request_waits_a_second_for_a_scheduler_that_has_died_by_default():
    under_test = Dispatcher(ME, FrontendConfig())
    under_test.on_membership(membership(1, I0), 0.0)
    request(under_test, R1, now_s=10.0)
    deadline_s = under_test.next_deadline_s
    assert deadline_s is not None
    assert deadline_s < 11.0
    assert under_test.on_time(deadline_s)[1:] == [add(R1, I0)]


def test_in_bypass_requests_are_dispatched_directly_by_a_simple_rule():
    """Section 5: "the request frontends directly dispatch requests to certain instances using
    simple rules"."""
    under_test = dispatcher(I0, I1, scheduler=None)
    assert request(under_test, R1) == [add(R1, I0)]
    assert request(under_test, R2) == [add(R2, I1)]
    under_test.on_ended(R2)
    assert request(under_test, RequestId("r3")) == [add(RequestId("r3"), I1)]


def test_a_silent_scheduler_is_not_waited_for_again_until_the_retry():
    under_test = dispatcher(I0)
    request(under_test, R1, now_s=10.0)
    under_test.on_time(10.5)
    assert request(under_test, R2, now_s=12.4) == [add(R2, I0)]
    assert request(under_test, RequestId("r3"), now_s=12.5) == [ToScheduler(ask(RequestId("r3")))]


def test_a_late_answer_is_cancelled_once_more_and_ends_the_silence():
    """The first cancellation may have been refused by a full mailbox: without another one, the
    scheduler would count the request, and hold others, until the lease of its dispatch is over."""
    under_test = dispatcher(I0, I1)
    request(under_test, R1, now_s=10.0)
    under_test.on_time(10.5)
    assert under_test.on_dispatched(Dispatched(R1, I1, 3), 10.6) == [
        ToScheduler(CancelDispatch(R1))
    ]
    assert under_test.owner(R1) == I0
    assert request(under_test, R2, now_s=10.7) == [ToScheduler(ask(R2))]


def test_another_scheduler_is_asked_for_what_its_predecessor_left_open():
    under_test = dispatcher(I0)
    request(under_test, R1)
    assert under_test.on_membership(membership(2, I0, scheduler="other"), 0.1) == [
        ToScheduler(ask(R1, waited_s=0.1))
    ]


def test_another_scheduler_ends_the_silence():
    under_test = dispatcher(I0)
    request(under_test, R1, now_s=10.0)
    under_test.on_time(10.5)
    under_test.on_membership(membership(2, I0, scheduler="other"), 10.6)
    assert request(under_test, R2, now_s=10.7) == [ToScheduler(ask(R2))]


def test_a_scheduler_that_is_gone_is_not_waited_for():
    under_test = dispatcher(I0)
    request(under_test, R1)
    assert under_test.on_membership(membership(2, I0, scheduler=None), 0.1) == [add(R1, I0)]


def test_a_dispatch_to_an_instance_that_is_not_there_is_cancelled_and_done_by_the_local_rule():
    under_test = dispatcher(I0)
    request(under_test, R1)
    assert under_test.on_dispatched(Dispatched(R1, I1, 3), 0.1) == [
        ToScheduler(CancelDispatch(R1)),
        add(R1, I0),
    ]


def test_without_instances_a_request_is_held_until_one_joins():
    under_test = dispatcher(scheduler=None)
    assert request(under_test, R1) == []
    assert request(under_test, R2) == []
    assert under_test.on_membership(membership(2, I0, I1, scheduler=None), 1.0) == [
        add(R1, I0),
        add(R2, I1),
    ]
    assert under_test.next_deadline_s is None


def test_a_held_request_fails_when_no_instance_joins_in_time():
    under_test = dispatcher(scheduler=None)
    request(under_test, R1, now_s=10.0)
    assert under_test.next_deadline_s == 70.0
    assert under_test.on_time(70.0) == [Fail(R1, Failure.NO_INSTANCE)]
    assert under_test.on_membership(membership(2, I0, scheduler=None), 71.0) == []


def test_a_held_request_keeps_its_deadline_while_memberships_come_without_an_instance():
    under_test = dispatcher(scheduler=None)
    request(under_test, R1, now_s=10.0)
    under_test.on_membership(membership(2, scheduler=None), 60.0)
    assert under_test.next_deadline_s == 70.0


def test_the_local_rule_gives_nothing_to_a_terminating_instance():
    under_test = Dispatcher(ME, CONFIG)
    under_test.on_membership(membership(1, I0, I1, scheduler=None, terminating=(I0,)), 0.0)
    assert request(under_test, R1) == [add(R1, I1)]
    assert request(under_test, R2) == [add(R2, I1)]


def test_an_overtaken_membership_is_ignored():
    under_test = dispatcher(I0, scheduler=None)
    under_test.on_membership(membership(3, I1, scheduler=None), 0.0)
    under_test.on_membership(membership(2, I0, scheduler=None), 0.0)
    assert under_test.instances == (I1,)


def test_an_abort_before_the_answer_cancels_the_dispatch():
    under_test = dispatcher(I0)
    request(under_test, R1)
    assert under_test.on_abort([R1]) == [ToScheduler(CancelDispatch(R1))]
    assert under_test.on_dispatched(Dispatched(R1, I0, 1), 0.1) == [ToScheduler(CancelDispatch(R1))]


def test_the_scheduler_hears_of_an_abort_after_the_dispatch():
    """It counts on the prompt until that is computed."""
    under_test = dispatcher(I0)
    request(under_test, R1)
    under_test.on_dispatched(Dispatched(R1, I0, 1), 0.1)
    assert under_test.on_abort([R1]) == [
        ToScheduler(CancelDispatch(R1)),
        ToInstance(I0, AbortRequests((R1,))),
    ]
    assert under_test.on_abort([R1]) == []


def test_an_abort_of_a_held_request_forgets_it():
    under_test = dispatcher(scheduler=None)
    request(under_test, R1)
    assert under_test.on_abort([R1]) == []
    assert under_test.on_membership(membership(2, I0, scheduler=None), 1.0) == []


def test_aborts_go_to_the_owners_together():
    under_test = dispatcher(I0, I1, scheduler=None)
    for number in range(4):
        request(under_test, RequestId(f"r{number}"))
    assert under_test.on_abort([RequestId(f"r{number}") for number in range(4)]) == [
        ToInstance(I0, AbortRequests((RequestId("r0"), RequestId("r2")))),
        ToInstance(I1, AbortRequests((RequestId("r1"), RequestId("r3")))),
    ]
    assert under_test.on_abort([RequestId("r0")]) == []


def test_a_moved_request_is_aborted_where_it_moved_to():
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    assert under_test.on_moved(moved(I1, 0, R1), 1.0) == []
    assert under_test.on_abort([R1]) == [ToInstance(I1, AbortRequests((R1,)))]


def test_a_request_of_which_later_tokens_come_from_elsewhere_is_aborted_there():
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    under_test.on_tokens(I1, [TokenSpan(R1, 0, 1, False)])
    assert under_test.on_abort([R1]) == [ToInstance(I1, AbortRequests((R1,)))]


def test_news_of_an_ended_request_is_ignored():
    under_test = dispatcher(I0, I1, scheduler=None)
    request(under_test, R1)
    under_test.on_ended(R1)
    assert under_test.on_moved(moved(I1, 0, R1), 1.0) == []
    assert under_test.owner(R1) is None


@pytest.mark.parametrize("option", ["scheduler_timeout_s", "hold_timeout_s", "gap_timeout_s"])
def test_a_time_out_must_be_positive(option: str):
    with pytest.raises(ConfigurationError, match=f"{option} must be positive, not 0"):
        FrontendConfig(**{option: 0})
