"""Streams that are read on at another front end than the one that began them."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from sterna.frontend.resumable.answers import StreamBrokenError
from sterna.messages.streams import (
    AnswerPart,
    AnswerStart,
    FindStream,
    KeepStream,
    PartsTaken,
    ReadStream,
    StopReading,
    StreamFound,
    StreamMessage,
)
from sterna.types import FrontendId
from tests.frontend.resumable.front_ends import (
    CREATED_S,
    Client,
    Cluster,
    begun,
    expected,
    played,
    until_over,
)


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.middleware._wall_s", lambda: CREATED_S)


def test_a_request_that_is_refused_is_no_matter_of_another_front_end() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster[0].is_full = True
        refused = Client(cluster[0])
        await refused.task
        assert refused.status == 429
        cluster[0].is_full = False
        await begun(cluster, 2)
        kept = [each for each in cluster.messages if isinstance(each, KeepStream)]
        assert [each.head.stream_id for each in kept] == ["tern"]

    played(scenario)


def test_a_stream_is_read_on_at_another_front_end_while_its_own_lives() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        for number in (1, 2, 0):
            client = Client(cluster[number], len(first.events))
            await until_over(cluster, client)
            assert client.status == 200
            assert first.events + client.events == expected(8)
        assert sum(each.num_begun for each in cluster.members.values()) == 1

    played(scenario)


def test_a_stream_that_nobody_has_is_unknown_at_once() -> None:
    async def scenario() -> None:
        client = Client(Cluster()[1], 3)
        await client.task
        assert client.status == 404
        alone = Client(Cluster(1)[0], 3)
        await alone.task
        assert alone.status == 404

    played(scenario)


def test_nobody_else_reads_the_stream_at_any_front_end() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await begun(cluster, 3)
        for number in range(3):
            thief = Client(cluster[number], 1, key="thief")
            await thief.task
            assert thief.status == 404
        cluster.kill(0)
        cluster.announce()
        for number in (1, 2):
            thief = Client(cluster[number], 1, key="thief")
            await thief.task
            assert thief.status == 404

    played(scenario)


@pytest.mark.parametrize("last", ["9", "one", "", "9" * 5000], ids=lambda last: last[:5])
def test_a_bad_number_is_refused_as_by_the_front_end_itself(last: str) -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await begun(cluster, 3)
        client = Client(cluster[2], last)
        await client.task
        assert client.status == 400
        assert "Last-Event-ID must be 0 or the id of an event, up to " in client.content.decode()

    played(scenario)


def test_a_client_that_leaves_another_front_end_leaves_the_stream() -> None:
    """So that a stream to which nobody comes back is given up."""

    async def scenario() -> None:
        cluster = Cluster(window_s=0.05)
        first = Client(cluster[0], num=1000)
        while len(first.events) < 1:
            cluster.bring()
            await asyncio.sleep(0)
        client = Client(cluster[2], 1)
        while len(client.events) < 1:
            cluster.bring()
            await asyncio.sleep(0)
        # Not before: on a slow machine the window could be over when the other one begins.
        await first.leave()
        await client.leave()
        await cluster[0].freed.wait()
        late = Client(cluster[2], 1)
        await late.task
        assert late.status == 404

    played(scenario)


@pytest.mark.parametrize("order", ["asks, leaves", "asks, is dead", "is dead, asks"])
def test_a_reader_that_leaves_in_the_same_moment_leaves_the_stream(order: str) -> None:
    """No task has had a turn between the two: messages are handled in bursts."""

    async def scenario() -> None:
        cluster = Cluster(window_s=0.05)
        await begun(cluster, 1, num=1000)
        (kept,) = [each for each in cluster.messages if isinstance(each, KeepStream)]
        reader, exchange = FrontendId(2), cluster[0].exchange
        for event in order.split(", "):
            match event:
                case "asks":
                    read = ReadStream(reader, 7, "tern", kept.head.owner, "1")
                    exchange.on_message(read, [])
                case "leaves":
                    exchange.on_message(StopReading(reader, 7), [])
                case "is dead":
                    exchange.on_frontends([FrontendId(0), FrontendId(1)])
        await cluster[0].freed.wait()

    played(scenario)


def test_a_new_front_end_waits_until_all_others_look_for_streams_there_too() -> None:
    async def scenario() -> None:
        cluster = Cluster(2)
        new = cluster.join()
        cluster.announce(0, 2)
        introduction = asyncio.create_task(new.exchange.introduce())
        await cluster.heard(FindStream, sender=2)
        cluster.messages.clear()
        # The first one has answered, and the second one does not know whom it should.
        await cluster.heard(FindStream, sender=2)
        assert not introduction.done()
        cluster.announce(1)
        await introduction
        first = Client(new)
        await new.begun.wait()
        second = Client(cluster[1], 0)
        await until_over(cluster, first, second)
        assert second.status == 200
        assert first.events == second.events == expected(8)

    played(scenario)


def test_a_new_front_end_does_not_wait_for_one_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.relays.FIND_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        cluster = Cluster(2)
        new = cluster.join()
        cluster.announce()
        cluster.is_cut = lambda message: message.sender == 1
        await new.exchange.introduce()

    played(scenario)


def test_the_introduction_ends_where_the_others_die() -> None:
    async def scenario() -> None:
        cluster = Cluster(2)
        new = cluster.join()
        cluster.kill(0)
        cluster.kill(1)
        introduction = asyncio.create_task(new.exchange.introduce())
        cluster.announce(2)
        await introduction

    played(scenario)


def test_a_long_answer_passes_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.relays.WINDOW_BYTES", 100)

    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3, num=50)
        client = Client(cluster[1], 3)
        await until_over(cluster, client)
        assert first.events + client.events == expected(50)

    played(scenario)


def test_a_stream_that_breaks_off_ends_as_a_whole_one_at_no_front_end() -> None:
    """Its clients would take what they have for the answer."""

    async def scenario() -> None:
        cluster = Cluster(2)
        first = await begun(cluster, 3)
        elsewhere = Client(cluster[1], 3)
        await cluster.heard(AnswerStart, sender=0)
        cluster[0].breaks_off = True
        cluster.bring()
        for client in (elsewhere, Client(cluster[0], 2), Client(cluster[1], 2)):
            with pytest.raises(StreamBrokenError):
                await client.task
            assert client.status == 200
        read = first.events + elsewhere.events
        assert read == expected(8)[: len(read)]
        assert 3 < len(read) < len(expected(8))

    played(scenario)


def test_many_events_are_more_than_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.answers.EVENTS_AT_ONCE", 4)

    async def scenario() -> None:
        cluster = Cluster()
        whole = Client(cluster[0])
        await until_over(cluster, whole)
        again = Client(cluster[1], 0)
        await again.task
        assert again.events == whole.events == expected(8)
        parts = [each for each in cluster.messages if isinstance(each, AnswerPart)]
        assert len(parts) == 4, "4, 4 and 1 event, and the end"

    played(scenario)


def refusing(kind: type[StreamMessage], first: int = 1) -> Callable[[StreamMessage], bool]:
    """The mailbox refuses three times to send messages of this kind, from the first one on; for
    answers' parts, 0 is the last one."""
    attempts = itertools.count(1)

    def is_full(message: StreamMessage) -> bool:
        if not isinstance(message, kind) or (first == 0 and not message.is_last):
            return False
        return next(attempts) in range(max(first, 1), max(first, 1) + 3)

    return is_full


