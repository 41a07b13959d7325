"""Clients that never agree upon TLS count, and are cut; the others are served through it."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("uvloop")

import uvloop
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sterna.frontend.http.tls import Certificates, reload_certificates
from tests.clocks import SkippingLoop, run_skipping
from tests.frontend.http.test_slow_clients import (
    LARGE,
    SHORT,
    SHORT_S,
    SKIPPED_S,
    dial,
    served,
    until_cut,
)

LARGE_BYTES = 400 << 16


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate of localhost's and its key."""
    return new_certificate(tmp_path_factory.mktemp("tls"))


def new_certificate(folder: Path) -> Path:
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    files = ("-keyout", "both.pem", "-out", "cert.pem")
    command = ["openssl", "req", "-x509", *kind, *names, *files]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    with (folder / "both.pem").open("a") as both:
        both.write((folder / "cert.pem").read_text())
    return folder / "both.pem"


@pytest.fixture
def certificates(certificate: Path) -> Certificates:
    return Certificates(lambda: server_context(certificate))


def server_context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@pytest.fixture
def trusting(certificate: Path) -> ssl.SSLContext:
    """A client's."""
    return ssl.create_default_context(cafile=certificate)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Ray's actors have uvloop where there is one."""

    def run_on_its_loop(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(test)

    return run_on_its_loop


both = pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])


