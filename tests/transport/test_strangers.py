"""Callers and callees that do not keep to the protocol: refused, and nothing is written."""

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest
import torch

from sterna.errors import ConfigurationError, TransportError
from sterna.transport.data_plane import Arrived, ReceiveFailed, SendFailed
from sterna.transport.plane import _MAX_STRANGERS
from sterna.transport.wires.frames import (
    VERSION,
    Begin,
    Chunk,
    Credit,
    Done,
    Frame,
    FrameStream,
    Hello,
    Refused,
    Rejected,
    Welcome,
)
from sterna.transport.wires.shm import _SEALS, _Ring
from tests.transport.planes import WAIT_S, Node, stage

CHUNK_BYTES = 2 * 3 * 64


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node("tcp")
    yield node
    node.plane.close()


def _dial(node: Node) -> FrameStream:
    address = node.plane.endpoint.removeprefix("tcp://").rpartition("/")[0]
    host, _, port = address.rpartition(":")
    return FrameStream(socket.create_connection((host, int(port))), WAIT_S)


def _hello(node: Node, **change: object) -> Hello:
    hello = Hello(
        version=VERSION,
        token=node.plane.endpoint.rpartition("/")[2],
        label="",
        page_bytes=((64, 64, 64),),
        chunk_bytes=CHUNK_BYTES,
        num_slots=1,
    )
    return msgspec.structs.replace(hello, **change)


def _greeted(node: Node) -> FrameStream:
    stream = _dial(node)
    stream.put(_hello(node))
    stream.flush()
    assert stream.wait_frame() == Welcome()
    return stream


def _is_hung_up(stream: FrameStream) -> bool:
    try:
        stream.wait_frame()
    except TimeoutError:
        # The connection is there, and says nothing.
        return False
    except (OSError, TransportError):
        return True
    return False


def _say(stream: FrameStream, *frames: Frame, payload: bytes = b"") -> None:
    for frame in frames:
        stream.put(frame)
    stream.flush(memoryview(payload) if payload else None)


# ---------------------------------------------------------------------------------- callers


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: sterna\r\n\r\n",
        b"\xff" * 64,
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x01\xc0",
        b"\x00\x00\x00\x02\x81\xa4",
    ],
)
def test_a_caller_that_speaks_something_else_is_hung_up_on(node: Node, noise: bytes) -> None:
    stream = _dial(node)
    stream.flush(memoryview(noise))
    assert _is_hung_up(stream)
    stream.close()
    node.copy(stage("still alive"), node, [1], [2])


def test_a_hello_that_is_no_text_is_hung_up_on_without_a_word(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    stream = _dial(node)
    hello = msgspec.msgpack.encode(_hello(node, label="tern")).replace(b"tern", b"\xff\xff\xff\xff")
    with caplog.at_level(logging.ERROR):
        stream.flush(memoryview(struct.pack("!I", len(hello)) + hello))
        assert _is_hung_up(stream)
    stream.close()
    node.copy(stage("still alive"), node, [1], [2])
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": VERSION + 1}, f"speaks version {VERSION}, the source version {VERSION + 1}"),
        ({"token": ""}, "wrong token"),
        ({"token": "ä"}, "wrong token"),
        ({"page_bytes": ((64, 64),)}, "number of layers differ: [3] here, [2]"),
    ],
)
def test_a_caller_that_does_not_fit_is_told_why(
    node: Node, change: dict[str, object], reason: str
) -> None:
    stream = _dial(node)
    _say(stream, _hello(node, **change))
    answer = stream.wait_frame()
    assert isinstance(answer, Rejected)
    assert reason in answer.reason
    assert _is_hung_up(stream)
    stream.close()


