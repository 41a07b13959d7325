"""A stream is exactly the sequence that a lone engine would have produced, ended once."""

import itertools
import uuid

from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.requests.request_effects import Deliver
from sterna.frontend.requests.token_streams import TokenStreams
from sterna.messages.actors import RequestsMoved, TokenSpan
from sterna.types import InstanceId, RequestId

R1 = RequestId("r1")
A, B = InstanceId("a"), InstanceId("b")


def streams(*request_ids: RequestId) -> TokenStreams:
    result = TokenStreams(gap_timeout_s=5.0)
    for request_id in request_ids or (R1,):
        result.open(request_id)
    return result


def span(first: int, num: int, is_finished: bool = False, request_id: RequestId = R1) -> TokenSpan:
    return TokenSpan(request_id, first, num, is_finished)


def take(under_test: TokenStreams, *spans: TokenSpan, now_s: float = 0.0) -> list[Deliver]:
    """Hand over spans, each of an instance of its own, to which its request has moved; their
    payloads name their tokens."""
    deliveries = []
    for each in spans:
        payload = bytes(range(each.first_index, each.first_index + each.num_tokens))
        instance_id = InstanceId(str(uuid.uuid4()))
        moved = RequestsMoved(instance_id, (each.request_id,), (each.first_index,), 1)
        under_test.on_moved(moved)
        deliveries += under_test.on_batch(instance_id, [each], [payload], now_s).deliveries
    return deliveries


def test_spans_in_order_are_delivered_at_once_with_their_payload_untouched():
    delivered = take(streams(), span(0, 1), span(1, 2))
    assert delivered == [Deliver(R1, b"\0", 0, False), Deliver(R1, b"\1\2", 0, False)]


def test_a_span_behind_a_gap_waits_until_the_gap_is_filled():
    under_test = streams()
    assert take(under_test, span(2, 1)) == []
    assert take(under_test, span(0, 2)) == [
        Deliver(R1, b"\0\1", 0, False),
        Deliver(R1, b"\2", 0, False),
    ]


def test_an_instance_that_was_never_announced_begins_where_the_request_does():
    """Its announcement was refused, and with it its first tokens, perhaps: if it dies, the request
    goes on elsewhere with others in their place."""
    under_test = streams()
    assert len(under_test.on_batch(A, [span(0, 1)], [b"\0"], 0.0).deliveries) == 1
    assert under_test.on_batch(B, [span(2, 1)], [b"\7"], 1.0).deliveries == []
    # If it lives, what is missing is missed.
    assert under_test.next_deadline_s() is not None
    (delivered,) = under_test.on_batch(A, [span(1, 1)], [b"\1"], 2.0).deliveries
    assert delivered.payload == b"\1"


def test_a_repeated_span_is_dropped():
    assert len(take(streams(), span(0, 2), span(0, 2), span(1, 1))) == 1


def test_of_a_partly_repeated_span_the_repeated_tokens_are_named_for_cutting():
    delivered = take(streams(), span(0, 2), span(1, 3))
    assert delivered[1] == Deliver(R1, b"\1\2\3", 1, False)


def test_an_end_without_tokens_follows_its_index():
    under_test = streams()
    assert take(under_test, span(2, 0, is_finished=True)) == []
    assert [d.is_finished for d in take(under_test, span(0, 2))] == [False, True]


def test_an_end_ahead_of_lost_tokens_does_not_end_the_stream():
    under_test = streams()
    take(under_test, span(0, 1), span(2, 0, is_finished=True))
    assert under_test.num_delivered(R1) == 1


def test_nothing_is_delivered_after_the_end():
    under_test = streams()
    take(under_test, span(0, 1, is_finished=True))
    assert take(under_test, span(1, 1), span(1, 0, is_finished=True)) == []


def test_an_end_that_comes_with_repeated_tokens_only_still_ends_the_stream():
    under_test = streams()
    delivered = take(under_test, span(0, 3), span(1, 2, is_finished=True))
    assert delivered[1] == Deliver(R1, b"\1\2", 2, True)
    assert under_test.num_delivered(R1) is None


def test_an_end_behind_the_stream_is_not_delivered_but_reported():
    under_test = streams()
    take(under_test, span(0, 3))
    under_test.on_moved(RequestsMoved(A, (R1,), (2,), 1))
    outcome = under_test.on_batch(A, [span(2, 0, is_finished=True)], [b""], 0.0)
    assert (outcome.deliveries, outcome.ended_behind) == ([], [R1])


def test_an_output_without_tokens_is_delivered_at_its_place():
    assert take(streams(), span(0, 0), span(0, 1)) == [
        Deliver(R1, b"", 0, False),
        Deliver(R1, b"\0", 0, False),
    ]


def test_streams_do_not_mix():
    other = RequestId("r2")
    under_test = streams(R1, other)
    delivered = take(under_test, span(1, 1), span(0, 1, request_id=other), span(0, 1))
    assert [d.request_id for d in delivered] == [other, R1, R1]


def test_a_request_without_a_stream_that_is_still_stepped_is_reported_as_stray():
    gone = RequestId("gone")
    spans = [span(4, 1, request_id=gone), span(0, 1, True, RequestId("ended"))]
    assert streams().on_batch(A, spans, [b"", b""], 0.0).strays == [gone]


def test_only_tokens_later_than_all_before_advance_a_stream():
    under_test = streams()
    assert under_test.on_batch(A, [span(0, 3)], [b""], 0.0).advanced == [span(0, 3)]
    assert under_test.on_batch(A, [span(1, 2)], [b""], 0.0).advanced == []
    assert under_test.on_batch(B, [span(5, 1)], [b""], 0.0).advanced == [span(5, 1)]
    assert under_test.on_batch(A, [span(3, 2)], [b""], 0.0).advanced == []


