"""Streams that go on at another front end when their own has died."""

import asyncio
import json
from collections.abc import Callable

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.messages.streams import (
    ExtendStreams,
    Finding,
    FindStream,
    KeepStream,
    ReplicasKept,
    StreamFound,
    StreamOver,
)
from sterna.types import FrontendId
from tests.clocks import SkippingLoop, run_skipping, stands
from tests.frontend.resumable.connection import Connection
from tests.frontend.resumable.front_ends import (
    CREATED_S,
    HANG_S,
    Client,
    Cluster,
    FrontEnd,
    begun,
    expected,
    last_of,
    plain,
    played,
    until_over,
)


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.middleware._wall_s", lambda: CREATED_S)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("num_events", [1, 4, 8, 9])
def test_a_stream_is_read_on_at_any_front_end_when_its_own_has_died(
    at: int, num_events: int
) -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, num_events)
        cluster.kill(0)
        cluster.announce()
        client = Client(cluster[at], last_of(first.events))
        await until_over(cluster, client)
        assert client.status == 200
        assert plain(first.events + client.events) == expected(8)
        again = Client(cluster[3 - at], 0)
        await again.task
        assert plain(again.events) == expected(8)
        assert last_of(again.events) == "9-1"
        assert [cluster[1].num_taken_over, cluster[2].num_begun] == [1, 0]

    played(scenario)


def late(app: ASGIApp) -> ASGIApp:
    """As a function of the operator (`--middleware`): vLLM goes on before the event is out."""
    return BaseHTTPMiddleware(app, dispatch=lambda request, go_on: go_on(request))


def adding(app: ASGIApp) -> ASGIApp:
    """Says an event of its own first."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                body = b'data: {"tokens":[]}\n\n'
                await send({"type": "http.response.body", "body": body, "more_body": True})

        await app(scope, receive, send_more)

    return answer


def dropping(app: ASGIApp) -> ASGIApp:
    """Drops the first event."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_first = True

        async def send_less(message: Message) -> None:
            nonlocal is_first
            if is_first and b'"tokens":[0]' in message.get("body", b""):
                is_first = False
                message = {**message, "body": message["body"].partition(b"data:")[0]}
            await send(message)

        await app(scope, receive, send_less)

    return answer


@pytest.mark.parametrize("num_outputs", [1, 4, 7])
@pytest.mark.parametrize(("around", "num_more"), [(late, 0), (adding, 1), (dropping, -1)])
def test_a_stream_is_read_on_whatever_middlewares_do_with_its_events(
    around: Callable[[ASGIApp], ASGIApp], num_more: int, num_outputs: int
) -> None:
    """The client has the events of all that is recorded, and gets the rest."""

    async def scenario() -> None:
        cluster = Cluster(around=around)
        first = Client(cluster[0])
        await cluster[0].begun.wait()
        for num in range(1, num_outputs + 1):
            cluster.bring()
            await first.until(num + num_more)
            await cluster.heard(ExtendStreams, sender=0)
        await first.leave()
        cluster.kill(0)
        cluster.announce()
        client = Client(cluster[1], last_of(first.events) if first.events else 0)
        await until_over(cluster, client)
        assert client.status == 200
        *events, end = [each.split("data: ")[1] for each in first.events + client.events]
        # They may come together here.
        said = [token for each in events for token in json.loads(each)["tokens"]]
        assert (said, end) == ([*range(1 if num_more < 0 else 0, 8)], "[DONE]")

    played(scenario)


@pytest.mark.parametrize(("around", "num_more"), [(adding, 1), (dropping, -1)])
def test_what_is_not_recorded_is_lost_whatever_middlewares_do(
    around: Callable[[ASGIApp], ASGIApp], num_more: int
) -> None:
    async def scenario() -> None:
        cluster = Cluster(around=around)
        first = Client(cluster[0])
        await cluster[0].begun.wait()
        for num in range(1, 4):
            # The third one never arrives at the buddy, which is not waited for for ever.
            cluster.is_cut = lambda message, num=num: (  # type: ignore[misc]
                num == 3 and isinstance(message, ExtendStreams)
            )
            cluster.bring()
            await first.until(num + num_more)
        await first.leave()
        cluster.kill(0)
        cluster.is_cut = lambda _: False
        cluster.announce()
        client = Client(cluster[1], last_of(first.events))
        await until_over(cluster, client)
        assert client.status == 404

    played(scenario)


async def died(cluster: Cluster, number: int, *, num_outputs: int = 0) -> None:
    """The front end dies when another one has what it has taken over and brought since."""
    await cluster.heard(KeepStream, sender=number)
    while num_outputs:
        await cluster[number].begun.wait()
        cluster.bring()
        await cluster.heard(ExtendStreams, sender=number)
        num_outputs -= 1
    cluster.kill(number)
    cluster.announce()


