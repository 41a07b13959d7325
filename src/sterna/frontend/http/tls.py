"""TLS handshakes with a time-out, and within the limit for connections; certificates that are read
again when they change.

asyncio's own TLS gives a handshake a minute, and reports the connection only after it. Until then
the connection would have a descriptor without counting in the limit (`slow_clients`).
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from sterna.frontend.http.slow_clients import HIGH_WATER_BYTES, ConnectionLimit

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 24 * 3600.0
"""Time-out for the end of TLS. The rest of the answer is sent before it, and `slow_clients` limits
its reader: asyncio's half a minute would cut a client that reads steadily for longer."""

RELOAD_INTERVAL_S = 10.0
"""Time between two looks at the files of a certificate."""


class Certificates:
    """The TLS context of new connections, made of files that may change.

    Args:
        make_context: reads the files.

    Attributes:
        context: those as they were read last.

    Raises:
        OSError: the files do not fit together, or cannot be read.
    """

    def __init__(self, make_context: Callable[[], ssl.SSLContext]) -> None:
        self._make_context = make_context
        self.context = make_context()

    def read_again(self) -> None:
        """Have a new context. Into the one before, the new files could only be added: it would go
        on trusting an authority that was removed.

        Raises:
            OSError: as before; the context stays.
        """
        self.context = self._make_context()


def behind_tls(
    protocol: type[Any],
    certificates: Certificates,
    connection_limit: ConnectionLimit,
    timeout_s: float,
) -> type[Any]:
    """Return a protocol for connections that uvicorn accepts. After the TLS handshake it hands the
    connection to `protocol`.

    Args:
        protocol: one with the limits of `slow_clients`.
        timeout_s: for the handshake.
    """
    attributes = {
        "protocol": protocol,
        "certificates": certificates,
        "connection_limit": connection_limit,
        "timeout_s": timeout_s,
    }
    return type("HandshakeProtocol", (_Handshake,), attributes)


class _Handshake(asyncio.Protocol):
    """One connection until the end of its TLS handshake.

    The loop begins TLS one turn after `start_tls` was called, and uvloop reads meanwhile: the bytes
    that it has read are handed on to TLS. The result of the handshake also arrives one turn later:
    data that has come out of TLS by then is handed on to the next protocol.
    """

    protocol: type[Any]
    certificates: Certificates
    connection_limit: ConnectionLimit
    timeout_s: float

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = _loop or asyncio.get_running_loop()
        self._next = self.protocol(config, server_state, app_state, self._loop)
        # uvicorn's set of connections: its members count, and learn of the server's end.
        self._connections: set[Any] = server_state.connections
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._before_tls = bytearray()
        self._through_tls = bytearray()
        self._has_begun = False
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport
        self._connections.add(self)
        if self.connection_limit.has_room(len(self._connections)):
            self._transport.pause_reading()
            self._task = self._loop.create_task(self._shake_hands())
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._has_begun:
            self._through_tls += data
        else:
            self._before_tls += data
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._is_lost = True
        self._connections.discard(self)

    def shutdown(self) -> None:
        """See uvicorn: the server ends."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    async def _shake_hands(self) -> None:
        if self._transport.is_closing():
            return
        begun = self._loop.create_task(
            self._loop.start_tls(
                self._transport,
                self,
                self.certificates.context,
                server_side=True,
                ssl_handshake_timeout=self.timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        )
        # `start_tls` connects the transport to TLS and resumes reading by two callbacks in the turn
        # after its own. With call_soon twice, this runs after both, before the loop reads again.
        self._loop.call_soon(self._loop.call_soon, self._hand_to_tls)
        try:
            through_tls: Any = await begun
        except ConnectionAbortedError:
            peer = self._transport.get_extra_info("peername")
            host = peer[0] if peer else "?"
            logger.warning("connection cut client=%s reason=no TLS handshake came", host)
        except OSError as error:
            logger.debug("no TLS handshake error=%s", error)
        else:
            if not self._is_lost:
                self._hand_on(through_tls)
            return
        finally:
            self._connections.discard(self)
        self._transport.abort()

    def _hand_to_tls(self) -> None:
        self._has_begun = True
        rest = memoryview(self._before_tls)
        tls = self._transport.get_protocol()
        while rest and not self._transport.is_closing():
            room = tls.get_buffer(len(rest))
            num_bytes = min(len(room), len(rest))
            room[:num_bytes] = rest[:num_bytes]
            tls.buffer_updated(num_bytes)
            rest = rest[num_bytes:]

    def _hand_on(self, through_tls: Any) -> None:
        self._connections.discard(self)
        through_tls.set_protocol(self._next)
        through_tls.set_write_buffer_limits(HIGH_WATER_BYTES)
        self._next.wire = self._transport
        self._next.connection_made(through_tls)
        if self._through_tls and not through_tls.is_closing():
            self._next.data_received(bytes(self._through_tls))


async def reload_certificates(
    certificates: Certificates, paths: Iterable[str], interval_s: float = RELOAD_INTERVAL_S
) -> None:
    """Read the certificates again whenever their files change; runs until cancelled.

    vLLM's `SSLCertRefresher` has the kernel watch the files that it finds. Kubernetes puts each new
    version of a Secret beside the old one and swaps a symbolic link: after the first time nothing
    watches the new files.
    """
    paths = list(paths)
    read = refused = _versions(paths)
    while True:
        await asyncio.sleep(interval_s)
        found = _versions(paths)
        if found in (read, refused):
            continue
        try:
            certificates.read_again()
        except OSError as error:
            refused = found
            logger.error("certificate not read, the one before stays error=%s", error)
        else:
            read = refused = found
            logger.info("certificate read again file=%s", paths[0])


def _versions(paths: Iterable[str]) -> list[tuple[int, int, int] | None]:
    """What changes with the content of each file, behind symbolic links; None without a file."""
    return [_version(each) for each in paths]


def _version(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
