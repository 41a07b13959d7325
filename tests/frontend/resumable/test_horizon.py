"""How much of a stream clients can know."""

from sterna.frontend.resumable.resume_validity import ResumeValidity, Validity


def test_of_its_own_stream_a_front_end_knows_what_it_has_said() -> None:
    own = ResumeValidity(is_taken_over=False)
    assert own.of(3, num_events=3) is Validity.VALID
    assert own.of(4, num_events=3) is Validity.IMPOSSIBLE


def test_of_a_stream_that_was_taken_over_nothing_is_denied_before_it_is_all_there_again() -> None:
    taken = ResumeValidity(is_taken_over=True)
    assert taken.of(3, num_events=3) is Validity.VALID
    assert taken.of(4, num_events=3) is None
    taken.on_caught_up(4)
    assert taken.of(4, num_events=4) is Validity.VALID


def test_what_the_dead_one_said_beyond_its_record_is_lost_until_this_one_has_said_as_much() -> None:
    taken = ResumeValidity(is_taken_over=True)
    taken.on_caught_up(4)
    assert taken.of(5, num_events=7) is Validity.LOST
    taken.on_sent(5)
    assert taken.of(5, num_events=7) is Validity.VALID
    assert taken.of(6, num_events=7) is Validity.LOST
    # Another client reads behind the first one.
    taken.on_sent(3)
    assert taken.of(5, num_events=7) is Validity.VALID


def test_a_stream_that_ends_before_it_has_caught_up_is_all_that_there_is() -> None:
    taken = ResumeValidity(is_taken_over=True)
    taken.on_over(2)
    assert taken.of(2, num_events=2) is Validity.VALID
    assert taken.of(3, num_events=2) is Validity.LOST