def _is_last(message: StreamMessage) -> bool:
    return isinstance(message, AnswerPart) and message.is_last


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (FindStream, 1),
        (StreamFound, 1),
        (ReadStream, 1),
        (AnswerStart, 1),
        (AnswerPart, 1),
        (AnswerPart, 2),
        (AnswerPart, 0),
        (PartsTaken, 2),
    ],
)
def test_what_a_mailbox_refuses_is_said_later_and_nothing_before_it(
    kind: type[StreamMessage], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.relays.RETRY_S", 0.001)
    monkeypatch.setattr("sterna.frontend.resumable.relays.WINDOW_BYTES", 100)

    async def scenario() -> None:
        cluster = Cluster(2)
        first_client = await begun(cluster, 3, num=12)
        cluster.is_full = refusing(kind, first)
        client = Client(cluster[1], 3, num=12)
        for number in range(1, 11):
            # Each event is a part of its own, and the last part has none.
            cluster.bring()
            await client.until(number)
        await client.task
        assert client.status == 200
        assert first_client.events + client.events == expected(12)

    played(scenario)


def test_a_reader_that_leaves_is_forgotten_when_its_mailbox_refuses_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.relays.RETRY_S", 0.001)

    async def scenario() -> None:
        cluster = Cluster(window_s=0.05)
        await begun(cluster, 1, num=1000)
        client = Client(cluster[2], 1)
        await cluster.heard(AnswerStart, sender=0)
        cluster.is_full = refusing(StopReading)
        await client.leave()
        await cluster[0].freed.wait()

    played(scenario)


def test_an_answer_that_is_no_stream_cannot_take_the_name_of_one() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 1)
        plain = Client(cluster[0], is_stream=False)
        await plain.task
        assert plain.status == 409
        client = Client(cluster[0], len(first.events))
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

    played(scenario)