def test_a_gap_that_stays_open_expires_and_a_filled_one_does_not():
    other = RequestId("r2")
    under_test = streams(R1, other)
    take(under_test, span(1, 1), now_s=10.0)
    take(under_test, span(1, 1, request_id=other), now_s=11.0)
    assert under_test.next_deadline_s() == 15.0
    take(under_test, span(0, 1), now_s=12.0)
    assert under_test.next_deadline_s() == 16.0
    assert under_test.expired(15.9) == []
    assert under_test.expired(16.0) == [other]


def test_a_gap_behind_progress_gets_its_full_time():
    under_test = streams()
    take(under_test, span(1, 1), span(3, 1), now_s=10.0)
    take(under_test, span(0, 1), now_s=14.0)
    assert under_test.expired(18.9) == []
    assert under_test.expired(19.0) == [R1]


def test_a_repeat_does_not_prolong_a_gap():
    under_test = streams()
    take(under_test, span(0, 1), span(2, 1), now_s=10.0)
    take(under_test, span(0, 1), now_s=14.0)
    assert under_test.expired(15.0) == [R1]


def test_a_closed_stream_has_no_deadline():
    under_test = streams()
    take(under_test, span(1, 1))
    under_test.close(R1)
    assert under_test.next_deadline_s() is None


def lone(under_test: TokenStreams, instance_id: InstanceId, token: int, at: int) -> list[bytes]:
    """The instance sends one token."""
    deliveries = under_test.on_batch(instance_id, [span(at, 1)], [bytes([token])], 0.0).deliveries
    return [each.payload for each in deliveries]


def test_what_follows_tokens_that_an_instance_could_not_send_goes_to_no_client():
    """The instance dies, and the request goes on where it was before, with other tokens."""
    under_test = streams()
    assert lone(under_test, A, 10, 0) == [b"\x0a"]
    under_test.on_moved(RequestsMoved(B, (R1,), (1,), 1))
    # Token 1 of the destination is lost.
    assert lone(under_test, B, 22, 2) == []
    assert lone(under_test, B, 23, 3) == []
    assert under_test.next_deadline_s() == 5.0
    assert lone(under_test, A, 11, 1) == [b"\x0b"]
    assert lone(under_test, B, 24, 4) == []
    for at in (2, 3, 4, 5):
        assert lone(under_test, A, 10 + at, at) == [bytes([10 + at])]
    assert under_test.next_deadline_s() is None


def test_a_request_that_comes_back_to_an_instance_goes_on_there_behind_the_tokens_of_others():
    under_test = streams()
    lone(under_test, A, 0, 0)
    under_test.on_moved(RequestsMoved(B, (R1,), (1,), 1))
    lone(under_test, B, 1, 1)
    lone(under_test, B, 2, 2)
    under_test.on_moved(RequestsMoved(A, (R1,), (3,), 1))
    assert lone(under_test, A, 3, 3) == [b"\3"]


@st.composite
def chunks(draw: st.DrawFn, first: int, end: int, is_finished: bool) -> list[TokenSpan]:
    """Cut tokens `first` to `end` into spans, with or without an end of its own."""
    cuts = sorted(draw(st.sets(st.integers(first, end), max_size=6)) | {first, end})
    result = [span(a, b - a) for a, b in itertools.pairwise(cuts)]
    if is_finished and result and draw(st.booleans()):
        result[-1] = span(result[-1].first_index, result[-1].num_tokens, is_finished=True)
    elif is_finished:
        result.append(span(end, 0, is_finished=True))
    return result


@st.composite
def two_instances(draw: st.DrawFn) -> tuple[int, list[list[TokenSpan]]]:
    """A source steps the first tokens, a destination repeats some of them and goes on to the
    end; their spans arrive in any order, some twice, in batches of any size."""
    length = draw(st.integers(1, 30))
    handover = draw(st.integers(0, length))
    repeated_from = draw(st.integers(0, handover))
    spans = draw(chunks(0, handover, is_finished=False))
    spans += draw(chunks(repeated_from, length, is_finished=True))
    spans += draw(st.lists(st.sampled_from(spans), max_size=8))
    shuffled = draw(st.permutations(spans))
    batches: list[list[TokenSpan]] = [[]]
    for each in shuffled:
        if draw(st.booleans()):
            batches.append([])
        batches[-1].append(each)
    return length, batches


@given(two_instances())
def test_any_interleaving_gives_exactly_the_sequence_ended_once(case):
    length, batches = case
    under_test = streams()
    delivered = [each for batch in batches for each in take(under_test, *batch)]
    tokens = b"".join(d.payload[d.num_repeated :] for d in delivered)
    assert tokens == bytes(range(length))
    assert [d.is_finished for d in delivered] == [False] * (len(delivered) - 1) + [True]
    assert all(d.num_repeated <= len(d.payload) for d in delivered)
    assert under_test.next_deadline_s() is None


@given(two_instances(), st.data())
def test_any_loss_gives_a_prefix_of_the_sequence_and_an_open_gap_or_a_silent_stream(case, data):
    length, batches = case
    lost = data.draw(st.sampled_from([each for batch in batches for each in batch]))
    under_test = streams()
    delivered = [
        each for batch in batches for each in take(under_test, *(s for s in batch if s is not lost))
    ]
    tokens = b"".join(d.payload[d.num_repeated :] for d in delivered)
    assert tokens == bytes(range(len(tokens)))
    ended = [d.is_finished for d in delivered]
    assert ended.count(True) <= 1
    if True in ended:
        assert len(tokens) == length
