"""Limits for connections: their number, the size of a request's head, and the time of clients.

uvicorn waits without end for the rest of a request's head, and for a client to read its answer. A
slow reader costs little memory: 64 KiB here and the kernel's buffers. After that only the task of
its own answer waits, and vLLM merges the further outputs, at most to the whole answer. But without
a time-out the client could hold all this for any time.

The size of the head is limited, and so is that of trailers after the body. uvicorn limits both if
h11 reads them. httptools, which uvicorn prefers, keeps any number of bytes, before the client has
shown a key; and any number of requests that come before the answer to the first one has ended
(pipelined), of which each answer would let in thousands more.

docs/internals/parts.md compares a server without this.
"""

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)

ROOM_AGAIN = 0.9
"""Fraction of the limit: with fewer connections, the log says that there is room again."""


HIGH_WATER_BYTES = 64 << 10
"""An answer pauses when this much of it is unread here: asyncio's default without TLS."""

READ_BYTES = 48 << 10
"""A client must read this much within each time-out. It is the distance of the marks at which an
answer pauses and goes on; an answer in one piece, which never pauses, must shrink by as much."""

MAX_HEAD_BYTES = 64 << 10
"""Limit for a request's line and headers, equal to h11's own."""

MAX_HEADERS = 256
"""Limit for one request. Short headers take far more memory than they have bytes."""

MAX_PIPELINED = 16
"""Limit for requests that wait for the answer before theirs; clients of today send none."""

REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class ConnectionLimit:
    """Limit for the number of connections: the process's descriptors less those that it needs."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._num_refused = 0

    def has_room(self, num_connections: int) -> bool:
        """Whether this number of connections, with the newest, is within the limit. The log gets
        one line each time that the limit is reached."""
        if num_connections > self._max_connections:
            if self._num_refused == 0:
                logger.error(
                    "connections are refused, file descriptors are short connections=%d; allow "
                    "more with ulimit -n, or add front ends",
                    num_connections,
                )
            self._num_refused += 1
            return False
        if self._num_refused and num_connections < ROOM_AGAIN * self._max_connections:
            logger.warning("connections are taken again refused=%d", self._num_refused)
            self._num_refused = 0
        return True


def with_limits(
    protocol: type[Any],
    connection_limit: ConnectionLimit,
    head_timeout_s: float,
    reader_timeout_s: float,
) -> type[Any]:
    """Return uvicorn's HTTP protocol with these limits, and with a limit for heads.

    Args:
        head_timeout_s: for a request's line and headers.
        reader_timeout_s: for the client to read READ_BYTES of its pending answer.
    """
    attributes = {
        "connection_limit": connection_limit,
        "head_timeout_s": head_timeout_s,
        "reader_timeout_s": reader_timeout_s,
    }
    return type("LimitedProtocol", (_ConnectionLimits, bounded_head(protocol)), attributes)


def bounded_head(protocol: type[Any]) -> type[Any]:
    """Return uvicorn's HTTP protocol with limits for heads and for requests that wait, if it has
    none of its own."""
    if not hasattr(protocol, "on_header"):
        return protocol
    return type("BoundedHeadProtocol", (_BoundedHead, protocol), {})


class _ConnectionLimits(asyncio.Protocol):
    """Limits around uvicorn's protocol class, from which the attributes without a value come."""

    connection_limit: ConnectionLimit
    head_timeout_s: float
    reader_timeout_s: float
    # With TLS: the transport beneath, where most of the unread bytes wait.
    wire: Any = None
    transport: Any
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    cycle: Any
    connections: set[Any]

    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _num_unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if self.connection_limit.has_room(len(self.connections)):
            self._await_head()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        is_websocket = self.transport.get_protocol() is not self
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_websocket or is_answering:
            self._head_came()
        elif self._head_timer is None:
            self._await_head()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._reader_reads()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """See uvicorn. Another request follows, or the end; uvicorn has a time-out for both."""
        super().on_response_complete()  # type: ignore[misc]
        # A part of the answer may still be here, and a transport that closes waits for its reader.
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn, which also calls it for a connection that its client has reset."""
        is_gone = self.transport.is_closing()
        super().timeout_keep_alive_handler()  # type: ignore[misc]
        if not is_gone:
            self._await_reader()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._head_came()
        self._reader_reads()
        super().connection_lost(error)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(
            self.head_timeout_s, self._cut, "no whole request came"
        )

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_reader(self) -> None:
        if self._reader_timer is None:
            self._num_unread_bytes = self._unread_bytes()
            self._reader_timer = self.loop.call_later(self.reader_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        self._reader_timer = None
        if self._num_unread_bytes - self._unread_bytes() < READ_BYTES:
            self._cut("its client does not read the answer")
        else:
            self._await_reader()

    def _unread_bytes(self) -> int:
        num_bytes: int = self.transport.get_write_buffer_size()
        return num_bytes if self.wire is None else num_bytes + self.wire.get_write_buffer_size()

    def _reader_reads(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _cut(self, reason: str) -> None:
        host = self.client[0] if self.client else "?"
        logger.warning("connection cut client=%s reason=%s", host, reason)
        self.transport.abort()


class _RefusedError(Exception):
    """Makes httptools stop reading."""


class _BoundedHead:
    """Limits for heads, and for the requests that wait, around uvicorn's protocol on httptools,
    from which the attributes without a value come."""

    transport: Any
    client: tuple[str, int] | None
    cycle: Any
    pipeline: Any

    # The request that is being answered; `cycle` is the newest one.
    _answering: Any = None

    # Bytes since the last byte of a body, or the end of a head or message: httptools keeps them.
    _num_kept_bytes = 0
    # Bytes read of this head, or these trailers.
    _num_head_bytes = 0
    _num_headers = 0
    _is_refused = False
    _reason = f"its head has more than {MAX_HEAD_BYTES >> 10} KiB or {MAX_HEADERS} headers"

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._num_kept_bytes += len(data)
        super().data_received(data)  # type: ignore[misc]
        if self._num_kept_bytes > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse()

    def on_message_begin(self) -> None:
        """See httptools."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reason = f"more than {MAX_PIPELINED} of its requests wait for an answer"
            self._is_refused = True
            raise _RefusedError
        super().on_message_begin()  # type: ignore[misc]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """See uvicorn."""
        self._answering = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol. uvicorn tells the newest request alone that its client has gone,
        and not the one that is being answered."""
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(error)  # type: ignore[misc]

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._count(len(url))
        super().on_url(url)  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._num_headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._reset_counts()
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._num_kept_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """See httptools."""
        self._reset_counts()
        super().on_message_complete()  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        """See uvicorn. It is called for every error of the reader."""
        if self._is_refused:
            self._refuse()
        else:
            super().send_400_response(msg)  # type: ignore[misc]

    def _reset_counts(self) -> None:
        self._num_kept_bytes = self._num_head_bytes = self._num_headers = 0

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._is_refused = True
            raise _RefusedError

    def _refuse(self) -> None:
        self._is_refused = True
        host = self.client[0] if self.client else "?"
        logger.warning("connection cut client=%s reason=%s", host, self._reason)
        if not self.pipeline and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(REFUSAL)
            self.transport.close()
        else:
            # Another answer is under way, and nothing may be written in the middle of it.
            self.transport.abort()
