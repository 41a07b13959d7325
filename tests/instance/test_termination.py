"""An instance ends only when every front end has sent its FinalAck."""

from sterna.instance.termination import Termination
from sterna.types import FrontendId

F0, F1 = FrontendId(0), FrontendId(1)


def emptying(since_version: int) -> Termination:
    result = Termination()
    result.on_membership(since_version)
    return result


def test_it_may_end_when_the_last_front_end_has_left() -> None:
    under_test = emptying(3)
    under_test.on_final_ack(F0, 3)
    assert under_test.next_notice([F0, F1], 3) is None
    under_test.on_final_ack(F1, 3)
    assert under_test.next_notice([F0, F1], 4) == 3


def test_a_front_end_that_died_need_not_send_a_final_ack() -> None:
    under_test = emptying(3)
    under_test.on_final_ack(F0, 3)
    assert under_test.next_notice([F0], 4) == 3


def test_it_is_told_once_for_each_membership() -> None:
    """Again with the next one: the supervisor may be another by then."""
    under_test = emptying(3)
    assert under_test.next_notice([], 3) == 3
    assert under_test.next_notice([], 3) is None
    assert under_test.next_notice([], 4) == 3


def test_an_instance_that_serves_gives_no_notice_and_has_one_left_for_its_emptying() -> None:
    under_test = Termination()
    assert under_test.next_notice([], 3) is None
    under_test.on_membership(3)
    assert under_test.next_notice([], 3) == 3


def test_a_final_ack_may_come_before_the_instance_knows_that_it_is_emptied() -> None:
    under_test = Termination()
    under_test.on_final_ack(F0, 3)
    assert under_test.next_notice([F0], 2) is None
    under_test.on_membership(3)
    assert under_test.next_notice([F0], 3) == 3


def test_a_final_ack_from_before_an_undo_is_void() -> None:
    under_test = emptying(3)
    under_test.on_final_ack(F0, 3)
    under_test.on_membership(None)
    assert under_test.next_notice([F0], 4) is None
    under_test.on_membership(5)
    assert under_test.next_notice([F0], 5) is None
    under_test.on_final_ack(F0, 5)
    assert under_test.next_notice([F0], 5) == 5


def test_what_a_front_end_is_told_voids_its_final_ack() -> None:
    """A request has arrived, by a migration that began before, or has come back."""
    under_test = emptying(3)
    under_test.on_final_ack(F0, 3)
    under_test.on_final_ack(F1, 3)
    under_test.on_sent(F0)
    assert under_test.next_notice([F0, F1], 3) is None
    # Said before the front end heard it.
    under_test.on_final_ack(F0, 3, num_heard=0)
    assert under_test.next_notice([F0, F1], 3) is None
    under_test.on_final_ack(F0, 3, num_heard=1)
    assert under_test.next_notice([F0, F1], 3) == 3


def test_a_final_ack_that_was_sent_while_tokens_were_on_their_way_is_void() -> None:
    under_test = emptying(3)
    under_test.on_sent(F0)
    under_test.on_sent(F0)
    under_test.on_final_ack(F0, 3, num_heard=1)
    assert under_test.next_notice([F0], 3) is None
    under_test.on_final_ack(F0, 3, num_heard=2)
    assert under_test.next_notice([F0], 3) == 3


def test_nobody_waits_for_what_could_not_be_sent() -> None:
    under_test = emptying(3)
    under_test.on_sent(F0)
    under_test.on_dropped(F0)
    under_test.on_final_ack(F0, 3)
    assert under_test.next_notice([F0], 3) == 3


def test_later_memberships_do_not_void_a_final_ack() -> None:
    """Nor does another supervisor, which goes on with the emptyings of its predecessor."""
    under_test = emptying(3)
    under_test.on_final_ack(F0, 3)
    under_test.on_membership(3)
    assert under_test.next_notice([F0], 9) == 3
