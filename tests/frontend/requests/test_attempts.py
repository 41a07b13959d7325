"""Which requests go on behind a lost instance, and when (for clients: `test_core_deaths`)."""

from sterna.frontend.requests.attempts import PROGRESS_TOKENS, Attempts
from sterna.messages.actors import DispatchRequest
from sterna.types import NORMAL, FrontendId, RequestId

R1, R2, R3 = (RequestId(f"r{number}") for number in (1, 2, 3))


def attempt(request_id: RequestId, number: int) -> RequestId:
    return RequestId(f"{request_id}+{number}")


def suspected(*request_ids: RequestId) -> Attempts:
    """These requests were on an instance that died, and on the next one that did."""
    attempts = Attempts(trial_timeout_s=10.0)
    for each in request_ids:
        attempts.open(DispatchRequest(FrontendId(7), each, 64, 0.0, NORMAL, NORMAL), b"")
    again, guilty = attempts.on_death(request_ids)
    assert ([each.ask.request_id for each in again], guilty) == (
        [attempt(each, 1) for each in request_ids],
        [],
    )
    assert attempts.on_death([attempt(each, 1) for each in request_ids]) == ([], [])
    return attempts


def due(attempts: Attempts, now_s: float) -> list[RequestId]:
    return [each.ask.request_id for each in attempts.due(now_s)]


def test_a_suspect_does_not_wait_for_ever_for_one_that_neither_ends_nor_brings_tokens() -> None:
    """It may queue behind requests that come before it for as long as there are any."""
    attempts = suspected(R1, R2)
    assert due(attempts, 5.0) == [attempt(R1, 2)]
    assert attempts.next_deadline_s == 15.0
    assert due(attempts, 14.9) == []
    assert due(attempts, 15.0) == [attempt(R2, 2)]
    assert attempts.next_deadline_s is None


def test_a_trial_that_nobody_waits_for_has_no_end() -> None:
    attempts = suspected(R1, R2)
    due(attempts, 5.0)
    attempts.close(R2)
    assert attempts.next_deadline_s is None
    assert due(attempts, 100.0) == []
    # It is the one on trial all the same.
    assert attempts.on_death([attempt(R1, 2)]) == ([], [R1])


def test_who_dies_beside_one_whose_trial_ended_without_a_verdict_is_tried_again() -> None:
    """Either may have been it."""
    attempts = suspected(R1, R2)
    due(attempts, 5.0)
    due(attempts, 15.0)
    assert attempts.on_death([attempt(R1, 2), attempt(R2, 2)]) == ([], [])
    assert due(attempts, 16.0) == [attempt(R1, 3)]
    assert attempts.on_death([attempt(R1, 3)]) == ([], [R1])
    assert due(attempts, 17.0) == [attempt(R2, 3)]


def test_one_that_dies_alone_after_its_trial_is_guilty() -> None:
    attempts = suspected(R1, R2)
    due(attempts, 5.0)
    due(attempts, 15.0)
    assert attempts.on_death([attempt(R1, 2)]) == ([], [R1])


def test_tokens_that_come_after_the_trial_clear_it_as_well() -> None:
    attempts = suspected(R1, R2, R3)
    due(attempts, 5.0)
    due(attempts, 15.0)
    attempts.extend(R1, range(PROGRESS_TOKENS))
    # R2 is the one on trial, and R1 is above suspicion.
    again, guilty = attempts.on_death([attempt(R1, 2), attempt(R2, 2)])
    assert ([each.ask.request_id for each in again], guilty) == ([attempt(R1, 3)], [R2])


def test_the_memory_that_a_request_needs_to_go_on_is_that_of_its_length() -> None:
    """With a sliding window of 4,096 tokens it does not grow."""
    attempts = Attempts(10.0, lambda num_tokens: min(num_tokens, 4_096) + 16)
    ask = DispatchRequest(FrontendId(7), R1, 4_016, 0.0, NORMAL, NORMAL, prompt_tokens=4_000)
    attempts.open(ask, b"", (1,) * 28_000)
    (again,) = attempts.on_death([R1])[0]
    assert (again.ask.prompt_tokens, again.ask.demand_tokens) == (32_000, 4_112)
    assert again.ask.has_begun