def test_a_stream_with_which_front_ends_die_is_not_tried_for_ever() -> None:
    """Its request may be what ends them: every front end would die, one after the other, and all
    streams with them."""

    async def scenario() -> None:
        cluster = Cluster(5)
        await begun(cluster, 2)
        for number in range(3):
            await died(cluster, number)
        for at in (3, 4):
            client = Client(cluster[at], 1)
            await client.task
            assert client.status == 500
            assert "it is not tried again" in client.content.decode()
        assert [cluster[3].num_begun, cluster[4].num_begun] == [0, 0]

    played(scenario)


def test_a_stream_that_has_ended_is_read_whatever_front_ends_died() -> None:
    async def scenario() -> None:
        cluster = Cluster(5)
        await begun(cluster, 9)
        await cluster.heard(StreamOver, sender=0)
        for number in range(3):
            await died(cluster, number)
        client = Client(cluster[4], 0)
        await client.task
        assert plain(client.events) == expected(8)

    played(scenario)


def test_a_stream_whose_outputs_are_all_recorded_needs_no_engine_and_is_read() -> None:
    """Only the news that it is over was lost."""

    async def scenario() -> None:
        cluster = Cluster(5)
        cluster.is_cut = lambda message: isinstance(message, StreamOver)
        await begun(cluster, 9)
        for number in range(3):
            await died(cluster, number)
        client = Client(cluster[4], 0)
        await until_over(cluster, client)
        assert plain(client.events) == expected(8)

    played(scenario)


def test_a_stream_that_gets_further_is_tried_at_every_front_end() -> None:
    async def scenario() -> None:
        cluster = Cluster(5)
        await begun(cluster, 2)
        for number in range(4):
            await died(cluster, number, num_outputs=int(number == 2))
        client = Client(cluster[4], 0)
        await until_over(cluster, client)
        assert plain(client.events) == expected(8)

    played(scenario)


def test_who_reads_through_another_front_end_does_not_notice_the_death() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 2)
        client = Client(cluster[2], last_of(first.events))
        while len(client.events) < 2:
            cluster.bring()
            await asyncio.sleep(0)
        cluster.kill(0)
        cluster.announce()
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


@pytest.mark.parametrize("at", [1, 2])
def test_a_client_that_is_back_before_the_death_is_known_waits_for_it(at: int) -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        cluster.kill(0)
        client = Client(cluster[at], last_of(first.events))
        for _ in range(100):
            await asyncio.sleep(0)
        assert client.status == 0
        cluster.announce()
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


def test_a_stream_outlives_its_front_ends_one_after_the_other() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 2, num=200)
        events = first.events
        for dead, at in ((0, 2), (1, 2)):
            cluster.kill(dead)
            cluster.announce()
            client = Client(cluster[at], last_of(events))
            while len(client.events) < 2:
                cluster.bring()
                await asyncio.sleep(0)
            await client.leave()
            events += client.events
        client = Client(cluster[2], last_of(events))
        await until_over(cluster, client)
        assert plain(events + client.events) == expected(200)

    played(scenario)


def test_a_front_end_that_has_denied_a_stream_may_have_it_when_others_have_died() -> None:
    async def scenario() -> None:
        cluster = Cluster(4)
        first = await begun(cluster, 3)
        cluster.is_cut = lambda message: isinstance(message, StreamFound) and message.sender == 1
        cluster.kill(0)
        client = Client(cluster[3], last_of(first.events))
        await cluster.heard(StreamFound, sender=2)
        # The keeper of the replica, which is not heard, takes over, and gets a keeper in turn.
        cluster.announce()
        await cluster.heard(ReplicasKept, sender=2)
        cluster.kill(1)
        cluster.announce()
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


async def lost_beyond_its_record(cluster: Cluster) -> Client:
    """A client with three events of a front end that has died, and whose buddy had none of them."""
    cluster.is_cut = lambda message: isinstance(message, ExtendStreams | ReplicasKept)
    client = Client(cluster[0])
    while len(client.events) < 3:
        cluster.bring()
        # Until the front end waits for it no longer.
        await asyncio.sleep(0.01)
    cluster.is_cut = lambda _: False
    cluster.kill(0)
    cluster.announce()
    return client


def test_what_a_dead_front_end_told_and_its_successor_does_not_know_is_not_made_up() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await lost_beyond_its_record(cluster)
        back = Client(cluster[1], 3)
        await until_over(cluster, back)
        assert back.status == 404
        assert "lost; send the request as a new one" in back.content.decode()
        fresh = Client(cluster[2], 0)
        await until_over(cluster, fresh)
        assert plain(fresh.events) == expected(8)
        # What this one told may be read on.
        more = Client(cluster[2], last_of(fresh.events[:5]))
        await more.task
        assert plain(more.events) == expected(8)[5:]

    played(scenario)


def test_what_is_lost_stays_lost_when_the_successor_dies_too() -> None:
    """By the time the client is back, the next one has as many events, and more."""

    async def scenario() -> None:
        cluster = Cluster()
        client = await lost_beyond_its_record(cluster)
        fresh = Client(cluster[1], 0)
        while len(fresh.events) < 6:
            cluster.bring()
            await asyncio.sleep(0)
        cluster.kill(1)
        cluster.announce()
        back = Client(cluster[2], last_of(client.events))
        await until_over(cluster, back)
        assert back.status == 404
        assert "its events after number 0 are lost" in back.content.decode()
        other = Client(cluster[2], last_of(fresh.events))
        await until_over(cluster, other)
        assert other.status == 200
        assert plain(fresh.events + other.events) == expected(8)

    played(scenario)


