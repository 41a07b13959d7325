"""When outputs of a replicated stream are handed on, step by step."""

import pytest

from sterna.frontend.resumable.paced_stream import MAX_WAITING
from sterna.frontend.resumable.pacing import Begun, CaughtUp, Hand, Pacing, Parted, RunAgain
from sterna.frontend.resumable.replica_link import ToBuddy
from sterna.frontend.resumable.replicas import Record, Replicas
from sterna.messages.streams import DropStream, ExtendStreams, KeepStream, StreamOver
from sterna.types import RequestId
from tests.frontend.resumable.outputs import BUDDY, HOLDER, PATIENCE_S, THIRD, head, output, pacing

NAME, REQUEST = "cmpl-tern-0", RequestId("cmpl-tern-0-0123abcd")


def begun(it: Pacing, now_s: float = 0.0) -> None:
    it.begin(head(), b"body", now_s)
    it.expect("tern", NAME, now_s, is_repeatable=True)
    assert it.on_begun(REQUEST) == Begun((), False)
    it.on_asked(NAME, 1)


def brings(it: Pacing, *tokens: int, is_finished: bool = False) -> bytes:
    payload = output(REQUEST, list(tokens), is_finished)
    assert it.on_output(REQUEST, payload, is_finished=is_finished)
    return payload


def test_an_output_waits_until_the_buddy_has_it() -> None:
    it = pacing()
    begun(it)
    kept, *_ = it.flush(0.0)
    payload = brings(it, 5)
    (extended,) = it.flush(0.0)
    assert isinstance(kept, ToBuddy)
    assert isinstance(kept.message, KeepStream)
    assert isinstance(extended, ToBuddy)
    assert isinstance(extended.message, ExtendStreams)
    assert extended.frames == [payload]
    it.on_kept(BUDDY, kept.message.number, 0.0)
    assert it.flush(0.0) == []
    it.on_kept(THIRD, extended.message.number, 0.0)
    assert it.flush(0.0) == []
    it.on_kept(BUDDY, extended.message.number, 0.0)
    assert it.flush(0.0) == [Hand(payload)]


def test_without_a_buddy_nothing_waits_and_the_next_one_gets_it_all() -> None:
    it = pacing(buddy=None)
    begun(it)
    payload = brings(it, 5)
    assert it.flush(0.0) == [Hand(payload)]
    it.on_buddy(THIRD, 1.0)
    (effect,) = it.flush(1.0)
    assert isinstance(effect, ToBuddy)
    assert effect.buddy == THIRD
    assert effect.frames == [b"body", payload]


def test_what_waits_for_a_buddy_that_dies_goes_out_or_waits_for_the_next() -> None:
    for buddy, num_handed in ((None, 1), (THIRD, 0)):
        it = pacing()
        begun(it)
        payload = brings(it, 5)
        it.flush(0.0)
        it.on_buddy(buddy, 0.1)
        effects = it.flush(0.1)
        assert [each for each in effects if isinstance(each, Hand)] == [Hand(payload)] * num_handed


def test_a_buddy_that_says_nothing_is_not_waited_for_until_it_has_caught_up() -> None:
    it = pacing()
    begun(it)
    first = brings(it, 5)
    assert all(isinstance(each, ToBuddy) for each in it.flush(0.0))
    assert it.next_deadline_s == PATIENCE_S
    assert it.flush(PATIENCE_S) == [Hand(first)]
    assert it.next_deadline_s is None
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    second = brings(it, 6)
    (extended, handed) = it.flush(1.0)
    assert handed == Hand(second)
    assert isinstance(extended, ToBuddy)
    it.on_kept(BUDDY, extended.message.number, 1.1)
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    brings(it, 7)
    assert all(isinstance(each, ToBuddy) for each in it.flush(1.1))


def test_an_output_waits_until_the_one_before_has_become_events() -> None:
    it = pacing(buddy=None)
    begun(it)
    brings(it, 5)
    second = brings(it, 6)
    assert len(it.flush(0.0)) == 1
    it.on_taken(NAME, 1)
    assert it.flush(0.0) == []
    it.on_asked(NAME, 1)
    assert it.flush(0.0) == [Hand(second)]


