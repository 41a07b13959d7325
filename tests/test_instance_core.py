"""What surrounds a llumlet: whose requests are on an instance, and whom it answers."""

from sterna.config import LlumletConfig
from sterna.instance_core import AddToEngine, InstanceCore
from sterna.messages import (
    AddRequest,
    Frontend,
    Instance,
    Membership,
    OwnerQuery,
    OwnerReply,
    TokenBatch,
    TokenSpan,
)
from sterna.policy.presets import STERNA
from sterna.sending import ToMailbox
from sterna.types import FrontendId, InstanceId, RequestId

I0 = InstanceId("i0")
F0, F1 = FrontendId(0), FrontendId(1)
R = RequestId("r")


def core() -> InstanceCore:
    return InstanceCore(I0, LlumletConfig(policy=STERNA))


def membership(version: int, *frontends: FrontendId) -> Membership:
    there = tuple(Frontend(each, f"mailbox of {each}") for each in frontends)
    return Membership(version, (Instance(I0, "i0"),), there, None)


def test_a_front_end_that_is_not_known_yet_is_answered_when_it_is() -> None:
    """It heard of the instance before the instance heard of anybody."""
    under_test = core()
    assert under_test.on_message(OwnerQuery(F0, 7, (R,)), [], 0.0) == []
    effects = under_test.on_message(membership(1, F0), [], 0.0)
    assert ToMailbox("mailbox of 0", OwnerReply(I0, 7, ())) in effects


def test_tokens_for_a_front_end_that_is_not_known_yet_are_kept_in_order() -> None:
    under_test = core()
    batches = [TokenBatch(I0, (TokenSpan(R, i, 1, False),)) for i in range(3)]
    under_test.on_membership(membership(1), 0.0)
    for batch in batches:
        assert under_test.on_outputs(F1, batch.spans, [b"token"], 0.0) == []
    under_test.on_membership(membership(2, F0), 0.0)
    effects = under_test.on_membership(membership(3, F0, F1), 0.0)
    assert [each for each in effects if isinstance(each, ToMailbox)] == [
        ToMailbox("mailbox of 1", batch, [b"token"]) for batch in batches
    ]


def test_nothing_is_kept_for_a_front_end_that_is_gone() -> None:
    under_test = core()
    for each in (membership(1, F0), membership(2)):
        under_test.on_membership(each, 0.0)
    assert under_test.on_outputs(F0, (TokenSpan(R, 0, 1, False),), [b"token"], 0.0) == []
    effects = under_test.on_membership(membership(3, F1), 0.0)
    assert not [each for each in effects if isinstance(each, ToMailbox)]


def test_a_request_that_comes_after_its_front_ends_death_is_not_begun() -> None:
    under_test = core()
    for each in (membership(1, F0), membership(2)):
        under_test.on_membership(each, 0.0)
    effects = under_test.on_message(AddRequest(F0, R, 0), [b"payload"], 0.0)
    assert not [each for each in effects if isinstance(each, AddToEngine)]
    assert not under_test.requests()