def test_a_front_end_that_cannot_be_sent_to_is_not_waited_for_and_gets_all_anew() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.is_full = lambda message: isinstance(message, ExtendStreams)
        first = await begun(cluster, 3)
        cluster.is_full = lambda _: False
        cluster.announce()
        await asyncio.sleep(0)
        cluster.kill(0)
        cluster.announce()
        client = Client(cluster[2], last_of(first.events))
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


def test_while_a_front_end_may_have_the_stream_a_client_is_told_to_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.relays.FIND_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        cluster.kill(0)
        for number in (1, 2):
            client = Client(cluster[number], 3)
            await client.task
            assert client.status == 503
        # Who looks now finds it, however long that takes here.
        monkeypatch.setattr("sterna.frontend.resumable.relays.FIND_TIMEOUT_S", HANG_S)
        cluster.announce()
        client = Client(cluster[2], 3)
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


def test_a_holder_whose_death_is_known_is_not_asked() -> None:
    """Its last word may come later than that."""

    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        cluster.is_cut = lambda message: isinstance(message, StreamFound)
        client = Client(cluster[2], 3)
        for _ in range(10):
            await asyncio.sleep(0)
        asked = [each for each in cluster.messages if isinstance(each, FindStream)]
        cluster.kill(0)
        cluster[2].exchange.on_frontends([FrontendId(1), FrontendId(2)])
        late = StreamFound(FrontendId(0), asked[0].query_id, Finding.STREAM)
        cluster[2].exchange.on_message(late, [])
        for _ in range(10):
            await asyncio.sleep(0)
        cluster.is_cut = lambda _: False
        cluster[1].exchange.on_frontends(cluster.live)
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_holder_that_dies_right_after_it_was_found_is_not_waited_for(num_turns: int) -> None:
    """Its death may be known between the end of the search and the question to it."""

    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        client = Client(cluster[2], last_of(first.events))
        await cluster.heard(StreamFound, sender=0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        cluster.kill(0)
        cluster.announce()
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)


def test_a_client_that_waits_until_its_stream_is_there_again_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that run again take turns, which may take longer than streams are kept."""
    monkeypatch.setattr("sterna.frontend.resumable.middleware.MAX_REPLAYS", 0)

    async def scenario(loop: SkippingLoop) -> None:
        cluster = Cluster(window_s=60.0)
        first = await begun(cluster, 3)
        headers = [(b"x-request-id", b"gull"), (b"authorization", b"mine")]
        other = Connection(cluster[0].app, {"stream": True, "num": 8}, headers)
        while not other.events:
            cluster.bring()
            await asyncio.sleep(0)
        cluster.kill(0)
        other.task.cancel()
        cluster.announce()
        client = Client(cluster[1], 3)
        (kept,) = [
            each
            for each in cluster.messages
            if isinstance(each, KeepStream) and each.head.stream_id == "gull"
        ]
        while cluster[1].exchange.has("gull", kept.head.owner):
            cluster.bring()
            loop.skipped_s += 1.0
            await asyncio.sleep(0)
        assert client.status == 0
        cluster[1].streams._turns.release()
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    run_skipping(scenario, stands)


def test_a_client_that_goes_while_it_waits_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.middleware.MAX_REPLAYS", 0)

    async def scenario() -> None:
        cluster = Cluster()
        await begun(cluster, 3)
        cluster.kill(0)
        cluster.announce()
        client = Client(cluster[1], 3)
        await asyncio.sleep(0)
        await client.leave()
        assert client.status == 0

    played(scenario)


def test_streams_of_a_dead_front_end_are_given_up_as_others_are() -> None:
    async def scenario() -> None:
        cluster = Cluster(window_s=0.05)
        await begun(cluster, 2)
        cluster.kill(0)
        cluster.announce()
        await cluster[1].begun.wait()
        await cluster[1].freed.wait()
        late = Client(cluster[2], 1)
        await late.task
        assert late.status == 404

    played(scenario)


def test_a_new_front_end_gets_the_replicas_when_the_one_before_dies() -> None:
    async def scenario() -> None:
        cluster = Cluster(2)
        first = await begun(cluster, 3)
        cluster.kill(1)
        cluster.announce()
        newcomer = FrontendId(7)
        cluster.members[newcomer] = FrontEnd(cluster, newcomer)
        cluster.live.append(newcomer)
        cluster.announce()
        for _ in range(3):
            await asyncio.sleep(0)
        cluster.kill(0)
        cluster.announce()
        client = Client(cluster[7], last_of(first.events))
        await until_over(cluster, client)
        assert plain(first.events + client.events) == expected(8)

    played(scenario)
