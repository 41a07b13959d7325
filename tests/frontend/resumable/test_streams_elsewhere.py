"""Streams that are read on at another front end than the one that began them, dead or alive.

The front ends are real but for vLLM's server and the engines: an application that says one event
for each output that it takes, as fast as the test brings them.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sterna.frontend.resumable.exchange import StreamExchange
from sterna.frontend.resumable.middleware import ResumableStreams
from sterna.frontend.resumable.paced import is_taken_over, paced, tell_let_in
from sterna.stream_messages import (
    ExtendStreams,
    Finding,
    FindStream,
    KeepStream,
    ReadStream,
    ReplicasKept,
    StopReading,
    StreamFound,
    StreamMessage,
)
from sterna.types import FrontendId, RequestId
from tests.frontend.resumable.connection import PATH, Connection

HANG_S = 60.0


class FrontEnd:
    """One front end.

    Attributes:
        open: of each engine request, how many outputs were brought, of how many.
        begun: a request has begun.
        freed: one has ended.
    """

    def __init__(self, cluster: "Cluster", frontend_id: FrontendId, window_s: float) -> None:
        self._cluster = cluster
        self.frontend_id = frontend_id
        self.exchange = StreamExchange(frontend_id, 1 << 20, self._send, self._on_handed)
        inner = Starlette(routes=[Route(PATH, self._answer, methods=["POST"])])
        self.app = ResumableStreams(inner, window_s, 1 << 20, self.exchange)
        self.clients: list[Client] = []
        self.open: dict[RequestId, tuple[int, int]] = {}
        self.begun, self.freed = asyncio.Event(), asyncio.Event()
        self.is_full = False
        self.num_begun = 0
        self.num_taken_over = 0
        self._outputs: dict[str, asyncio.Queue[list[int]]] = {}
        self._numbers = itertools.count()

    def _send(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes]
    ) -> bool:
        return self._cluster.send(self.frontend_id, frontend_id, message, list(frames))

    def _on_handed(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            _, ((request_id, tokens),) = msgspec.msgpack.decode(payload)
            self._outputs[request_id].put_nowait(tokens)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.num_begun += 1
        self.num_taken_over += is_taken_over()
        if self.is_full:
            return Response(status_code=429)
        if not is_taken_over():
            tell_let_in()
        name = f"cmpl-{request.headers['X-Request-Id']}-0"
        outputs = paced(self.exchange, name, self._generate(name, body["num"]), is_repeatable=True)
        return StreamingResponse(self._events(name, outputs), media_type="text/event-stream")

    async def _events(self, name: str, outputs: AsyncIterator[list[int]]) -> AsyncIterator[str]:
        # Another time in each front end.
        head = f'{{"id":"{name}","object":"text_completion","created":{1000 + self.frontend_id}'
        async for tokens in outputs:
            yield f'data: {head},"tokens":{json.dumps(tokens)}}}\n\n'
        yield "data: [DONE]\n\n"

    async def _generate(self, name: str, num: int) -> AsyncGenerator[list[int], None]:
        """As vLLM's: outputs that come faster than they are taken become one."""
        request_id = RequestId(f"{name}-{next(self._numbers):04x}{self.frontend_id:04x}")
        queue = self._outputs[request_id] = asyncio.Queue()
        begun = self.exchange.on_begun(request_id)
        assert begun is not None
        if not begun.has_ended:
            self.open[request_id] = (len(begun.output_token_ids), num)
        self.begun.set()
        said = 0
        try:
            while said < num:
                tokens = await queue.get()
                while not queue.empty():
                    tokens += queue.get_nowait()
                said += len(tokens)
                yield tokens
        finally:
            self.open.pop(request_id, None)
            self.freed.set()

    def bring(self) -> None:
        """A step of the engines: one more output of each request."""
        for request_id, (at, num) in list(self.open.items()):
            payload = msgspec.msgpack.encode([0, [[request_id, [at]]]])
            is_finished = at + 1 == num
            self.exchange.on_output(request_id, payload, is_finished=is_finished)
            if is_finished:
                del self.open[request_id]
            else:
                self.open[request_id] = (at + 1, num)
        self.exchange.flush()


