"""Clients that resume a stream, also after its front end and the next one have died: which may."""

from sterna.frontend.resumable.event_log import EventId
from sterna.frontend.resumable.resume_validity import ResumeValidity, Validity
from sterna.types import FrontendId

ONE, TWO, OTHER = FrontendId(1), FrontendId(2), FrontendId(7)


def test_of_its_own_stream_a_front_end_knows_what_it_has_sent() -> None:
    own = ResumeValidity(())
    assert own.of(EventId(3), num_events=3) is Validity.VALID
    assert own.of(EventId(4), num_events=3) is Validity.IMPOSSIBLE
    assert own.of(EventId(3, OTHER), num_events=3) is Validity.IMPOSSIBLE


def test_of_a_stream_that_was_taken_over_nothing_is_denied_before_it_is_all_there_again() -> None:
    taken = ResumeValidity([(ONE, 2)])
    assert taken.of(EventId(3), num_events=3) is Validity.VALID
    assert taken.of(EventId(4), num_events=3) is None
    taken.on_replayed(2, 4)
    assert taken.of(EventId(4), num_events=4) is Validity.VALID


def test_what_the_dead_one_sent_beyond_its_record_is_lost_and_what_this_one_sent_is_not() -> None:
    taken = ResumeValidity([(ONE, 2)])
    taken.on_replayed(2, 4)
    assert taken.of(EventId(5), num_events=7) is Validity.LOST
    assert taken.num_sure(EventId(5)) == 4
    assert taken.of(EventId(5, ONE), num_events=7) is Validity.VALID
    assert taken.of(EventId(8, ONE), num_events=7) is Validity.IMPOSSIBLE


def test_a_stream_that_ends_before_it_has_caught_up_is_all_that_there_is() -> None:
    taken = ResumeValidity([(ONE, 2)])
    taken.on_over(2, has_broken_off=False)
    assert taken.of(EventId(2), num_events=2) is Validity.VALID
    assert taken.of(EventId(3), num_events=2) is Validity.LOST


def test_the_events_of_a_stream_that_breaks_off_while_it_is_repeated_are_not_the_former_ones() -> (
    None
):
    taken = ResumeValidity([(ONE, 2), (TWO, 6)])
    taken.on_replayed(2, 2)
    taken.on_over(7, has_broken_off=True)
    assert taken.of(EventId(2), num_events=7) is Validity.VALID
    assert taken.of(EventId(7, ONE), num_events=7) is Validity.LOST
    assert taken.of(EventId(7, TWO), num_events=7) is Validity.VALID


def test_after_two_takeovers_each_client_is_judged_by_the_record_of_its_sender() -> None:
    """The first front end had sent more than the eight events of its record. The second one made
    others in their place; the third one has those, and cannot tell them by their numbers."""
    third = ResumeValidity([(ONE, 8), (TWO, 26)])
    third.on_replayed(8, 8)
    third.on_replayed(26, 26)
    assert third.of(EventId(8), num_events=30) is Validity.VALID
    assert third.of(EventId(13), num_events=30) is Validity.LOST
    assert third.of(EventId(13, ONE), num_events=30) is Validity.VALID
    assert third.of(EventId(27, ONE), num_events=30) is Validity.LOST
    assert third.of(EventId(27, TWO), num_events=30) is Validity.VALID


def test_what_another_front_end_sent_that_took_the_stream_over_too_is_lost() -> None:
    """Two have a record where a living front end could not be sent to."""
    taken = ResumeValidity([(ONE, 8)])
    taken.on_replayed(8, 8)
    assert taken.of(EventId(3, OTHER), num_events=9) is Validity.LOST
