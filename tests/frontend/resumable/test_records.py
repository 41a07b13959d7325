"""What is needed to come to the same events of a stream again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.engine import payload_parts
from sterna.frontend.resumable.replicas import GROUP_BYTES, Record, dated, record_of
from sterna.messages.streams import Group, StreamHead

HEAD = StreamHead("tern", b"owner", "/v1/completions", b"", (), 7)


def payload(request_id: str, *tokens: int) -> bytes:
    return msgspec.msgpack.encode([0, [[request_id, list(tokens)]]])


def group(slot: str, is_finished: bool = False) -> Group:
    return Group("tern", slot, is_finished)


def test_a_record_says_what_each_engine_request_has_said_and_whether_it_has_ended() -> None:
    record = Record(HEAD, b"body")
    record.extend(group("a"), payload("a-00000000", 1, 2))
    record.extend(group("b"), payload("b-00000000", 5))
    record.extend(group("a", is_finished=True), payload("a-00000000", 3))
    assert record.token_ids("a", payload_parts) == (1, 2, 3)
    assert record.token_ids("b", payload_parts) == (5,)
    assert record.token_ids("c", payload_parts) == ()
    assert [record.has_ended(slot) for slot in "abc"] == [True, False, False]


def test_a_records_size_is_that_of_the_body_and_all_outputs() -> None:
    record = Record(HEAD, b"body")
    assert record.extend(group("a"), b"123") == GROUP_BYTES + 3
    assert record.num_bytes == 4 + GROUP_BYTES + 3
    again = record_of(HEAD, record.groups, [b"body", b"123"], is_over=True)
    assert (again.num_bytes, again.is_over) == (record.num_bytes, True)


def test_a_record_whose_frames_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1 groups came with 2 payloads"):
        record_of(HEAD, [group("a")], [b"body", b"1", b"2"], is_over=False)


@pytest.mark.parametrize("request_id", ["cmpl-tern", r"chatcmpl-a\"b", "cmpl-{}"])
def test_all_events_of_an_answer_have_its_time(request_id: str) -> None:
    fields = '"service_tier":"default","id":%s,"object":"text_completion","created":%d,"choices":[]'
    event = f"data: {{{fields}}}\n\n"
    name = msgspec.json.encode(request_id).decode()
    written = (event % (name, 1700000001) + event % (name, 1700000002)).encode()
    assert dated(written, 7) == (event % (name, 7) * 2).encode()


@given(st.text())
def test_what_a_model_says_is_left_as_it_is(text: str) -> None:
    """Not even if it looks like the beginning of an event."""
    said = text + '\n\ndata: {"id":"a","object":"b","created":1700000001'
    event = {"id": "tern", "object": "text_completion", "created": 5, "text": said}
    written = b"data: " + msgspec.json.encode(event) + b"\n\n"
    expected = b"data: " + msgspec.json.encode({**event, "created": 7}) + b"\n\n"
    assert dated(written, 7) == expected
    assert dated(b"data: [DONE]\n\n", 7) == b"data: [DONE]\n\n"
