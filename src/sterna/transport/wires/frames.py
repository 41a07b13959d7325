"""Frames of a KV connection: the protocol of its two ends, and frames over a socket.

A connection carries the transfers of one source to one destination, one way. The source opens it
and sends the first frame:

    source                              destination
      Hello(token, layout)  --------->    checks version, token, layout, chunk size
      <--------- Welcome | Rejected
      Meet(key, value)  <------->         gloo: the addresses of the pair
      Begin(stream, transfer, sizes) ->   checks that exactly this transfer is expected
      Chunk(stream, index), bytes  --->   scatters it
      <--------- Credit(slot)             shm and gloo: the slot may be filled again
      <--------- Done(stream)             all blocks are in place
      <--------- Refused(stream, why)     not expected, or given up: at any time
      Cancel(stream, why)  ---------->    given up

Chunks may follow Begin before the destination has answered: their sizes are bounded by the
Hello, and chunks of a stream that was not accepted are read and dropped. The frames of a connection
are in order; transfers are interleaved by chunk. A frame is msgpack behind its length, four
bytes, big endian. Over tcp a chunk's bytes follow its frame.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence

import msgspec

from sterna.errors import UNREADABLE, TransportError

VERSION = 3
_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 20
_READ_BYTES = 4096
_KEEPALIVE_IDLE_S = 60
_MAX_FDS = 4


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Source: its token and the layout of its blocks.

    Attributes:
        token: the secret of the destination's endpoint. It also distinguishes a plane from a
            later one on the same port.
        page_bytes: of every layer of every KV cache group.
        num_slots: chunks that may be in flight at once; 1 when there is no ring.
    """

    version: int
    token: str
    label: str
    page_bytes: tuple[tuple[int, ...], ...]
    chunk_bytes: int
    num_slots: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Destination: transfers may begin."""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Destination: the two planes cannot exchange blocks; the connection ends."""

    reason: str


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Both, with gloo, between Welcome and the first Begin: an entry of the store by which the
    two Gloo endpoints find each other."""

    key: str
    value: bytes


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Source: the chunks of this stream are that transfer.

    Attributes:
        num_blocks: for each KV cache group.
        hop: lead and rank, where the source is another rank of the destination.
    """

    stream: int
    migration_id: str
    stage: int
    num_blocks: tuple[int, ...]
    copy_bytes: int
    hop: tuple[int, int] | None = None


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Source: the next chunk of the stream, `num_bytes` in the given slot."""

    stream: int
    index: int
    num_bytes: int
    slot: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Source: no further chunk of this stream follows."""

    stream: int
    reason: str


class Credit(msgspec.Struct, frozen=True, tag=True):
    """Destination: the slot may be filled again."""

    slot: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Destination: all blocks of the stream are in place."""

    stream: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Destination: further chunks of this stream are dropped."""

    stream: int
    reason: str


Frame = Hello | Welcome | Rejected | Meet | Begin | Chunk | Cancel | Credit | Done | Refused


class FrameStream:
    """Frames over one connected socket, for one thread; only `hang_up` may be called from others.

    Every method raises OSError when the connection breaks or no byte is moved within the timeout,
    and TransportError when the peer hangs up or violates the protocol.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        # With the kernel's timeouts instead of Python's, one call moves a whole chunk: the thread
        # competes for the interpreter once a chunk, not once a socket buffer.
        sock.setblocking(True)
        timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Without it, an idle connection would not notice the death of the peer's host.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        self._sock = sock
        self._takes_fds = sock.family == socket.AF_UNIX
        self._in = bytearray()
        self._out = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self.received_fds: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def put(self, frame: Frame) -> None:
        """Queues a frame; `flush` sends it."""
        body = self._encoder.encode(frame)
        self._out += _LENGTH.pack(len(body))
        self._out += body

    def flush(self, payload: memoryview | None = None, fds: Sequence[int] = ()) -> None:
        """Sends the queued frames, then the payload, together with file descriptors (Unix only)."""
        if fds:
            del self._out[: socket.send_fds(self._sock, [self._out], list(fds))]
        parts = [memoryview(part) for part in (self._out, payload) if part]
        self._out = bytearray()
        while parts:
            with _timeouts():
                num_sent = self._sock.sendmsg(parts)
            while parts and num_sent >= len(parts[0]):
                num_sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][num_sent:]

    def fill(self) -> None:
        """Reads the bytes that have arrived; blocks when there are none."""
        with _timeouts():
            if self._takes_fds:
                received, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
                self.received_fds += fds
                if len(self.received_fds) > _MAX_FDS:
                    # A caller without a token could use up this process's descriptors.
                    raise TransportError("the peer sent more descriptors than a wire needs")
            else:
                received = self._sock.recv(_READ_BYTES)
        if not received:
            raise TransportError("the peer closed the connection")
        self._in += received

    def next_frame(self) -> Frame | None:
        """The next whole frame of the bytes read, or None."""
        if len(self._in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        if length > _MAX_FRAME_BYTES:
            raise TransportError(f"the peer sent a frame of {length} bytes: not a Sterna plane")
        end = _LENGTH.size + length
        if len(self._in) < end:
            return None
        body = bytes(self._in[_LENGTH.size : end])
        del self._in[:end]
        try:
            frame: Frame = self._decoder.decode(body)
        except UNREADABLE as error:
            raise TransportError(f"the peer sent an unknown frame: {error}") from error
        return frame

    def wait_frame(self) -> Frame:
        """Waits for the next frame and returns it."""
        while (frame := self.next_frame()) is None:
            self.fill()
        return frame

    def read_payload(self, payload: memoryview) -> None:
        """Fills `payload` with the bytes behind the frame read last."""
        num_read = min(len(self._in), len(payload))
        payload[:num_read] = self._in[:num_read]
        del self._in[:num_read]
        while num_read < len(payload):
            with _timeouts():
                num_received = self._sock.recv_into(payload[num_read:], flags=socket.MSG_WAITALL)
            if num_received == 0:
                raise TransportError("the peer closed the connection")
            num_read += num_received

    def hang_up(self) -> None:
        """Shuts the connection down; the thread that uses it gets an error. May be called from any
        thread, repeatedly, and after `close`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It was never connected, or is broken or closed already.
            return

    def close(self) -> None:
        """Closes the socket and received descriptors that were not taken."""
        self._sock.close()
        close_fds(self.received_fds)


@contextlib.contextmanager
def _timeouts() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError("the peer made no progress") from error


def close_fds(fds: list[int]) -> None:
    """Closes the descriptors and empties the list."""
    while fds:
        os.close(fds.pop())
