"""Clients that are slow or too large: connections that they hold, and memory that they take."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from bench.parts.watching import Scene

NUM_CONNECTIONS = 700
"""More than the front ends of these trials have descriptors."""

CONNECT_TIMEOUT_S = 2.0

LARGE_BYTES = 200 << 20
PIECE = b"x" * (256 << 10)

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HALF_BODY = b"%sContent-Length: 1000\r\n\r\n{" % HALF_HEAD


async def hold_half_heads(scene: Scene) -> None:
    """Clients that never finish their headers."""
    await _hold(scene, HALF_HEAD)


async def hold_half_bodies(scene: Scene) -> None:
    """Clients that never finish the body of their request."""
    await _hold(scene, HALF_BODY)


async def send_no_handshake(scene: Scene) -> None:
    """Clients that never begin TLS."""
    await _hold(scene, b"")


async def send_large_head(scene: Scene) -> None:
    """One client whose headers have 200 MiB."""
    await _send_large(scene, b"%sX-Large: " % HALF_HEAD)


async def send_large_body(scene: Scene) -> None:
    """One client whose body has 200 MiB."""
    head = b"%sContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % HALF_HEAD
    await _send_large(scene, head, is_chunked=True)


async def _hold(scene: Scene, beginning: bytes) -> None:
    """Connect, send this, and hold the connections; none of them is made again."""
    held: list[socket.socket] = []
    try:
        await asyncio.gather(
            *(_connect(scene, beginning, held) for _ in range(NUM_CONNECTIONS)),
            return_exceptions=True,
        )
        await asyncio.get_running_loop().create_future()
    finally:
        for each in held:
            each.close()


async def _connect(scene: Scene, beginning: bytes, held: list[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    client = socket.socket()
    held.append(client)
    client.setblocking(False)
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        await loop.sock_connect(client, _address(scene))
        await loop.sock_sendall(client, beginning)


async def _send_large(scene: Scene, head: bytes, *, is_chunked: bool = False) -> None:
    """Send this much behind a head, as far as the server takes it."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*_address(scene))
        try:
            writer.write(head)
            piece = b"%x\r\n%s\r\n" % (len(PIECE), PIECE) if is_chunked else PIECE
            for _ in range(LARGE_BYTES // len(PIECE)):
                writer.write(piece)
                await writer.drain()
            if is_chunked:
                writer.write(b"0\r\n\r\n")
            await reader.read()
        finally:
            writer.transport.abort()


def _address(scene: Scene) -> tuple[str, int]:
    split = urlsplit(scene.target.url)
    assert split.hostname is not None
    assert split.port is not None
    return split.hostname, split.port


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of this machine for the time of a trial; returns it and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", *kind, *subject, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


def trusting(certificate: Path) -> ssl.SSLContext:
    """TLS for clients of a server with this certificate."""
    return ssl.create_default_context(cafile=str(certificate))
