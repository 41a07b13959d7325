"""The head of a request is bounded in size, and so is what may follow its body (trailers).

uvicorn bounds both where h11 reads them. httptools, which it prefers, keeps any number of bytes,
and nobody has shown a key by then.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers; h11's own limit as well."""

MAX_HEADERS = 256
"""Of one request. Short ones take far more memory than they have bytes."""

REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


def bounded_head(protocol: type[Any]) -> type[Any]:
    """Return uvicorn's protocol for HTTP with a limit to heads, if it has none of its own."""
    if not hasattr(protocol, "on_header"):
        return protocol
    return type("BoundedHeadProtocol", (_BoundedHead, protocol), {})


class _HeadTooLargeError(Exception):
    """Ends httptools' reading."""


class _BoundedHead:
    """Comes before uvicorn's protocol on httptools; the attributes without a value here are that
    one's."""

    transport: Any
    client: tuple[str, int] | None
    cycle: Any

    # All that came since the last byte of a body, or the end of something: what httptools keeps.
    _num_kept_bytes = 0
    # What is read of this head, or these trailers.
    _num_head_bytes = 0
    _num_headers = 0
    _is_too_large = False

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._num_kept_bytes += len(data)
        super().data_received(data)  # type: ignore[misc]
        if self._num_kept_bytes > MAX_HEAD_BYTES and not self._is_too_large:
            self._refuse()

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
        self._begin_anew()
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._num_kept_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """See httptools."""
        self._begin_anew()
        super().on_message_complete()  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        """See uvicorn; whatever ended the reading."""
        if self._is_too_large:
            self._refuse()
        else:
            super().send_400_response(msg)  # type: ignore[misc]

    def _begin_anew(self) -> None:
        self._num_kept_bytes = self._num_head_bytes = self._num_headers = 0

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._is_too_large = True
            raise _HeadTooLargeError

    def _refuse(self) -> None:
        self._is_too_large = True
        host = self.client[0] if self.client else "?"
        reason = f"its head has more than {MAX_HEAD_BYTES >> 10} KiB or {MAX_HEADERS} headers"
        logger.warning("connection cut client=%s reason=%s", host, reason)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(REFUSAL)
            self.transport.close()
        else:
            # Another answer is under way, and nothing may be said in its midst.
            self.transport.abort()