def test_outputs_that_come_much_faster_than_they_are_taken_are_joined() -> None:
    it = pacing(buddy=None)
    begun(it)
    payloads = [brings(it, token) for token in range(10, 30)]
    brings(it, 30, is_finished=True)
    handed = []
    for _ in range(20):
        handed += it.flush(0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    joined = output(REQUEST, [*range(10 + MAX_WAITING, 31)], True)
    assert handed == [*map(Hand, payloads[:MAX_WAITING]), Hand(joined)]


def test_what_cannot_be_joined_stays_as_it_is_and_in_order() -> None:
    it = pacing(buddy=None)
    begun(it)
    payloads = [brings(it, 9) for _ in range(20)]
    handed = []
    for _ in range(30):
        handed += it.flush(0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    assert handed == [*map(Hand, payloads)]


def test_a_stream_that_is_over_stays_until_it_is_dropped() -> None:
    it = pacing()
    begun(it)
    brings(it, 5, is_finished=True)
    it.flush(0.0)
    it.over("tern", 0.0)
    it.over("tern", 0.0)
    it.drop("tern", 0.0)
    it.drop("tern", 0.0)
    kinds = [type(each.message) for each in it.flush(0.0) if isinstance(each, ToBuddy)]
    assert kinds == [StreamOver, DropStream]
    assert it.num_bytes == 0
    assert not it.on_output(REQUEST, b"", is_finished=True)


def test_a_record_for_which_there_is_no_room_is_given_up_and_the_stream_goes_on() -> None:
    it = pacing(max_bytes=1000)
    begun(it)
    payloads = []
    effects = []
    for token in range(20):
        payloads.append(brings(it, token))
        for _ in range(2):
            due = it.flush(0.0)
            effects += due
            for each in due:
                if isinstance(each, ToBuddy):
                    it.on_kept(BUDDY, each.message.number, 0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    assert [each.payload for each in effects if isinstance(each, Hand)] == payloads
    assert [each for each in effects if isinstance(each, Parted)] == [
        Parted("tern", "its record takes too much memory")
    ]
    assert it.num_bytes == 0
    last = [each for each in effects if isinstance(each, ToBuddy)][-1]
    assert isinstance(last.message, DropStream)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_what_cannot_be_repeated_passes_by(is_repeatable: bool) -> None:
    """Two engine requests of one name cannot be told apart."""
    it = pacing()
    it.begin(head(), b"body", 0.0)
    assert (it.expect("tern", NAME, 0.0, is_repeatable=is_repeatable) is not None) is is_repeatable
    assert not it.expect("tern", NAME, 0.0, is_repeatable=True)
    assert Parted("tern", "its events cannot be repeated") in it.flush(0.0)
    assert not it.expect("unknown", "cmpl-unknown-0", 0.0, is_repeatable=True)


def test_the_successor_says_when_its_events_go_beyond_the_record() -> None:
    first = pacing(buddy=None)
    begun(first)
    brings(first, 5)
    record = Record(head(), b"body")
    first.on_buddy(BUDDY, 0.0)
    for effect in first.flush(0.0):
        if isinstance(effect, ToBuddy):
            replicas = Replicas(BUDDY)
            replicas.on_frontends([HOLDER, BUDDY])
            assert replicas.on_message(effect.message, effect.frames).number
            (record,) = replicas.on_frontends([BUDDY])
    it = pacing(BUDDY, None)
    it.take_over(record, 0.0)
    it.expect("tern", NAME, 0.0, is_repeatable=True)
    again = RequestId("cmpl-tern-0-ffffffff")
    assert it.on_begun(again) == Begun((5,), False)
    it.on_asked(NAME, 1)
    fresh = output(again, [6])
    it.on_output(again, fresh, is_finished=False)
    assert it.flush(0.0) == [Hand(output(again, [5])), RunAgain("tern")]
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    assert it.flush(0.0) == [CaughtUp("tern"), Hand(fresh)]