async def dial_tls(
    port: int, trusting: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    # asyncio keeps twice as much at most for who does not read.
    return await asyncio.open_connection(
        sock=plain, ssl=trusting, server_hostname="localhost", limit=1 << 14
    )


@both
def test_through_tls_requests_are_answered(
    protocol: type[Any], certificates: Certificates, trusting: ssl.SSLContext, run: Run
) -> None:
    async def test() -> None:
        async with served(protocol, tls=certificates) as (_, port):
            reader, writer = await dial_tls(port, trusting)
            for _ in range(3):
                writer.write(SHORT)
                assert b"200 OK" in await reader.readuntil(b"short\r\n0\r\n\r\n")
            writer.close()

    run(test())


def said_at_once(port: int, trusting: ssl.SSLContext) -> bytes:
    """What is answered to a client that asks in one breath with the end of its handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", port)) as client:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.sendall(outgoing.read())
                incoming.write(client.recv(1 << 16))
        tls.write(SHORT)
        client.sendall(outgoing.read())
        answer = b""
        while b"short" not in answer:
            try:
                answer += tls.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(client.recv(1 << 16))
    return answer


@both
def test_a_request_that_comes_with_the_end_of_the_handshake_is_not_lost(
    protocol: type[Any], certificates: Certificates, trusting: ssl.SSLContext, run: Run
) -> None:
    async def test() -> None:
        async with served(protocol, tls=certificates) as (_, port):
            answer = await asyncio.to_thread(said_at_once, port, trusting)
            assert b"200 OK" in answer

    run(test())


@pytest.mark.parametrize(
    "beginning", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["nothing", "a part"]
)
def test_a_handshake_that_does_not_come_is_not_awaited_for_long(
    beginning: bytes,
    certificates: Certificates,
    trusting: ssl.SSLContext,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol, tls=certificates, handshake_s=SHORT_S) as (
            _,
            port,
        ):
            assert await until_cut(await dial(port, beginning)) == b""

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.tls"):
        run(test())
    assert "connection cut client=127.0.0.1 reason=no TLS handshake came" in caplog.text


def test_who_has_not_agreed_upon_tls_counts(
    certificates: Certificates,
    trusting: ssl.SSLContext,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol, tls=certificates, max_connections=3) as (
            _,
            port,
        ):
            silent = [await dial(port, b"") for _ in range(3)]
            for _ in range(4):
                assert await until_cut(await dial(port, b"")) == b""
            for client in silent:
                client.close()
            while "taken again" not in caplog.text:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    reader, writer = await dial_tls(port, trusting)
                    writer.write(SHORT)
                    await reader.readuntil(b"short")
                    writer.close()

    with caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        run(test())
    assert "file descriptors are short connections=4" in caplog.text


def test_who_speaks_no_tls_is_hung_up_on(certificates: Certificates, run: Run) -> None:
    async def test() -> None:
        async with served(HttpToolsProtocol, tls=certificates) as (_, port):
            assert b"HTTP" not in await until_cut(await dial(port, SHORT))

    run(test())


class Secret:
    """A folder as Kubernetes mounts a Secret: its files are links into one that is swapped.

    Attributes:
        certificate, key: paths of the links.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_versions = 0
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.certificate.symlink_to("..data/cert.pem")
        self.key.symlink_to("..data/both.pem")

    def update(self, *, is_whole: bool = True) -> str:
        """Put a new certificate there, and remove the old one; returns it.

        Args:
            is_whole: whether its key comes along; otherwise another one.
        """
        self._num_versions += 1
        new = self._folder / f"..{self._num_versions}"
        new.mkdir()
        new_certificate(new)
        text = (new / "cert.pem").read_text()
        if not is_whole:
            new_certificate(new)
            (new / "cert.pem").write_text(text)
        data, link = self._folder / "..data", self._folder / "..data_tmp"
        old = data.resolve() if data.is_symlink() else None
        link.symlink_to(new.name)
        link.rename(data)
        if old is not None:
            shutil.rmtree(old)
        return text


def test_a_certificate_is_read_again_each_time_that_kubernetes_swaps_it(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The old one stays while what is there does not fit together."""
    secret = Secret(tmp_path)
    secret.update()
    certificates = Certificates(lambda: server_context(secret.certificate, secret.key))
    logged = asyncio.Event()
    noted = caplog.filtering(lambda record: logged.set() or True)

    async def test() -> None:
        files = str(secret.certificate), str(secret.key)
        reloading = asyncio.create_task(reload_certificates(certificates, files, interval_s=0.001))
        await asyncio.sleep(0)
        async with served(HttpToolsProtocol, tls=certificates) as (_, port):
            shown = ""
            for is_whole in (True, True, False, True):
                new = secret.update(is_whole=is_whole)
                await logged.wait()
                logged.clear()
                before = shown
                shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
                assert shown == (new if is_whole else before)
        reloading.cancel()

    with noted, caplog.at_level(logging.INFO, "sterna.frontend.http.tls"):
        run(test())
    assert caplog.text.count("certificate read again") == 3
    assert caplog.text.count("certificate not read, the one before stays") == 1


def test_an_authority_that_was_removed_is_trusted_no_longer(
    certificate: Path, tmp_path: Path, run: Run
) -> None:
    """Clients need a certificate of one of the authorities; here each has its own."""
    authorities = tmp_path / "authorities.pem"
    clients = []
    for name in ("former", "new"):
        (tmp_path / name).mkdir()
        own = new_certificate(tmp_path / name)
        client = ssl.create_default_context(cafile=certificate)
        client.load_cert_chain(own)
        clients.append((client, own.with_name("cert.pem").read_text()))

    def demanding() -> ssl.SSLContext:
        context = server_context(certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authorities)
        return context

    async def is_answered(port: int, client: ssl.SSLContext) -> bool:
        try:
            reader, writer = await dial_tls(port, client)
            writer.write(SHORT)
            answer = await reader.readuntil(b"short\r\n0\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError):
            return False
        writer.close()
        return b"200 OK" in answer

    async def test() -> None:
        (former, its), (new, of_new) = clients
        authorities.write_text(its)
        certificates = Certificates(demanding)
        async with served(HttpToolsProtocol, tls=certificates) as (_, port):
            assert await is_answered(port, former)
            assert not await is_answered(port, new)
            authorities.write_text(of_new)
            certificates.read_again()
            assert not await is_answered(port, former)
            assert await is_answered(port, new)

    run(test())


@pytest.mark.slow
@both
@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_through_tls_as_well_nobody_is_cut_who_reads_steadily(
    protocol: type[Any],
    header: bytes,
    certificates: Certificates,
    trusting: ssl.SSLContext,
) -> None:
    """See `test_slow_clients`: time passes on the loop's clock alone."""

    async def test(loop: SkippingLoop) -> None:
        async with served(
            protocol,
            reader_s=1000.0,
            hang_s=SKIPPED_S,
            tls=certificates,
            handshake_s=SKIPPED_S,
        ) as (_, port):
            reader, writer = await dial_tls(port, trusting)
            writer.write(LARGE + header + b"\r\n")
            for _ in range(4):
                await reader.readexactly(1 << 20)
                loop.skipped_s += 750.0
            writer.close()

    run_skipping(test)


@pytest.mark.slow
@both
@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_nor_is_anybody_waited_for_who_does_not(
    protocol: type[Any],
    header: bytes,
    certificates: Certificates,
    trusting: ssl.SSLContext,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged = asyncio.Event()
    noted = caplog.filtering(lambda record: logged.set() or True)

    async def test() -> None:
        async with served(protocol, reader_s=SHORT_S, tls=certificates) as (_, port):
            reader, writer = await dial_tls(port, trusting)
            writer.write(LARGE + header + b"\r\n")
            await logged.wait()
            num_bytes = 0
            # TLS ends without a goodbye, which is an OSError, too.
            with contextlib.suppress(OSError):
                while piece := await reader.read(1 << 16):
                    num_bytes += len(piece)
            assert num_bytes < LARGE_BYTES
            writer.close()

    with noted, caplog.at_level(logging.WARNING, "sterna.frontend.http.slow_clients"):
        run(test())
    assert "its client does not read the answer" in caplog.text
