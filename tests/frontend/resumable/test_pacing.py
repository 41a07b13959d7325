"""Pacing: the outputs of a replicated stream, and the moment at which each is handed on."""

import pytest

from sterna.frontend.requests.request_ids import slot_of
from sterna.frontend.resumable.paced_stream import MAX_WAITING
from sterna.frontend.resumable.pacing import Begun, CaughtUp, Hand, Pacing, Replayed, ReplicaDropped
from sterna.frontend.resumable.replica_link import ToBuddy
from sterna.frontend.resumable.replicas import Record, Replicas
from sterna.messages.streams import DropStream, ExtendStreams, Group, KeepStream, StreamOver
from sterna.types import RequestId
from tests.frontend.resumable.outputs import (
    BUDDY,
    HOLDER,
    REPLICA_TIMEOUT_S,
    THIRD,
    head,
    output,
    pacing,
)

NAME, REQUEST = "cmpl-tern-0", RequestId("cmpl-tern-0-0123abcd")


def arrived(it: Pacing, request_id: RequestId, stream_id: str = "tern") -> Begun | None:
    """vLLM's code sends an engine request of the stream."""
    it.on_sent(stream_id, request_id)
    return it.on_begun(request_id)


def begun(it: Pacing, now_s: float = 0.0) -> None:
    it.begin(head(), b"body", now_s)
    it.expect("tern", NAME, now_s, is_repeatable=True)
    assert arrived(it, REQUEST) == Begun((), False)
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
    assert it.next_deadline_s == REPLICA_TIMEOUT_S
    assert it.flush(REPLICA_TIMEOUT_S) == [Hand(first)]
    assert it.next_deadline_s is None
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    second = brings(it, 6)
    (extended, hand) = it.flush(1.0)
    assert hand == Hand(second)
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
    outcome = []
    for _ in range(20):
        outcome += it.flush(0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    joined = output(REQUEST, [*range(10 + MAX_WAITING, 31)], True)
    assert outcome == [*map(Hand, payloads[:MAX_WAITING]), Hand(joined)]


def test_what_cannot_be_joined_stays_as_it_is_and_in_order() -> None:
    it = pacing(buddy=None)
    begun(it)
    payloads = [brings(it, 9) for _ in range(20)]
    outcome = []
    for _ in range(30):
        outcome += it.flush(0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    assert outcome == [*map(Hand, payloads)]


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
    assert [each for each in effects if isinstance(each, ReplicaDropped)] == [
        ReplicaDropped("tern", "its record takes too much memory")
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
    assert ReplicaDropped("tern", "its events cannot be repeated") in it.flush(0.0)
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
    assert arrived(it, again) == Begun((5,), False)
    it.on_asked(NAME, 1)
    fresh = output(again, [6])
    it.on_output(again, fresh, is_finished=False)
    assert it.flush(0.0) == [Hand(output(again, [5])), Replayed("tern")]
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    assert it.flush(0.0) == [CaughtUp("tern", 1), Hand(fresh)]


def handed(it: Pacing, now_s: float = 0.0) -> list[Hand]:
    return [each for each in it.flush(now_s) if isinstance(each, Hand)]


def told(it: Pacing, now_s: float = 0.0) -> list[type]:
    """The kinds of messages that go to the buddy."""
    return [type(each.message) for each in it.flush(now_s) if isinstance(each, ToBuddy)]


def takes(it: Pacing, name: str = NAME) -> None:
    """vLLM's code has got an output, made events of it, and wants the next."""
    it.on_taken(name, 1)
    it.on_asked(name, 1)


SECOND_NAME, SECOND = "cmpl-tern-1", RequestId("cmpl-tern-1-0123abcd")


def begun_twice(it: Pacing) -> None:
    """A stream of two prompts; vLLM's code waits for an output of each."""
    begun(it)
    it.expect("tern", SECOND_NAME, 0.0, is_repeatable=True)
    arrived(it, SECOND)
    it.on_asked(SECOND_NAME, 1)


def test_what_is_not_known_has_no_effect() -> None:
    it = pacing()
    it.over("unknown", 0.0)
    it.drop("unknown", 0.0)
    it.on_asked("unknown", 1)
    it.on_left("unknown", 1)
    it.on_abort([REQUEST])
    assert it.on_begun(REQUEST) is None
    assert not it.on_output(REQUEST, b"", is_finished=True)
    assert it.flush(0.0) == []


def test_an_engine_request_that_has_come_does_not_come_again() -> None:
    it = pacing(buddy=None)
    begun(it)
    assert arrived(it, RequestId("cmpl-tern-0-ffffffff")) is None
    payload = brings(it, 5)
    assert handed(it) == [Hand(payload)]


@pytest.mark.parametrize("choice", ["", "0_"])
def test_an_engine_request_of_another_client_does_not_join_a_stream_by_its_name(
    choice: str,
) -> None:
    """Bodies have a `request_id`, from which vLLM derives the name."""
    it = pacing(buddy=None)
    it.begin(head(), b"body", 0.0)
    it.expect("tern", NAME, 0.0, is_repeatable=True)
    others = RequestId(f"{choice}{NAME}-ffffffff")
    assert it.on_begun(others) is None
    assert not it.on_output(others, output(others, [7]), is_finished=False)
    assert arrived(it, REQUEST) == Begun((), False)
    it.on_asked(NAME, 1)
    payload = brings(it, 5)
    assert handed(it) == [Hand(payload)]


def test_outputs_wait_until_they_are_asked_for() -> None:
    it = pacing(buddy=None)
    it.begin(head(), b"body", 0.0)
    it.expect("tern", NAME, 0.0, is_repeatable=True)
    arrived(it, REQUEST)
    payload = brings(it, 5)
    assert handed(it) == []
    it.on_asked(NAME, 2)
    assert handed(it) == [], "that is of an earlier request of the name"
    it.on_asked(NAME, 1)
    assert handed(it) == [Hand(payload)]


def test_of_all_engine_requests_of_a_stream_one_output_at_a_time_is_in_vllms_hands() -> None:
    it = pacing(buddy=None)
    begun_twice(it)
    first = brings(it, 5)
    second = output(SECOND, [6])
    it.on_output(SECOND, second, is_finished=False)
    assert handed(it) == [Hand(first)]
    it.on_asked(SECOND_NAME, 1)
    assert handed(it) == [], "it is still at work on the first"
    takes(it)
    assert handed(it) == [Hand(second)]


@pytest.mark.parametrize("is_left", [True, False], ids=["left", "aborted"])
def test_of_an_engine_request_that_vllm_has_left_nothing_is_handed_on(is_left: bool) -> None:
    it = pacing(buddy=None)
    begun_twice(it)
    brings(it, 5)
    assert len(handed(it)) == 1
    brings(it, 6)
    second = output(SECOND, [7])
    it.on_output(SECOND, second, is_finished=False)
    if is_left:
        it.on_left(NAME, 1)
    else:
        # What it was handed came behind its end, and vanished.
        it.on_abort([REQUEST])
    assert handed(it) == [Hand(second)]
    assert not it.on_output(REQUEST, b"", is_finished=False)


def test_what_waits_is_not_handed_on_when_the_answer_is_over_and_its_names_are_free() -> None:
    it = pacing(buddy=None, max_bytes=1 << 20)
    begun(it)
    for token in range(MAX_WAITING + 3):
        brings(it, token)
    assert len(handed(it)) == 1
    it.over("tern", 0.0)
    assert handed(it) == []
    assert not it.on_output(REQUEST, b"", is_finished=False)
    assert it.expect("tern", "cmpl-tern-2", 0.0, is_repeatable=True) is None
    it.begin(head("gull"), b"body", 0.0)
    assert it.expect("gull", NAME, 0.0, is_repeatable=True) == 2
    it.over("tern", 0.0)
    arrived(it, REQUEST, "gull")
    it.on_asked(NAME, 2)
    payload = brings(it, 9)
    assert handed(it) == [Hand(payload)]


def test_a_stream_that_is_dropped_before_its_end_is_forgotten() -> None:
    it = pacing()
    begun(it)
    brings(it, 5)
    it.drop("tern", 0.0)
    assert told(it) == [KeepStream, ExtendStreams, DropStream]
    assert not it.on_output(REQUEST, b"", is_finished=False)
    it.on_buddy(THIRD, 0.0)
    assert told(it) == []
    it.begin(head(), b"another body", 0.0)
    assert told(it) == [KeepStream]
    assert it.num_bytes == len(b"another body")


def test_a_record_that_is_too_large_at_once_is_given_up_at_once() -> None:
    it = pacing(max_bytes=4)
    it.begin(head(), b"body", 0.0)
    assert told(it) == [KeepStream], "just as much as there is room for"
    it.begin(head("gull"), b"x", 0.0)
    assert ReplicaDropped("gull", "its record takes too much memory") in it.flush(0.0)
    assert it.num_bytes == 4


def test_a_stream_that_has_no_replica_is_not_spoken_of_again() -> None:
    it = pacing()
    it.begin(head(), b"body", 0.0)
    for _ in range(2):
        it.expect("tern", NAME, 0.0, is_repeatable=False)
    assert it.num_bytes == 0
    effects = it.flush(0.0)
    assert effects.count(ReplicaDropped("tern", "its events cannot be repeated")) == 1
    kinds = [type(each.message) for each in effects if isinstance(each, ToBuddy)]
    assert kinds == [KeepStream, DropStream]
    it.over("tern", 0.0)
    it.on_buddy(THIRD, 0.0)
    it.drop("tern", 0.0)
    assert it.flush(0.0) == []


def test_what_waits_for_the_buddy_goes_out_when_there_is_no_replica_any_more() -> None:
    it = pacing()
    begun(it)
    payload = brings(it, 5)
    assert handed(it) == []
    it.expect("tern", SECOND_NAME, 0.0, is_repeatable=False)
    # What vLLM's code asks next is the occasion.
    it.on_asked(NAME, 1)
    assert handed(it) == [Hand(payload)]


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_name_that_was_used_before_makes_a_stream_that_cannot_be_repeated(
    is_elsewhere: bool,
) -> None:
    it = pacing()
    begun(it)
    stream_id = "tern"
    if is_elsewhere:
        stream_id = "gull"
        it.begin(head(stream_id), b"body", 0.0)
    else:
        it.on_left(NAME, 1)
    assert it.expect(stream_id, NAME, 0.0, is_repeatable=True) is None
    parted = [each for each in it.flush(0.0) if isinstance(each, ReplicaDropped)]
    assert parted == [ReplicaDropped(stream_id, "its events cannot be repeated")]


def test_the_same_buddy_is_not_told_everything_again() -> None:
    it = pacing()
    begun(it)
    it.flush(0.0)
    it.on_buddy(BUDDY, 1.0)
    assert it.flush(1.0) == []


def taken_over(it: Pacing, *payloads: bytes, is_finished: bool = False) -> None:
    """The outputs that the former front end had recorded of the stream's first prompt."""
    slot = slot_of(REQUEST)
    record = Record(head(), b"body")
    for number, payload in enumerate(payloads, 1):
        record.extend(Group("tern", slot, is_finished and number == len(payloads)), payload)
    it.take_over(record, 0.0)


def test_what_was_taken_over_does_not_wait_for_the_buddy() -> None:
    """Clients may know it."""
    it = pacing()
    payloads = [output(REQUEST, [token], token == 6) for token in (5, 6)]
    taken_over(it, *payloads, is_finished=True)
    it.expect("tern", NAME, 0.0, is_repeatable=True)
    assert arrived(it, REQUEST) == Begun((5, 6), True)
    it.on_asked(NAME, 1)
    kept, *effects = it.flush(0.0)
    assert isinstance(kept, ToBuddy)
    assert kept.frames == [b"body", *payloads]
    assert effects == [Hand(payloads[0])]
    takes(it)
    assert it.flush(0.0) == [Hand(payloads[1]), Replayed("tern")]


def test_a_stream_that_had_no_outputs_runs_again_at_once() -> None:
    it = pacing(buddy=None)
    taken_over(it)
    assert it.flush(0.0) == [Replayed("tern")]
    assert it.flush(0.0) == []


def test_a_stream_that_is_taken_over_and_has_no_replica_still_comes_to_its_events() -> None:
    it = pacing(max_bytes=10)
    payload = output(REQUEST, [5])
    taken_over(it, payload)
    it.expect("tern", NAME, 0.0, is_repeatable=True)
    assert arrived(it, REQUEST) == Begun((5,), False)
    it.on_asked(NAME, 1)
    assert handed(it) == [Hand(payload)]
    assert it.num_bytes == 0
