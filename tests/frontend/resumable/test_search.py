"""Who has a stream that a front end does not have."""

import pytest

from sterna.frontend.resumable.search import NotFound, Search, Searches, ToFrontend
from sterna.messages.streams import Finding, FindStream, StopReading, StreamFound
from sterna.types import FrontendId

A, B, C = FrontendId(1), FrontendId(2), FrontendId(3)
STREAM, REPLICA, NOTHING = Finding.STREAM, Finding.REPLICA, Finding.NOTHING


def searched(*others: FrontendId, has_replica: bool = False) -> Search:
    return Search(others, has_replica=has_replica)


def test_who_has_the_stream_is_found_before_all_have_answered() -> None:
    search = searched(A, B, C)
    search.on_answer(A, REPLICA)
    search.on_answer(B, STREAM)
    assert search.outcome == B


def test_a_stream_that_all_deny_is_nowhere() -> None:
    search = searched(A, B)
    search.on_answer(A, NOTHING)
    assert search.outcome is None
    search.on_answer(B, NOTHING)
    assert search.outcome is NotFound.NOWHERE
    assert searched().outcome is NotFound.NOWHERE


def test_of_several_answers_of_one_the_newest_counts() -> None:
    search = searched(A)
    search.on_answer(A, REPLICA)
    search.on_answer(A, NOTHING)
    assert search.outcome is NotFound.NOWHERE
    assert search.awaited == []


def test_where_nobody_has_died_no_answer_is_void() -> None:
    search = searched(A, B)
    search.on_frontends([A, B])
    for each in (A, B):
        search.on_answer(each, NOTHING)
    assert search.outcome is NotFound.NOWHERE


def test_when_one_dies_all_others_are_asked_again() -> None:
    """A denies, B takes the stream over and dies: A may have it now."""
    search = searched(A, B)
    search.on_answer(A, NOTHING)
    search.on_frontends([A, C])
    assert search.outcome is NotFound.ASK_AGAIN
    search.on_answer(A, STREAM)
    assert search.outcome == A


def test_one_that_comes_voids_no_answer() -> None:
    search = searched(A)
    search.on_frontends([A, C])
    search.on_answer(A, NOTHING)
    assert search.outcome is NotFound.NOWHERE


@pytest.mark.parametrize("has_replica", [True, False])
def test_a_stream_of_which_there_is_a_replica_is_waited_for(has_replica: bool) -> None:
    search = searched(A, has_replica=has_replica)
    search.on_answer(A, NOTHING if has_replica else REPLICA)
    assert search.outcome is None
    assert search.awaited == ([] if has_replica else [A])
    search.on_answer(A, STREAM)
    assert search.outcome == A


def test_a_holder_or_a_replica_dies_with_who_has_it() -> None:
    search = searched(A, B)
    search.on_answer(A, REPLICA)
    search.on_answer(B, STREAM)
    search.on_frontends([C])
    assert search.outcome is NotFound.ASK_AGAIN
    assert search.awaited == []


def test_who_was_told_of_a_replica_is_told_when_it_has_become_the_stream() -> None:
    keeper = Searches(A)
    keeper.on_frontends([A, B, C])
    for asker in (B, C):
        query = FindStream(asker, 7, "tern", b"owner")
        answer = keeper.on_find(query, has_stream=False, has_replica=True)
        assert answer == ToFrontend(asker, StreamFound(A, 7, REPLICA))
    keeper.on_stop(C, 7)
    assert keeper.on_taken_over(lambda *_: False) == []
    assert keeper.on_taken_over(lambda *_: True) == [ToFrontend(B, StreamFound(A, 7, STREAM))]
    assert keeper.on_taken_over(lambda *_: True) == []


def test_who_looks_no_more_says_so_to_those_that_have_a_replica() -> None:
    searches = Searches(A)
    searches.on_frontends([A, B, C])
    number, messages = searches.begin("tern", b"owner", has_replica=False)
    query = FindStream(A, number, "tern", b"owner")
    assert messages == [ToFrontend(B, query), ToFrontend(C, query)]
    assert searches.on_found(StreamFound(B, number, REPLICA))
    assert searches.on_found(StreamFound(C, number, NOTHING))
    assert searches.outcome(number) is None
    assert searches.end(number) == [ToFrontend(B, StopReading(A, number))]
    assert not searches.on_found(StreamFound(B, number, STREAM))


def test_whose_replica_is_heard_of_too_late_hears_that_nobody_looks_any_more() -> None:
    """B, which has the stream, answers first; that C has the replica comes behind the end."""
    searches = {each: Searches(each) for each in (A, B, C)}
    for each in searches.values():
        each.on_frontends([A, B, C])
    number, messages = searches[A].begin("tern", b"owner", has_replica=False)
    answers = {}
    for to, query in ((each.frontend_id, each.message) for each in messages):
        assert isinstance(query, FindStream)
        answer = searches[to].on_find(query, has_stream=to == B, has_replica=to == C)
        assert isinstance(answer.message, StreamFound)
        answers[to] = answer.message
    assert searches[A].on_found(answers[B])
    assert searches[A].end(number) == [ToFrontend(C, StopReading(A, number))]
    assert not searches[A].on_found(answers[C])
    assert not searches[C].is_idle
    searches[C].on_stop(A, number)
    assert all(each.is_idle for each in searches.values())


def test_who_has_died_unheard_is_not_told_of_the_end() -> None:
    searches = Searches(A)
    searches.on_frontends([A, B, C])
    number, _ = searches.begin("tern", b"owner", has_replica=False)
    searches.on_frontends([A, C])
    assert searches.end(number) == [ToFrontend(C, StopReading(A, number))]


@pytest.mark.parametrize(
    ("has_stream", "has_replica", "finding"),
    [(True, False, STREAM), (True, True, STREAM), (False, True, REPLICA), (False, False, NOTHING)],
)
def test_a_front_end_that_is_asked_says_what_it_has(
    has_stream: bool, has_replica: bool, finding: Finding
) -> None:
    keeper = Searches(A)
    keeper.on_frontends([A, B])
    query = FindStream(B, 7, "tern", b"owner")
    answer = keeper.on_find(query, has_stream=has_stream, has_replica=has_replica)
    assert answer == ToFrontend(B, StreamFound(A, 7, finding))
    assert keeper.is_idle is (finding is not REPLICA)


def test_who_hoped_for_a_replica_and_has_died_is_forgotten() -> None:
    keeper = Searches(A)
    keeper.on_frontends([A, B, C])
    for asker in (B, C):
        query = FindStream(asker, 7, "tern", b"owner")
        keeper.on_find(query, has_stream=False, has_replica=True)
    keeper.on_frontends([A, C])
    assert keeper.on_taken_over(lambda *_: True) == [ToFrontend(C, StreamFound(A, 7, STREAM))]
    assert keeper.is_idle


def test_a_front_end_that_looks_for_something_is_not_idle() -> None:
    searches = Searches(A)
    searches.on_frontends([A, B])
    numbers = [searches.begin("tern", b"owner", has_replica=False)[0] for _ in range(3)]
    assert len({*numbers, searches.next_id()}) == 4
    for number in numbers:
        assert not searches.is_idle
        searches.end(number)
    assert searches.is_idle
