"""Destination's end of a KV connection: one accepted connection and its thread."""

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sterna.errors import TransportError
from sterna.transport.data_plane import Arrived, Hop, Transfer
from sterna.transport.ledger import Copy
from sterna.transport.memory.chunks import PageBytes, Tile
from sterna.transport.memory.staging import make_copier
from sterna.transport.plane_context import PlaneContext
from sterna.transport.wires.channel import ReceiveChannel
from sterna.transport.wires.frames import (
    VERSION,
    Begin,
    Cancel,
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
from sterna.transport.wires.waiting import Waker, wait
from sterna.types import MigrationId

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Inbound:
    """A copy that is being received."""

    copy: Copy
    stream: int
    tiles: list[Tile]
    next_tile: int = 0


class Receiver:
    """All transfers of one source. `close` is for any thread and does not block.

    Attributes:
        is_greeted: whether the caller has sent the token and is a peer.
    """

    def __init__(
        self, sock: socket.socket, plane: PlaneContext, on_over: "Callable[[Receiver], None]"
    ) -> None:
        self._plane = plane
        self._on_over = on_over
        self.is_greeted = False
        self._waker = Waker()
        self._stream = FrameStream(sock, plane.timeout_s)
        self.thread = threading.Thread(target=self._run, name="sterna-kv-receive", daemon=True)

    def start(self) -> None:
        """Starts the thread that serves the caller.

        Raises:
            RuntimeError: the thread cannot be started; everything was released.
        """
        try:
            self.thread.start()
        except RuntimeError:
            self._stream.close()
            self._waker.close()
            raise

    def close(self) -> None:
        """Makes the thread end soon."""
        self._stream.hang_up()

    def _run(self) -> None:
        reason = "the connection to the source failed"
        channel: ReceiveChannel | None = None
        connection: _Connection | None = None
        try:
            channel = self._greet()
            self._stream.put(Welcome())
            self._stream.flush()
            self.is_greeted = True
            connection = _Connection(self._stream, channel, self._plane, self._waker)
            channel.join(self._stream)
            while True:
                connection.turn()
        except (OSError, TransportError) as error:
            reason = f"{reason}: {error}"
            _logger.debug("kv connection ended error=%s", error)
        except Exception as error:
            reason = f"receiving failed: {error!r}"
            _logger.exception("kv receiver failed")
        for copy in connection.copies() if connection is not None else []:
            self._plane.ledger.fail(copy, reason)
        self._stream.close()
        if channel is not None:
            channel.close()
        if connection is not None:
            connection.close()
        self._waker.close()
        self._on_over(self)

    def _greet(self) -> ReceiveChannel:
        """Checks the caller's token, and that both sides have the same layout of blocks."""
        hello = self._stream.wait_frame()
        if not isinstance(hello, Hello):
            raise TransportError("the caller did not say hello")
        try:
            self._check(hello)
            channel = self._plane.wire.receiver(self._stream, hello)
        except TransportError as error:
            self._stream.put(Rejected(str(error)))
            self._stream.flush()
            raise
        return channel

    def _check(self, hello: Hello) -> None:
        if hello.version != VERSION:
            raise TransportError(
                f"this plane speaks version {VERSION}, the source version {hello.version}"
            )
        if not hmac.compare_digest(hello.token.encode(), self._plane.token.encode()):
            raise TransportError("the endpoint belongs to an earlier instance: wrong token")
        cache = self._plane.cache
        for name, ours, theirs in (
            ("label", cache.label, hello.label),
            ("number of layers", _num_layers(cache.page_bytes), _num_layers(hello.page_bytes)),
            ("page bytes", cache.page_bytes, hello.page_bytes),
            ("chunk_bytes", self._plane.chunk_bytes, hello.chunk_bytes),
        ):
            if ours != theirs:
                raise TransportError(f"the {name} differ: {ours!r} here, {theirs!r} at the source")


def _num_layers(page_bytes: PageBytes) -> list[int]:
    """Of each KV cache group."""
    return [len(each) for each in page_bytes]


class _Connection:
    """The transfers on one open connection; for its thread only."""

    def __init__(
        self, stream: FrameStream, channel: ReceiveChannel, plane: PlaneContext, waker: Waker
    ) -> None:
        self._stream = stream
        self._channel = channel
        self._plane = plane
        self._waker = waker
        self._copier = make_copier(plane.cache, plane.slot_bytes)
        self._streams: dict[int, _Inbound] = {}

    def turn(self) -> None:
        """Handles the source's frames and transfers that were stopped, then waits for more."""
        # Frames may have arrived together with the last one of the greeting: read before waiting.
        while (frame := self._stream.next_frame()) is not None:
            self._on_frame(frame)
            self._stream.flush()
        self._refuse_ended()
        self._stream.flush()
        if wait(self._waker, self._stream):
            self._stream.fill()

    def copies(self) -> list[Copy]:
        return [inbound.copy for inbound in self._streams.values()]

    def close(self) -> None:
        self._copier.close()

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Begin():
                self._begin(frame)
            case Chunk():
                self._take(frame)
            case Cancel(stream, reason):
                if (inbound := self._streams.pop(stream, None)) is not None:
                    self._plane.ledger.fail(inbound.copy, f"cancelled by {reason}")
            case _:
                raise TransportError(f"the source sent {frame}")

    def _begin(self, begin: Begin) -> None:
        if begin.stream in self._streams:
            raise TransportError(f"the source used stream {begin.stream} twice")
        hop = None if begin.hop is None else Hop(*begin.hop)
        transfer = Transfer(MigrationId(begin.migration_id), begin.stage, hop)
        claimed = self._plane.ledger.claim(
            transfer, begin.num_blocks, begin.copy_bytes, self._waker
        )
        if isinstance(claimed, str):
            self._stream.put(Refused(begin.stream, claimed))
            return
        inbound = _Inbound(claimed, begin.stream, self._plane.plan(begin.num_blocks))
        self._streams[begin.stream] = inbound
        if not inbound.tiles:
            self._finish(inbound)

    def _take(self, chunk: Chunk) -> None:
        """Fetches the chunk in any case, and scatters it if its transfer is expected."""
        inbound = self._streams.get(chunk.stream)
        if inbound is not None:
            self._check(inbound, chunk)
        elif not 0 < chunk.num_bytes <= self._plane.slot_bytes:
            raise TransportError(f"the source sent a chunk of {chunk.num_bytes} bytes")
        staged = self._channel.fetch(self._stream, chunk)
        if inbound is not None:
            tile = inbound.tiles[inbound.next_tile]
            inbound.next_tile += 1
            copy = inbound.copy
            if self._plane.ledger.enter(copy):
                try:
                    self._copier.scatter(tile, copy.block_ids[tile.group], staged, copy.fence)
                finally:
                    self._plane.ledger.leave(copy)
                self._plane.ledger.extend_deadline(copy)
        if self._channel.gives_credit:
            self._stream.put(Credit(chunk.slot))
        if inbound is not None and inbound.next_tile == len(inbound.tiles):
            self._finish(inbound)

    def _check(self, inbound: _Inbound, chunk: Chunk) -> None:
        """Raises TransportError unless the chunk is the next one of the plan."""
        if inbound.next_tile == len(inbound.tiles):
            raise TransportError(f"the source sent more than {len(inbound.tiles)} chunks")
        planned = inbound.tiles[inbound.next_tile].num_bytes(self._plane.cache.page_bytes)
        if (chunk.index, chunk.num_bytes) != (inbound.next_tile, planned):
            raise TransportError(
                f"the source sent chunk {chunk.index} of {chunk.num_bytes} bytes where chunk "
                f"{inbound.next_tile} of {planned} bytes was due"
            )

    def _finish(self, inbound: _Inbound) -> None:
        copy = inbound.copy
        duration_s = time.monotonic() - copy.begun_s
        arrived = Arrived(copy.transfer, copy.num_blocks, copy.copy_bytes, duration_s)
        if self._plane.ledger.end(copy, arrived):
            self._stream.put(Done(inbound.stream))
            del self._streams[inbound.stream]

    def _refuse_ended(self) -> None:
        """Refuses transfers that ended on this side, also those whose blocks were all in place
        but which were stopped before Done was sent."""
        for inbound in list(self._streams.values()):
            if inbound.copy.over is not None:
                self._stream.put(Refused(inbound.stream, inbound.copy.over))
                del self._streams[inbound.stream]
