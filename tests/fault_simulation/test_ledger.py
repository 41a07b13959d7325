"""What the simulator under faults lets instances and front ends do with a request."""

import pytest

from fault_simulation.oracle.ledger import Ledger, Status
from fault_simulation.oracle.token_oracle import Ask
from fault_simulation.virtual.timeline import Violation
from sterna.frontend.requests.request_effects import Failure
from sterna.types import FrontendId, InstanceId, Priority, RequestId

R0, AGAIN = RequestId("r0"), RequestId("r0+1")
I0 = InstanceId("i0")


@pytest.fixture
def ledger() -> Ledger:
    """One of a request that an instance has."""
    ledger = Ledger()
    ask = Ask(R0, FrontendId(0), 8, 16, 0.0, Priority(0), salt=1)
    ledger.accept(ask, "f0", 0.0)
    ledger.on_sent(R0, I0)
    return ledger


def test_an_instance_ends_nothing_that_a_client_waits_for(ledger: Ledger) -> None:
    with pytest.raises(Violation, match="r0 was ended on an instance"):
        ledger.on_engine_abort(R0)


def test_nothing_is_sent_again_without_a_reason(ledger: Ledger) -> None:
    with pytest.raises(Violation, match="no instance that had it has failed"):
        ledger.on_sent_again(R0, AGAIN, 0, is_by_time=False)


def test_an_instance_may_part_from_a_request_that_goes_on_elsewhere(ledger: Ledger) -> None:
    ledger.on_handed_back([R0])
    ledger.on_engine_abort(R0)
    ledger.on_sent_again(R0, AGAIN, 0, is_by_time=False)


def test_a_request_that_was_handed_back_is_waited_for_under_its_next_name(ledger: Ledger) -> None:
    ledger.on_handed_back([R0])
    ledger.on_sent_again(R0, AGAIN, 0, is_by_time=False)
    # News of the former attempt that came late change nothing for this one.
    ledger.on_handed_back([R0])
    with pytest.raises(Violation, match=r"r0\+1 was ended on an instance"):
        ledger.on_engine_abort(AGAIN)


@pytest.mark.parametrize("failure", [Failure.UNSENT, Failure.TOKENS_LOST, Failure.NO_INSTANCE])
def test_nothing_fails_for_what_was_sent(ledger: Ledger, failure: Failure) -> None:
    with pytest.raises(Violation, match=f"r0 failed: {failure.value}"):
        ledger.on_failure(R0, failure)


def test_a_request_may_fail_that_could_not_be_sent(ledger: Ledger) -> None:
    ledger.on_unsent(R0)
    ledger.on_failure(R0, Failure.UNSENT)
    assert ledger.records[R0].status is Status.FAILED


def test_a_request_may_fail_whose_tokens_could_not_be_sent(ledger: Ledger) -> None:
    ledger.on_tokens_unsent([R0])
    ledger.on_failure(R0, Failure.TOKENS_LOST)
    assert ledger.records[R0].status is Status.FAILED


def test_what_could_not_be_sent_of_a_former_attempt_excuses_no_failure(ledger: Ledger) -> None:
    ledger.on_unsent(R0)
    ledger.on_tokens_unsent([R0])
    ledger.on_handed_back([R0])
    ledger.on_sent_again(R0, AGAIN, 0, is_by_time=False)
    ledger.on_tokens_unsent([R0])
    with pytest.raises(Violation, match=f"r0 failed: {Failure.TOKENS_LOST.value}"):
        ledger.on_failure(R0, Failure.TOKENS_LOST)


def test_a_message_that_is_late_excuses_what_is_sent_again_by_time_alone(ledger: Ledger) -> None:
    with pytest.raises(Violation, match="no instance that had it has failed"):
        ledger.on_sent_again(R0, AGAIN, 0, is_by_time=False, is_late=True)
    with pytest.raises(Violation, match="no instance that had it has failed"):
        ledger.on_sent_again(R0, AGAIN, 0, is_by_time=True, is_late=False)
    ledger.on_sent_again(R0, AGAIN, 0, is_by_time=True, is_late=True)


def test_refused_tokens_excuse_that_their_attempt_is_sent_again_by_time(ledger: Ledger) -> None:
    ledger.on_tokens_unsent([R0])
    with pytest.raises(Violation, match="no instance that had it has failed"):
        ledger.on_sent_again(R0, AGAIN, 0, is_by_time=False)
    ledger.on_sent_again(R0, AGAIN, 0, is_by_time=True)
    with pytest.raises(Violation, match="no instance that had it has failed"):
        ledger.on_sent_again(R0, RequestId("r0+2"), 0, is_by_time=True)