class Cluster:
    """Front ends, and the way between each two of them, which is in order."""

    def __init__(self, num: int = 3, window_s: float = 60.0) -> None:
        self.is_cut: Callable[[StreamMessage], bool] = lambda _: False
        self.is_full: Callable[[StreamMessage], bool] = lambda _: False
        self.live = [FrontendId(n) for n in range(num)]
        self.members = {each: FrontEnd(self, each, window_s) for each in self.live}
        self.messages: list[StreamMessage] = []
        self._news = asyncio.Event()
        self.announce()

    def __getitem__(self, number: int) -> FrontEnd:
        return self.members[FrontendId(number)]

    def announce(self) -> None:
        """All hear who lives."""
        for each in self.live:
            self.members[each].exchange.on_frontends(self.live)

    def send(
        self, sender: FrontendId, to: FrontendId, message: StreamMessage, frames: list[bytes]
    ) -> bool:
        if self.is_full(message):
            return False

        def arrive() -> None:
            if sender in self.members and to in self.members and not self.is_cut(message):
                self.messages.append(message)
                self._news.set()
                self.members[to].exchange.on_message(message, frames)

        asyncio.get_running_loop().call_soon(arrive)
        return True

    async def heard(self, kind: type[StreamMessage], *, sender: int) -> None:
        """Wait until such a message of this front end has arrived."""
        while not any(isinstance(each, kind) and each.sender == sender for each in self.messages):
            self._news.clear()
            await self._news.wait()

    def kill(self, number: int) -> None:
        """It is dead, and nobody knows."""
        dead = self.members.pop(FrontendId(number))
        self.live.remove(dead.frontend_id)
        for client in dead.clients:
            client.task.cancel()

    def bring(self, num: int = 1) -> None:
        for _ in range(num):
            for each in self.members.values():
                each.bring()


class Client(Connection):
    """One connection to a front end."""

    def __init__(
        self,
        front_end: FrontEnd,
        last: int | str | None = None,
        *,
        num: int = 8,
        key: str = "mine",
        is_stream: bool = True,
    ) -> None:
        headers = [(b"x-request-id", b"tern"), (b"authorization", key.encode())]
        if last is not None:
            headers.append((b"last-event-id", str(last).encode()))
        front_end.clients.append(self)
        super().__init__(front_end.app, {"stream": is_stream, "num": num}, headers)


def expected(num: int) -> list[str]:
    """The events of an undisturbed stream."""
    said = [
        json.dumps(
            {
                "id": "cmpl-tern-0",
                "object": "text_completion",
                "created": CREATED_S,
                "tokens": [n],
            }
        )
        for n in range(num)
    ]
    compact = [each.replace(": ", ":").replace(", ", ",") for each in said]
    return [f"id: {n}\ndata: {each}" for n, each in enumerate([*compact, "[DONE]"], 1)]


CREATED_S = 1_700_000_000


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.middleware._wall_s", lambda: CREATED_S)


def played(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(HANG_S):
            await scenario()

    asyncio.run(within())


async def begun(cluster: Cluster, num_events: int, *, num: int = 8) -> Client:
    """A client at front end 0 that has so many events, and has lost its connection."""
    client = Client(cluster[0], num=num)
    while len(client.events) < num_events:
        cluster.bring()
        await asyncio.sleep(0)
    await client.leave()
    return client


async def until_over(cluster: Cluster, *clients: Client) -> None:
    while not all(each.task.done() for each in clients):
        cluster.bring()
        await asyncio.sleep(0)


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
        client = Client(cluster[at], len(first.events))
        await until_over(cluster, client)
        assert client.status == 200
        assert first.events + client.events == expected(8)
        again = Client(cluster[3 - at], 0)
        await again.task
        assert again.events == expected(8)
        assert [cluster[1].num_taken_over, cluster[2].num_begun] == [1, 0]

    played(scenario)


def test_who_reads_through_another_front_end_does_not_notice_the_death() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 2)
        client = Client(cluster[2], len(first.events))
        while len(client.events) < 2:
            cluster.bring()
            await asyncio.sleep(0)
        cluster.kill(0)
        cluster.announce()
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

    played(scenario)