def test_a_caller_that_begins_without_hello_is_hung_up_on(node: Node) -> None:
    node.receive(stage("m"), [0, 1])
    before = node.kv.clone()
    stream = _dial(node)
    _say(stream, Begin(0, "m", 0, (2,), 2 * 192), Chunk(0, 0, CHUNK_BYTES, 0), payload=b"x" * 384)
    assert _is_hung_up(stream)
    assert torch.equal(node.kv, before)
    assert not node.has_events()
    stream.close()


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(0, 1, CHUNK_BYTES, 0),
        Chunk(0, -1, CHUNK_BYTES, 0),
        Chunk(0, 0, CHUNK_BYTES - 1, 0),
        Chunk(0, 0, CHUNK_BYTES + 1, 0),
        Chunk(7, 0, CHUNK_BYTES + 1, 0),
        Chunk(7, 0, 0, 0),
        Chunk(7, 0, -5, 0),
    ],
)
def test_a_chunk_that_was_not_agreed_on_ends_the_connection_unread(
    node: Node, chunk: Chunk
) -> None:
    node.receive(stage("m"), range(4))
    before = node.kv.clone()
    stream = _greeted(node)
    _say(stream, Begin(0, "m", 0, (4,), 4 * 192), chunk, payload=b"x" * CHUNK_BYTES)
    assert _is_hung_up(stream)
    assert isinstance(node.next_event(), ReceiveFailed)
    assert torch.equal(node.kv, before)
    stream.close()


def test_one_chunk_too_many_ends_the_connection(node: Node) -> None:
    stream = _greeted(node)
    node.receive(stage("m"), [0, 1])
    chunk = Chunk(0, 0, CHUNK_BYTES, 0)
    _say(stream, Begin(0, "m", 0, (2,), 2 * 192), chunk, payload=b"x" * CHUNK_BYTES)
    assert isinstance(node.next_event(), Arrived)
    assert stream.wait_frame() == Done(0)
    before = node.kv.clone()
    _say(stream, Chunk(0, 1, CHUNK_BYTES, 0), payload=b"y" * CHUNK_BYTES)
    # The stream is over: what comes of it is read and thrown away.
    _say(stream, Begin(1, "unknown", 0, (2,), 2 * 192))
    assert stream.wait_frame() == Refused(1, "this transfer is not expected")
    assert torch.equal(node.kv, before)
    stream.close()


def test_a_stream_number_in_use_ends_the_connection(node: Node) -> None:
    stream = _greeted(node)
    node.receive(stage("m"), [0, 1])
    node.receive(stage("n"), [2, 3])
    _say(stream, Begin(0, "m", 0, (2,), 384), Begin(0, "n", 0, (2,), 384))
    assert _is_hung_up(stream)
    failed = node.next_event()
    assert isinstance(failed, ReceiveFailed)
    assert failed.transfer == stage("m")
    stream.close()


def test_a_source_is_told_once_and_at_once_of_a_transfer_that_was_stopped(node: Node) -> None:
    stream = _greeted(node)
    node.receive(stage("m"), [0, 1])
    _say(stream, Begin(0, "m", 0, (2,), 384), Begin(1, "unknown", 0, (2,), 384))
    assert stream.wait_frame() == Refused(1, "this transfer is not expected")
    node.plane.stop(stage("m").migration_id)
    assert stream.wait_frame() == Refused(0, "the migration was stopped")
    for number in (2, 3):
        _say(stream, Begin(number, "unknown", 0, (2,), 384))
        assert stream.wait_frame() == Refused(number, "this transfer is not expected")
    stream.close()


def test_each_chunk_that_is_placed_grants_the_transfer_another_timeout(node: Node) -> None:
    stream = _greeted(node)
    node.receive(stage("m"), range(4))
    _say(stream, Begin(0, "m", 0, (4,), 768), Begin(1, "unknown", 0, (2,), 384))
    assert stream.wait_frame() == Refused(1, "this transfer is not expected")
    (copy,) = node.plane._context.ledger._copies.values()  # type: ignore[attr-defined]
    claimed_until_s = copy.deadline_s
    _say(stream, Chunk(0, 0, CHUNK_BYTES, 0), payload=bytes(CHUNK_BYTES))
    _say(stream, Begin(2, "unknown", 0, (2,), 384))
    assert stream.wait_frame() == Refused(2, "this transfer is not expected")
    assert copy.deadline_s > claimed_until_s
    stream.close()


def test_a_frame_that_only_destinations_send_ends_the_connection(node: Node) -> None:
    stream = _greeted(node)
    _say(stream, Done(0))
    assert _is_hung_up(stream)
    stream.close()


