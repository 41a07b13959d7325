"""A request's way through a front end's one state machine, from its arrival to its end."""

from sterna.config import FrontendConfig
from sterna.frontend.core import FrontendCore
from sterna.frontend.effects import Deliver, Effect, Fail, Failure, ToInstance, ToScheduler
from sterna.messages import (
    AbortRequests,
    AddRequest,
    CancelDispatch,
    Dispatched,
    DispatchRequest,
    Farewell,
    Instance,
    Membership,
    TokenBatch,
    TokenSpan,
)
from sterna.types import NORMAL, FrontendId, InstanceId, RequestId

ME = FrontendId(7)
I0, I1 = InstanceId("i0"), InstanceId("i1")
R1 = RequestId("r1")
ASK = DispatchRequest(ME, R1, 64, 0.0, NORMAL, NORMAL)
CONFIG = FrontendConfig(gap_timeout_s=10.0)


def membership(version: int, *instances: InstanceId, emptied: InstanceId | None = None):
    members = tuple(
        Instance(each, f"tcp://{each}", each == emptied, emptied_since=version * (each == emptied))
        for each in instances
    )
    return Membership(version, members, (), "scheduler")


def core(*instances: InstanceId) -> FrontendCore:
    """With one request, which was sent to the first of these instances."""
    under_test = FrontendCore(ME, CONFIG)
    under_test.on_message(membership(1, *instances), (), 0.0)
    assert under_test.on_request(ASK, b"payload", 0.0) == [ToScheduler(ASK)]
    effects = under_test.on_message(Dispatched(R1, instances[0], 3), (), 0.1)
    assert effects == [ToInstance(instances[0], AddRequest(ME, R1, 3), b"payload")]
    return under_test


def tokens(
    under_test: FrontendCore, owner: InstanceId, first: int, num: int, *, ends: bool = False
) -> list[Effect]:
    batch = TokenBatch(owner, (TokenSpan(R1, first, num, ends),))
    return under_test.on_message(batch, [b"tokens"], 1.0)


def test_a_request_is_dispatched_delivered_and_forgotten():
    under_test = core(I0)
    assert tokens(under_test, I0, 0, 2) == [Deliver(R1, b"tokens", 0, False)]
    assert (under_test.owner(R1), under_test.num_delivered(R1)) == (I0, 2)
    assert tokens(under_test, I0, 1, 2, ends=True) == [Deliver(R1, b"tokens", 1, True)]
    assert (under_test.owner(R1), under_test.num_delivered(R1)) == (None, None)
    assert under_test.next_deadline_s is None


def test_an_instance_that_steps_what_nobody_waits_for_is_told_to_stop():
    under_test = core(I0)
    under_test.on_abort([R1], 0.5)
    assert tokens(under_test, I0, 0, 1) == [ToInstance(I0, AbortRequests((R1,)))]


def test_a_gap_that_stays_open_fails_the_request_and_frees_it_where_it_is():
    under_test = core(I0)
    assert tokens(under_test, I0, 1, 1) == []
    assert under_test.next_deadline_s == 11.0
    assert under_test.on_time(11.0) == [
        ToInstance(I0, AbortRequests((R1,))),
        Fail(R1, Failure.TOKENS_LOST),
    ]
    assert under_test.num_delivered(R1) is None


def test_an_abort_before_the_dispatch_leaves_nothing_behind():
    under_test = FrontendCore(ME, CONFIG)
    under_test.on_message(membership(1, I0), (), 0.0)
    under_test.on_request(ASK, b"payload", 0.0)
    assert under_test.on_abort([R1], 0.1) == [ToScheduler(CancelDispatch(R1))]
    assert under_test.next_deadline_s is None


def test_the_end_of_its_last_request_is_the_farewell_to_an_instance_that_is_emptied():
    under_test = core(I0, I1)
    assert under_test.on_message(membership(2, I0, I1, emptied=I0), (), 0.5) == []
    assert tokens(under_test, I0, 0, 1, ends=True) == [
        Deliver(R1, b"tokens", 0, True),
        ToInstance(I0, Farewell(ME, 2)),
    ]
