"""The messages go over the wire as they are."""

import msgspec
import pytest

from sterna.migration.messages import (
    Abort,
    Aborted,
    Commit,
    CommitQuery,
    Committed,
    ForwardedAbort,
    Message,
    Reason,
    Released,
    Reserve,
    Reserved,
    StageCopied,
)
from tests.migration.machines import M, N, R

MESSAGES: list[Message] = [
    Reserve(M, R, 0, 0, 8, False, None, b"request"),
    Reserve(M, R, 1, 8, 3, True, N),
    Reserved(M, N, 0, ("tcp://b:1", "tcp://b:2")),
    StageCopied(M, N, 0),
    Commit(M, N, R, 1, 9, b"\x00state"),
    CommitQuery(M, N),
    Committed(M, N),
    Aborted(M, None, Reason.BUSY),
    Abort(M, Reason.REQUEST_PREEMPTED),
    Released(M),
    ForwardedAbort(M, N, R),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(message: Message) -> None:
    wire = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(wire, type=Message) == message


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__args__)
