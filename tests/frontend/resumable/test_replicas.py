"""Replicas: the front end that keeps those of another one, and the streams that it takes over."""

import pytest

from sterna.frontend.resumable.replicas import Replicas, buddy_of
from sterna.messages.streams import (
    DropStream,
    ExtendStreams,
    Group,
    KeepStream,
    ReplicasKept,
    StreamOver,
)
from sterna.types import FrontendId
from tests.frontend.resumable.outputs import BUDDY, HOLDER, head


@pytest.mark.parametrize(
    ("frontends", "current", "buddy"),
    [
        ((1, 2, 3), None, 2),
        ((3, 1), None, 3),
        ((2, 3, 1), None, 2),
        ((1, 2, 3), 3, 3),
        ((1, 2), 3, 2),
        ((1,), 2, None),
        ((2, 3), None, None),
    ],
)
def test_the_buddy_is_the_next_in_the_ring_for_as_long_as_it_lives(
    frontends: tuple[int, ...], current: int | None, buddy: int | None
) -> None:
    ring = [FrontendId(each) for each in frontends]
    now = None if current is None else FrontendId(current)
    assert buddy_of(HOLDER, ring, now) == buddy


def test_what_a_dead_front_end_had_sent_comes_too_late() -> None:
    replicas = Replicas(BUDDY)
    replicas.on_frontends([HOLDER, BUDDY])
    keep = KeepStream(HOLDER, 1, head(), (), False)
    assert replicas.on_message(keep, [b"body"]).number == 1
    assert replicas.holder("tern", b"owner") == HOLDER
    assert replicas.holder("tern", b"thief") is None
    (record,) = replicas.on_frontends([BUDDY])
    assert (record.head, record.body) == (head(), b"body")
    assert record.takeovers == ((BUDDY, 0),)
    replicas.on_message(keep, [b"body"])
    assert replicas.holder("tern", b"owner") is None


def test_a_replica_grows_with_its_stream_and_ends_with_it() -> None:
    replicas = Replicas(BUDDY)
    replicas.on_frontends([HOLDER, BUDDY])
    first, second, end = (Group("tern", "a", each) for each in (False, False, True))
    unknown = Group("gull", "a", False)
    keep = KeepStream(HOLDER, 1, head(), (first,), False)
    extend = ExtendStreams(HOLDER, 2, (second, unknown, end))
    assert replicas.on_message(keep, [b"body", b"1"]) == ReplicasKept(BUDDY, 1)
    assert replicas.on_message(extend, [b"2", b"x", b"3"]) == ReplicasKept(BUDDY, 2)
    for stream_id in ("gull", "tern"):
        replicas.on_message(StreamOver(HOLDER, 3, stream_id), [])
    assert replicas.holder("gull", b"owner") is None
    (record,) = replicas.on_frontends([BUDDY])
    assert (record.groups, record.payloads) == ([first, second, end], [b"1", b"2", b"3"])
    assert record.is_over


def test_outputs_without_payloads_are_refused() -> None:
    replicas = Replicas(BUDDY)
    with pytest.raises(ValueError, match="shorter"):
        replicas.on_message(ExtendStreams(HOLDER, 1, (Group("tern", "a", False),)), [])


def test_a_stream_that_is_dropped_is_not_taken_over() -> None:
    replicas = Replicas(BUDDY)
    replicas.on_frontends([HOLDER, BUDDY])
    replicas.on_message(KeepStream(HOLDER, 1, head(), (), False), [b"body"])
    replicas.on_message(StreamOver(HOLDER, 2, "tern"), [])
    replicas.on_message(DropStream(HOLDER, 3, "tern"), [])
    assert replicas.on_frontends([BUDDY]) == []
