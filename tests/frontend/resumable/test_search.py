"""Who has a stream that a front end does not have."""

import pytest

from sterna.frontend.resumable.search import Nowhere, Search
from sterna.stream_messages import Finding
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
    assert search.outcome is Nowhere.NOWHERE
    assert searched().outcome is Nowhere.NOWHERE


def test_whoever_dies_denies() -> None:
    search = searched(A, B)
    search.on_answer(A, NOTHING)
    search.on_frontends([A, C])
    assert search.outcome is Nowhere.NOWHERE


@pytest.mark.parametrize("has_replica", [True, False])
def test_a_stream_of_which_there_is_a_replica_is_waited_for(has_replica: bool) -> None:
    search = searched(A, B, has_replica=has_replica)
    search.on_answer(A, NOTHING if has_replica else REPLICA)
    search.on_frontends([A])
    assert search.outcome is None
    assert search.replicas == ([] if has_replica else [A])
    search.on_answer(A, STREAM)
    assert search.outcome == A


def test_a_replica_dies_with_its_keeper_and_so_does_the_stream() -> None:
    search = searched(A, B)
    search.on_answer(A, REPLICA)
    search.on_answer(B, STREAM)
    search.on_frontends([C])
    assert search.outcome is Nowhere.NOWHERE
