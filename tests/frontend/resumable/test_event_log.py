"""Event logs: the events that are kept, their ids, for which time and which owner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.resumable.event_log import EventId, EventLog, EventLogs, event_id_of, last_id
from sterna.types import FrontendId

ME, SOMEBODY = b"me", b"somebody"


def logs(window_s: float = 60.0, max_bytes: int = 10_000) -> EventLogs:
    return EventLogs(window_s, max_bytes)


@given(st.lists(st.text("ab c", min_size=1).filter(str.strip), max_size=8), st.data())
def test_events_are_numbered_however_they_are_cut(texts: list[str], data: st.DataObject) -> None:
    content = b"".join(b"data: %s\n\n" % each.encode() for each in texts)
    log = EventLog(ME)
    while content:
        size = data.draw(st.integers(1, len(content)))
        log.feed(content[:size])
        content = content[size:]
    assert log.events == [
        b"id: %d\ndata: %s\n\n" % (number, each.encode()) for number, each in enumerate(texts, 1)
    ]
    assert log.num_bytes == sum(map(len, log.events))


def test_an_id_is_of_one_stream() -> None:
    kept = logs()
    assert kept.open("r", ME) is not None
    assert kept.open("r", ME) is None
    kept.forget("r")
    assert kept.open("r", SOMEBODY) is not None


def test_a_stream_is_found_by_its_id() -> None:
    kept = logs()
    log = kept.open("r", ME)
    assert kept.find("r") is log
    assert kept.find("other") is None


def test_a_stream_is_kept_for_the_window_after_the_last_follower() -> None:
    kept = logs(window_s=60.0)
    log = kept.open("r", ME)
    assert log is not None
    kept.on_follower(log)
    kept.on_follower(log)
    kept.on_left(log, 10.0)
    assert kept.next_deadline_s() is None
    kept.on_left(log, 20.0)
    assert kept.next_deadline_s() == 80.0
    assert kept.expired(79.0) == []
    kept.on_follower(log)
    assert kept.expired(100.0) == []
    kept.on_left(log, 100.0)
    assert kept.expired(160.0) == ["r"]
    assert kept.find("r") is None


def test_the_window_of_a_stream_that_ends_alone_begins_at_its_end() -> None:
    kept = logs(window_s=60.0)
    log = kept.open("r", ME)
    assert log is not None
    kept.on_follower(log)
    kept.on_left(log, 10.0)
    kept.on_finished("r", 30.0)
    assert kept.expired(80.0) == []
    assert kept.expired(90.0) == ["r"]


def test_memory_is_bounded_by_giving_up_what_nobody_follows() -> None:
    """Finished streams first, of these the one that was left first."""
    kept = logs(max_bytes=1_000)
    for number, name in enumerate(("growing", "early", "late")):
        log = kept.open(name, ME)
        assert log is not None
        kept.on_follower(log)
        kept.feed(name, b"data: %s\n\n" % (b"x" * 300))
        kept.on_left(log, float(number))
    kept.on_finished("early", 1.0)
    kept.on_finished("late", 2.0)
    followed = kept.open("followed", ME)
    assert followed is not None
    kept.on_follower(followed)
    assert kept.feed("followed", b"data: %s\n\n" % (b"x" * 300)) == ["early"]
    assert kept.feed("followed", b"data: %s\n\n" % (b"x" * 500)) == ["late", "growing"]
    assert kept.num_bytes == followed.num_bytes
    # What somebody reads is kept, whatever it takes: its client's connection bounds it.
    assert kept.feed("followed", b"data: %s\n\n" % (b"x" * 5000)) == []


def test_a_stream_is_not_given_up_for_itself() -> None:
    """Nobody reads it, but somebody may come: it goes on, and others go for it."""
    kept = logs(max_bytes=1_000)
    for number, name in enumerate(("growing", "other")):
        log = kept.open(name, ME)
        assert log is not None
        kept.on_unread(log, float(number))
        kept.feed(name, b"data: %s\n\n" % (b"x" * 300))
    assert kept.feed("growing", b"data: %s\n\n" % (b"x" * 800)) == ["other"]
    assert kept.feed("growing", b"data: %s\n\n" % (b"x" * 800)) == []
    growing = kept.find("growing")
    assert growing is not None
    assert kept.num_bytes == growing.num_bytes > 1_000


def test_what_somebody_follows_is_not_given_up_for_another_stream() -> None:
    kept = logs(max_bytes=1_000)
    for name in ("one", "other"):
        log = kept.open(name, ME)
        assert log is not None
        kept.on_follower(log)
        assert kept.feed(name, b"data: %s\n\n" % (b"x" * 800)) == []
    assert kept.find("one") is not None


def test_as_much_as_may_be_kept_is_kept() -> None:
    event = b"data: %s\n\n" % (b"x" * 300)
    kept = logs(max_bytes=2 * len(b"id: 1\n" + event))
    for name in ("one", "other"):
        log = kept.open(name, ME)
        assert log is not None
        kept.on_unread(log, 0.0)
        assert kept.feed(name, event) == []


def test_what_is_not_kept_takes_nothing() -> None:
    kept = logs()
    assert kept.feed("unknown", b"data: 1\n\n") == []
    kept.on_finished("unknown", 0.0)
    kept.forget("unknown")
    assert kept.num_bytes == 0
    assert kept.next_deadline_s() is None


def test_the_end_of_a_stream_that_somebody_follows_begins_no_window() -> None:
    kept = logs(window_s=60.0)
    log = kept.open("r", ME)
    assert log is not None
    kept.on_follower(log)
    kept.on_finished("r", 10.0)
    assert kept.next_deadline_s() is None
    kept.on_left(log, 30.0)
    assert kept.next_deadline_s() == 90.0


def test_what_only_keeps_the_connection_alive_has_no_number() -> None:
    log = EventLog(ME)
    log.feed(b": keep-alive\n\ndata: 1\n\n: keep-alive\n\ndata: 2\n\n")
    assert log.events == [b"id: 1\ndata: 1\n\n", b"id: 2\ndata: 2\n\n"]
    assert log.num_comments == 2


def test_a_stream_that_nobody_has_read_yet_is_kept_for_the_window() -> None:
    kept = logs(window_s=60.0)
    log = kept.open("r", ME)
    assert log is not None
    assert kept.next_deadline_s() is None
    kept.on_unread(log, 10.0)
    assert kept.next_deadline_s() == 70.0
    kept.on_follower(log)
    kept.on_unread(log, 20.0)
    assert kept.next_deadline_s() is None


def test_the_last_id_is_that_of_the_last_event() -> None:
    assert last_id(b"id: 7\ndata: a\n\nid: 8\ndata: id: 9\n\n: keep-alive\n\n") == "8"
    assert last_id(b"id: 7-2\ndata: a\n\n") == "7-2"
    assert last_id(b": keep-alive\n\n") is None
    assert last_id(b"") is None


def test_the_ids_of_a_stream_that_was_taken_over_say_so() -> None:
    log = EventLog(ME, FrontendId(2))
    log.feed(b"data: 1\n\ndata: 2\n\n")
    assert log.events == [b"id: 1-2\ndata: 1\n\n", b"id: 2-2\ndata: 2\n\n"]


@given(st.integers(0, 10**18 - 1), st.none() | st.integers(0, 10**9 - 1).map(FrontendId))
def test_an_id_is_read_as_it_was_written(number: int, sender: FrontendId | None) -> None:
    event_id = EventId(number, sender)
    assert event_id_of(str(event_id)) == event_id


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "1-2-3", "one", "1.5", " 1", "9" * 5000])
def test_what_is_no_id_is_not_read(text: str) -> None:
    assert event_id_of(text) is None
