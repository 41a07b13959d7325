"""How much of a stream clients can know."""

from sterna.frontend.resumable.resume_validity import Knowledge, ResumeValidity


def test_of_its_own_stream_a_front_end_knows_what_it_has_said() -> None:
    own = ResumeValidity(is_taken_over=False)
    assert own.knowledge(3, num_events=3) is Knowledge.ITS
    assert own.knowledge(4, num_events=3) is Knowledge.NONE


def test_of_a_stream_that_was_taken_over_nothing_is_denied_before_it_is_all_there_again() -> None:
    taken = ResumeValidity(is_taken_over=True)
    assert taken.knowledge(3, num_events=3) is Knowledge.ITS
    assert taken.knowledge(4, num_events=3) is None
    taken.on_caught_up(4)
    assert taken.knowledge(4, num_events=4) is Knowledge.ITS


def test_what_the_dead_one_said_beyond_its_record_is_lost_until_this_one_has_said_as_much() -> None:
    taken = ResumeValidity(is_taken_over=True)
    taken.on_caught_up(4)
    assert taken.knowledge(5, num_events=7) is Knowledge.LOST
    taken.on_told(5)
    assert taken.knowledge(5, num_events=7) is Knowledge.ITS
    assert taken.knowledge(6, num_events=7) is Knowledge.LOST
    # Another client reads behind the first one.
    taken.on_told(3)
    assert taken.knowledge(5, num_events=7) is Knowledge.ITS


def test_a_stream_that_ends_before_it_has_caught_up_is_all_that_there_is() -> None:
    taken = ResumeValidity(is_taken_over=True)
    taken.on_over(2)
    assert taken.knowledge(2, num_events=2) is Knowledge.ITS
    assert taken.knowledge(3, num_events=2) is Knowledge.LOST
