"""`Server-Timing` headers: where the time until the first token went, and on which instance.

    Server-Timing: scheduler;dur=380.2, queue;dur=3.1, prefill;dur=50.4, instance;desc="i1"

The header is W3C's; its times are milliseconds. `sterna explain` has the same and more.

Only the first token shows them all, and a stream's headers would be sent before. So they wait for
the first piece of the answer, but no longer than `HOLD_S`: a header that comes too early has what
is known by then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sterna.frontend.http.request_context import collect_engine_requests
from sterna.frontend.requests.histories import Timing

HOLD_S = 1.0
"""The most time for which the headers of an answer wait for its first piece."""

TimingOf = Callable[[Sequence[str], float], Timing | None]
"""Returns the timing of an HTTP request, by the names of its engine requests and the loop's time at
which it came."""

logger = logging.getLogger(__name__)


class ServerTiming:
    """Adds the header to answers of requests that have reached an engine."""

    def __init__(self, app: ASGIApp, timing_of: TimingOf) -> None:
        self._app = app
        self._timing_of = timing_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came_s = asyncio.get_running_loop().time()
        answer = _Answer(send, self._timing_of, collect_engine_requests(), came_s)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.close()


class _Nothing(Awaitable[None]):
    """Nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_NOTHING = _Nothing()


class _Answer:
    """An answer whose headers wait."""

    def __init__(self, send: Send, timing_of: TimingOf, names: list[str], came_s: float) -> None:
        self._send = send
        self._timing_of = timing_of
        self._names = names
        self._came_s = came_s
        self._start: Message | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Sends the headers before the answer's first piece has come.
        self._early: asyncio.Task[None] | None = None
        # Whether the headers and a piece have been sent.
        self._is_begun = False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the answer, the headers at the latest before its first piece.

        Only the first piece is sent by a coroutine of its own.
        """
        if self._is_begun:
            return self._send(message)
        if message["type"] == "http.response.start":
            self._start = message
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._send_early)
            return _NOTHING
        return self._send_first(message)

    async def _send_first(self, message: Message) -> None:
        if self._early is not None:
            early, self._early = self._early, None
            await early
        elif self._start is not None:
            await self._send_start()
        self._is_begun = True
        await self._send(message)

    def close(self) -> None:
        """The application has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._early is not None:
            self._early.cancel()

    def _send_early(self) -> None:
        self._early = asyncio.create_task(self._send_start())

    async def _send_start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        start, self._start = self._start, None
        assert start is not None
        try:
            timing = self._timing_of(self._names, self._came_s)
        except Exception:
            # An answer is worth more than its header.
            logger.exception("no Server-Timing")
            timing = None
        if timing is not None and (header := header_of(timing)):
            start["headers"] = [*start["headers"], (b"server-timing", header.encode("latin-1"))]
        await self._send(start)


def header_of(timing: Timing) -> str:
    """The header's value; empty if nothing is known."""
    seconds = {
        "scheduler": timing.scheduler_s,
        "queue": timing.queue_s,
        "prefill": timing.prefill_s,
    }
    parts = [f"{name};dur={1e3 * each:.1f}" for name, each in seconds.items() if each is not None]
    if timing.instance_id is not None:
        parts.append(f'instance;desc="{timing.instance_id}"')
    return ", ".join(parts)