def test_callers_that_say_nothing_do_not_keep_a_peer_out(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sterna.transport.plane"):
        silent = [_dial(node) for _ in range(_MAX_STRANGERS + 3)]
        peer = _greeted(node)
    node.receive(stage("m"), [5, 6])
    chunk = Chunk(0, 0, CHUNK_BYTES, 0)
    _say(peer, Begin(0, "m", 0, (2,), 384), chunk, payload=bytes(CHUNK_BYTES))
    assert isinstance(node.next_event(), Arrived)
    assert all(_is_hung_up(each) for each in silent[:3]), "the first ones go first"
    assert "did not say the token" in caplog.text
    for each in (peer, *silent):
        each.close()


def test_frames_may_arrive_in_pieces_of_any_size(node: Node) -> None:
    node.receive(stage("m"), [5, 6])
    stream = _dial(node)
    frames = [_hello(node), Begin(0, "m", 0, (2,), 384), Chunk(0, 0, CHUNK_BYTES, 0)]
    encoded = b""
    for frame in frames:
        body = msgspec.msgpack.encode(frame)
        encoded += len(body).to_bytes(4, "big") + body
    encoded += bytes(range(192)) * 2
    for start in range(0, len(encoded), 7):
        stream.flush(memoryview(encoded[start : start + 7]))
    assert isinstance(node.next_event(), Arrived)
    assert bytes(node.blocks([5, 6]).numpy().tobytes()) == bytes(range(192)) * 2
    stream.close()


def test_frames_may_arrive_in_one_piece_with_the_greeting(node: Node) -> None:
    """Nothing more comes after it, so nothing would wake the plane up to look again."""
    node.receive(stage("m"), [5, 6])
    stream = _dial(node)
    _say(
        stream,
        _hello(node),
        Begin(0, "m", 0, (2,), 384),
        Chunk(0, 0, CHUNK_BYTES, 0),
        payload=bytes(range(192)) * 2,
    )
    assert isinstance(node.next_event(), Arrived)
    stream.close()


# ---------------------------------------------------------------------------------- callees


class _Impostor:
    """Listens like a plane and answers what it is told to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{port}/token"

    def accept(self) -> FrameStream:
        sock, _ = self._listener.accept()
        return FrameStream(sock, WAIT_S)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def impostor() -> Iterator[_Impostor]:
    impostor = _Impostor()
    yield impostor
    impostor.close()


@pytest.mark.parametrize("answer", [Done(0), Credit(0), Begin(0, "m", 0, (1,), 1)])
def test_a_callee_that_does_not_welcome_fails_the_send(
    node: Node, impostor: _Impostor, answer: Frame
) -> None:
    node.plane.send(stage("m"), impostor.endpoint, [[0]], is_paced=False)
    stream = impostor.accept()
    assert isinstance(stream.wait_frame(), Hello)
    _say(stream, answer)
    failed = node.next_event()
    assert isinstance(failed, SendFailed)
    assert "the peer answered with" in failed.reason
    stream.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Done(0), "acknowledged chunks that were not sent"),
        (Credit(0), "gave back slot 0"),
        (Credit(-1), "gave back slot -1"),
        (Credit(9), "gave back slot 9"),
        (Welcome(), "answered with Welcome"),
    ],
)
def test_a_callee_that_answers_what_was_not_asked_fails_the_send(
    node: Node, impostor: _Impostor, answer: Frame, message: str
) -> None:
    # Large enough to be held up by the pace after the first chunk.
    slow = Node("tcp", bandwidth_share=0.001)
    slow.plane.send(stage("m"), impostor.endpoint, [range(20)], is_paced=True)
    stream = impostor.accept()
    assert isinstance(stream.wait_frame(), Hello)
    _say(stream, Welcome())
    assert isinstance(stream.wait_frame(), Begin)
    _say(stream, answer)
    failed = slow.next_event()
    assert isinstance(failed, SendFailed)
    assert message in failed.reason
    stream.close()
    slow.plane.close()


def test_answers_for_streams_that_are_over_are_ignored(node: Node, impostor: _Impostor) -> None:
    node.plane.send(stage("m"), impostor.endpoint, [[0]], is_paced=False)
    stream = impostor.accept()
    assert isinstance(stream.wait_frame(), Hello)
    _say(stream, Welcome(), Done(77), Refused(78, "what?"))
    assert isinstance(stream.wait_frame(), Begin)
    _say(stream, Refused(0, "no"))
    assert node.next_event() == SendFailed(stage("m"), "refused by the destination: no")
    _say(stream, Refused(0, "no"), Done(0))
    node.plane.send(stage("n"), impostor.endpoint, [[]], is_paced=False)
    stream.read_payload(memoryview(bytearray(_chunk_frame_bytes() + 192)))
    assert stream.wait_frame() == Begin(1, "n", 0, (0,), 0)
    stream.close()


def _chunk_frame_bytes() -> int:
    return 4 + len(msgspec.msgpack.encode(Chunk(0, 0, 192, 0)))


# ---------------------------------------------------------------------------------- shared memory


def _memory_file(size: int, seals: int) -> int:
    fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _ordinary_file() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize("flaw", ["too small", "too large", "could shrink", "no memory file"])
def test_a_ring_that_could_kill_its_reader_is_rejected(flaw: str) -> None:
    page = mmap.PAGESIZE
    fd = {
        "too small": lambda: _memory_file(page, _SEALS),
        "too large": lambda: _memory_file(3 * page, _SEALS),
        "could shrink": lambda: _memory_file(2 * page, 0),
        "no memory file": _ordinary_file,
    }[flaw]()
    with pytest.raises(TransportError, match="the source's ring"):
        _Ring.map(fd, 2, page, torch.device("cpu"))
    with pytest.raises(OSError):
        os.fstat(fd)


def _num_ring_fds() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("sterna-kv" in link for link in links)


def test_an_open_connection_keeps_no_descriptor_of_its_ring_but_those_of_the_mappings() -> None:
    source, destination = Node("shm"), Node("shm")
    # A spare ring in each plane: the descriptor to pass on and the one that mmap keeps.
    assert _num_ring_fds() == 4
    source.copy(stage("m"), destination, [0], [1])
    # A mapping at each end, and the spare of the plane that has not sent.
    assert _num_ring_fds() == 4
    source.copy(stage("n"), destination, [0], [1])
    source.plane.close()
    destination.plane.close()
    # A receiver that has ended its connection by itself may still be leaving its thread.
    deadline_s = time.monotonic() + WAIT_S
    while _num_ring_fds() > 0:
        assert time.monotonic() < deadline_s


def test_a_source_without_a_ring_is_rejected() -> None:
    node = Node("shm")
    name = node.plane.endpoint.removeprefix("shm://").rpartition("/")[0]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + name)
    stream = FrameStream(sock, WAIT_S)
    _say(stream, _hello(node))
    assert stream.wait_frame() == Rejected("the source sent no ring of shared memory")
    stream.close()
    node.plane.close()


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    node = Node("shm")
    name = node.plane.endpoint.removeprefix("shm://").rpartition("/")[0]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + name)
    stream = FrameStream(sock, WAIT_S)
    reader, writer = os.pipe()
    stream.put(_hello(node, token="wrong"))
    stream.flush(fds=(writer,))
    assert isinstance(stream.wait_frame(), Rejected)
    assert _is_hung_up(stream)
    os.close(writer)
    # The pipe ends once the plane has closed its copy as well.
    assert os.read(reader, 1) == b""
    os.close(reader)
    stream.close()
    node.plane.close()


def test_a_caller_that_brings_descriptors_without_end_is_hung_up_on() -> None:
    node = Node("shm")
    name = node.plane.endpoint.removeprefix("shm://").rpartition("/")[0]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + name)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # The length of a frame, and then every byte of it with a descriptor.
        sock.send(struct.pack(">I", 1000))
        for _ in range(100):
            socket.send_fds(sock, [b"\0"], [sock.fileno()])
    sock.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    sock.close()
    node.plane.close()


# ---------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_a_host_that_peers_cannot_connect_to_is_a_configuration_error(kind: str, host: str) -> None:
    with pytest.raises(ConfigurationError, match="an address that peers can connect to"):
        Node(kind, host=host)


def test_a_plane_listens_on_its_hosts_address_only() -> None:
    node = Node("tcp", host="127.0.0.5")
    assert node.plane.endpoint.startswith("tcp://127.0.0.5:")
    port = int(node.plane.endpoint.rpartition("/")[0].rpartition(":")[2])
    # Another process may have the same port at another address.
    own = psutil.Process().net_connections("tcp")
    listening = [each.laddr.ip for each in own if each.laddr.port == port and not each.raddr]
    assert listening == ["127.0.0.5"]
    node.copy(stage("m"), node, [1], [2])
    node.plane.close()


@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_planes_speak_ipv6(kind: str) -> None:
    node = Node(kind, host="::1")
    assert node.plane.endpoint.startswith(f"{kind}://[::1]:")
    node.copy(stage("m"), node, [1], [2])
    node.plane.close()
