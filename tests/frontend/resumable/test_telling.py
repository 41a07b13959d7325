"""What a buddy is told of streams, in which messages, and for how long it is waited for."""

from sterna.frontend.resumable.replica_link import ReplicaLink, ToBuddy
from sterna.messages.streams import DropStream, ExtendStreams, Group, StreamOver
from sterna.types import FrontendId
from tests.frontend.resumable.outputs import BUDDY, HOLDER, REPLICA_TIMEOUT_S, THIRD

ONE, OTHER = Group("one", "a", False), Group("other", "b", True)


def telling(buddy: FrontendId | None = BUDDY) -> ReplicaLink:
    it = ReplicaLink(HOLDER, REPLICA_TIMEOUT_S)
    it.on_buddy(buddy)
    return it


def tell_over(it: ReplicaLink, stream_id: str, now_s: float) -> int:
    return it.send(lambda number: StreamOver(HOLDER, number, stream_id), [], now_s)


def test_outputs_go_together_and_before_what_is_said_next() -> None:
    it = telling()
    assert [it.extend(ONE, b"1"), it.extend(OTHER, b"2")] == [1, 1]
    assert tell_over(it, "one", 0.0) == 2
    assert it.extend(ONE, b"3") == 3
    assert it.flush(0.0) == (
        [
            ToBuddy(BUDDY, ExtendStreams(HOLDER, 1, (ONE, OTHER)), [b"1", b"2"]),
            ToBuddy(BUDDY, StreamOver(HOLDER, 2, "one"), []),
            ToBuddy(BUDDY, ExtendStreams(HOLDER, 3, (ONE,)), [b"3"]),
        ],
        False,
    )
    assert it.flush(0.0) == ([], False)


def test_where_there_is_nobody_nothing_is_said_or_waited_for() -> None:
    it = telling(None)
    assert (it.extend(ONE, b"1"), tell_over(it, "one", 0.0)) == (0, 0)
    assert it.flush(10.0) == ([], False)
    assert it.next_deadline_s is None
    assert not it.is_waited_for(0)


def test_what_the_buddy_has_confirmed_is_not_waited_for() -> None:
    it = telling()
    for number, now_s in ((1, 0.0), (2, 0.1), (3, 0.2)):
        assert tell_over(it, "one", now_s) == number
    assert it.next_deadline_s == REPLICA_TIMEOUT_S
    assert it.on_kept(BUDDY, 2, 0.3)
    assert [it.is_waited_for(number) for number in (1, 2, 3)] == [False, False, True]
    assert it.next_deadline_s == 0.2 + REPLICA_TIMEOUT_S
    assert it.on_kept(BUDDY, 3, 0.3)
    assert it.next_deadline_s is None


def test_an_old_confirmation_and_that_of_another_are_no_news() -> None:
    it = telling()
    tell_over(it, "one", 0.0)
    tell_over(it, "one", 0.0)
    assert it.on_kept(BUDDY, 1, 0.0)
    assert not it.on_kept(BUDDY, 1, 0.0)
    assert not it.on_kept(BUDDY, 0, 0.0)
    assert not it.on_kept(THIRD, 2, 0.0)
    assert it.is_waited_for(2)


def test_a_buddy_that_confirms_nothing_in_time_is_not_waited_for() -> None:
    it = telling()
    number = tell_over(it, "one", 1.0)
    it.flush(1.0)
    assert it.flush(1.0 + REPLICA_TIMEOUT_S - 0.1) == ([], False)
    assert it.is_waited_for(number)
    assert it.flush(1.0 + REPLICA_TIMEOUT_S) == ([], True)
    assert not it.is_waited_for(number)
    assert it.next_deadline_s is None
    assert it.flush(2.0 + REPLICA_TIMEOUT_S) == ([], False), "that is news once"
    assert not it.is_waited_for(number)


def test_it_is_waited_for_until_that_is_said_to_be_over() -> None:
    it = telling()
    tell_over(it, "one", 0.0)
    late = tell_over(it, "one", 0.0)
    it.on_kept(BUDDY, 1, REPLICA_TIMEOUT_S)
    assert it.is_waited_for(late)
    assert it.flush(REPLICA_TIMEOUT_S)[1]


def test_one_that_has_caught_up_is_waited_for_again() -> None:
    it = telling()
    tell_over(it, "one", 0.0)
    tell_over(it, "one", 0.1)
    it.flush(10.0)
    late = tell_over(it, "one", 10.0)
    assert it.on_kept(BUDDY, 1, 10.0)
    assert not it.is_waited_for(late), "the second is late as well"
    assert it.on_kept(BUDDY, 2, 10.0)
    assert it.is_waited_for(late)
    assert it.next_deadline_s == 10.0 + REPLICA_TIMEOUT_S


def test_another_buddy_is_told_from_then_on_and_has_all_numbers_before() -> None:
    it = telling()
    number = tell_over(it, "one", 0.0)
    it.flush(REPLICA_TIMEOUT_S)
    it.extend(ONE, b"1")
    it.on_buddy(THIRD)
    assert it.buddy == THIRD
    assert not it.is_waited_for(number)
    assert it.next_deadline_s is None
    dropped = it.send(lambda number: DropStream(HOLDER, number, "one"), [], 1.0)
    assert it.is_waited_for(dropped)
    assert it.flush(1.0) == ([ToBuddy(THIRD, DropStream(HOLDER, 2, "one"), [])], False)