@pytest.mark.parametrize("at", [1, 2])
def test_a_client_that_is_back_before_the_death_is_known_waits_for_it(at: int) -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        cluster.kill(0)
        client = Client(cluster[at], len(first.events))
        for _ in range(100):
            await asyncio.sleep(0)
        assert client.status == 0
        cluster.announce()
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

    played(scenario)


def test_a_stream_outlives_its_front_ends_one_after_the_other() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 2, num=200)
        events = first.events
        for dead, at in ((0, 2), (1, 2)):
            cluster.kill(dead)
            cluster.announce()
            client = Client(cluster[at], len(events))
            while len(client.events) < 2:
                cluster.bring()
                await asyncio.sleep(0)
            await client.leave()
            events += client.events
        client = Client(cluster[2], len(events))
        await until_over(cluster, client)
        assert events + client.events == expected(200)

    played(scenario)


def test_a_front_end_that_has_denied_a_stream_may_have_it_when_others_have_died() -> None:
    async def scenario() -> None:
        cluster = Cluster(4)
        first = await begun(cluster, 3)
        cluster.is_cut = lambda message: isinstance(message, StreamFound) and message.sender == 1
        cluster.kill(0)
        client = Client(cluster[3], len(first.events))
        await cluster.heard(StreamFound, sender=2)
        # The keeper of the replica, which is not heard, takes over, and gets a keeper in turn.
        cluster.announce()
        await cluster.heard(ReplicasKept, sender=2)
        cluster.kill(1)
        cluster.announce()
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

    played(scenario)


def test_what_a_dead_front_end_told_and_its_successor_does_not_know_is_not_made_up() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.is_cut = lambda message: isinstance(message, ExtendStreams | ReplicasKept)
        client = Client(cluster[0])
        while len(client.events) < 3:
            cluster.bring()
            # Until the front end has lost its patience.
            await asyncio.sleep(0.01)
        cluster.is_cut = lambda _: False
        cluster.kill(0)
        cluster.announce()
        back = Client(cluster[1], 3)
        await until_over(cluster, back)
        assert back.status == 404
        assert "lost; send the request anew" in back.content.decode()
        fresh = Client(cluster[2], 0)
        await until_over(cluster, fresh)
        assert fresh.events == expected(8)
        # What this one told may be read on.
        more = Client(cluster[2], 5)
        await more.task
        assert more.events == expected(8)[5:]

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
        client = Client(cluster[2], len(first.events))
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

    played(scenario)


def test_while_a_front_end_may_have_the_stream_a_client_is_told_to_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.relays.FIND_S", 0.05)

    async def scenario() -> None:
        cluster = Cluster()
        first = await begun(cluster, 3)
        cluster.kill(0)
        for number in (1, 2):
            client = Client(cluster[number], 3)
            await client.task
            assert client.status == 503
        # Who looks now finds it, however long that takes here.
        monkeypatch.setattr("sterna.frontend.resumable.relays.FIND_S", HANG_S)
        cluster.announce()
        client = Client(cluster[2], 3)
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

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
        assert "Last-Event-ID must be a number up to" in client.content.decode()

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
        assert first.events + client.events == expected(8)

    played(scenario)


def test_a_client_that_waits_until_its_stream_is_there_again_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that run again take turns, which may take longer than streams are kept."""
    monkeypatch.setattr("sterna.frontend.resumable.middleware.NUM_RUN_AGAIN", 0)

    async def scenario() -> None:
        cluster = Cluster(window_s=0.05)
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
            await asyncio.sleep(0.01)
        assert client.status == 0
        cluster[1].app._turns.release()
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

    played(scenario)


def test_a_client_that_goes_while_it_waits_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sterna.frontend.resumable.middleware.NUM_RUN_AGAIN", 0)

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
        cluster.members[newcomer] = FrontEnd(cluster, newcomer, 60.0)
        cluster.live.append(newcomer)
        cluster.announce()
        for _ in range(3):
            await asyncio.sleep(0)
        cluster.kill(0)
        cluster.announce()
        client = Client(cluster[7], len(first.events))
        await until_over(cluster, client)
        assert first.events + client.events == expected(8)

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
