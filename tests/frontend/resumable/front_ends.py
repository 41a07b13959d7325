"""Front ends that are real but for vLLM's server and the engines.

An application says one event for each output that it takes, as fast as the test brings them.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sterna.frontend.http.door import EndOfChecks, StreamMarks
from sterna.frontend.http.request_context import is_taken_over, notify_let_in
from sterna.frontend.resumable.exchange import StreamExchange
from sterna.frontend.resumable.middleware import ResumableStreams
from sterna.frontend.resumable.paced_outputs import paced
from sterna.messages.streams import StreamMessage
from sterna.types import FrontendId, RequestId
from tests.frontend.http.opened import opened
from tests.frontend.resumable.connection import PATH, Connection

HANG_S = 60.0


class FrontEnd:
    """One front end.

    Attributes:
        open: of each engine request, how many outputs were brought, of how many.
        begun: a request has begun.
        freed: one has ended.
    """

    def __init__(
        self,
        cluster: "Cluster",
        frontend_id: FrontendId,
        window_s: float = 60.0,
        *,
        around: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self._cluster = cluster
        self.frontend_id = frontend_id
        self.exchange = StreamExchange(frontend_id, 1 << 20, self._send, self._on_handed)
        inner = Starlette(routes=[Route(PATH, self._answer, methods=["POST"])])
        app = inner if around is None else around(StreamMarks(inner))
        self.streams = ResumableStreams(EndOfChecks(app), window_s, 1 << 20, self.exchange)
        self.app = opened(self.streams)
        self.clients: list[Client] = []
        self.open: dict[RequestId, tuple[int, int]] = {}
        self.begun, self.freed = asyncio.Event(), asyncio.Event()
        self.is_full = self.breaks_off = False
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
            _, ((request_id, tokens, *_),) = msgspec.msgpack.decode(payload)
            self._outputs[request_id].put_nowait(tokens)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.num_begun += 1
        self.num_taken_over += is_taken_over()
        if self.is_full:
            return Response(status_code=429)
        if not is_taken_over():
            notify_let_in()
        name = f"cmpl-{request.headers['X-Request-Id']}-0"
        outputs = paced(self.exchange, name, self._generate(name, body["num"]), is_repeatable=True)
        return StreamingResponse(self._events(name, outputs), media_type="text/event-stream")

    async def _events(self, name: str, outputs: AsyncIterator[list[int]]) -> AsyncIterator[str]:
        # Another time in each front end.
        head = f'{{"id":"{name}","object":"text_completion","created":{1000 + self.frontend_id}'
        async for tokens in outputs:
            yield f'data: {head},"tokens":{json.dumps(tokens)}}}\n\n'
            if self.breaks_off:
                raise RuntimeError("as some of vLLM's streams do where an engine fails")
        yield "data: [DONE]\n\n"

    async def _generate(self, name: str, num: int) -> AsyncGenerator[list[int], None]:
        """As vLLM's: outputs that come faster than they are taken become one."""
        request_id = RequestId(f"{name}-{next(self._numbers):04x}{self.frontend_id:04x}")
        queue = self._outputs[request_id] = asyncio.Queue()
        self.exchange.on_sent(request_id)
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

    def __init__(
        self,
        num: int = 3,
        window_s: float = 60.0,
        *,
        around: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self.is_cut: Callable[[StreamMessage], bool] = lambda _: False
        self.is_full: Callable[[StreamMessage], bool] = lambda _: False
        self.live = [FrontendId(n) for n in range(num)]
        self.members = {each: FrontEnd(self, each, window_s, around=around) for each in self.live}
        self.messages: list[StreamMessage] = []
        self._known: dict[FrontendId, tuple[FrontendId, ...]] = {}
        self._news = asyncio.Event()
        self.announce()

    def __getitem__(self, number: int) -> FrontEnd:
        return self.members[FrontendId(number)]

    def announce(self, *to: int) -> None:
        """These hear who lives, or all do."""
        for each in [FrontendId(number) for number in to] or self.live:
            self._known[each] = tuple(self.live)
            self.members[each].exchange.on_frontends(self.live)

    def join(self) -> FrontEnd:
        """One comes to life, and nobody knows it."""
        new = FrontEnd(self, FrontendId(len(self.live)))
        self.live.append(new.frontend_id)
        self.members[new.frontend_id] = new
        return new

    def send(
        self, sender: FrontendId, to: FrontendId, message: StreamMessage, frames: list[bytes]
    ) -> bool:
        if self.is_full(message):
            return False
        if to not in self._known[sender]:
            return True

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


def last_of(events: Sequence[str]) -> str:
    """The id of the last of these events."""
    return events[-1].split("\n")[0].removeprefix("id: ")


def plain(events: Sequence[str]) -> list[str]:
    """The events without what their ids say about takeovers."""
    return [re.sub(r"^(id: \d+)-\d+", r"\1", each) for each in events]


CREATED_S = 1_700_000_000


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
