"""Source's end of a KV connection: one connection to one peer and its thread.

A peer that hangs or dies blocks only its own thread. Within the connection, chunks of unpaced
transfers (last stages and prefixes) go before chunks of paced ones, unless a paced transfer has
waited for a quarter of the timeout, and transfers of the same kind take turns: so none of them
exceeds the destination's timeout.
"""

import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sterna.errors import TransportError
from sterna.transport.data_plane import Sent
from sterna.transport.ledger import Copy
from sterna.transport.memory.chunks import Tile
from sterna.transport.memory.staging import make_copier
from sterna.transport.plane_context import PlaneContext
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

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Outbound:
    """A copy that is being sent.

    Attributes:
        waits_since_s: when it was admitted, or its last chunk was sent.
    """

    copy: Copy
    stream: int
    tiles: list[Tile]
    waits_since_s: float
    next_tile: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A parsed endpoint."""

    address: str
    token: str


class Sender:
    """All transfers to one peer. Its methods are for any thread and never block."""

    def __init__(
        self, peer: Peer, plane: PlaneContext, on_over: "Callable[[Sender], None]"
    ) -> None:
        """
        Args:
            on_over: called on the connection's thread once it accepts no more copies.
        """
        self._peer = peer
        self._plane = plane
        self._on_over = on_over
        self._waker = Waker()
        self._lock = threading.Lock()
        self._submitted: list[Copy] = []
        self._stream: FrameStream | None = None
        self._is_over = False
        # It had nothing to send.
        self._is_retired = False
        self._is_closing = False
        self.thread = threading.Thread(target=self._run, name="sterna-kv-send", daemon=True)

    def submit(self, copy: Copy) -> bool:
        """Queues the copy; False when the connection has ended and a new one is needed."""
        with self._lock:
            if self._is_over:
                return False
            copy.waker = self._waker
            self._submitted.append(copy)
        self._waker.set()
        return True

    def start(self) -> None:
        """Starts the thread that connects and sends.

        Raises:
            RuntimeError: the thread cannot be started; everything was released.
        """
        try:
            self.thread.start()
        except RuntimeError:
            self._waker.close()
            raise

    def close(self) -> None:
        """Makes the thread end soon."""
        with self._lock:
            self._is_closing = True
            if self._stream is not None:
                self._stream.hang_up()
        self._waker.set()

    def _run(self) -> None:
        reason = "the data plane was closed"
        connection: _Connection | None = None
        try:
            connection = _Connection(self._dial(), self._peer, self._plane, self._waker)
            connection.greet()
            while not (self._is_closing or (connection.is_idle and self._retire())):
                connection.admit(self._take_submitted())
                connection.turn()
        except (OSError, ValueError, TransportError) as error:
            reason = f"the connection to {self._peer.address} failed: {error}"
            if not self._is_closing:
                _logger.info("kv connection ended peer=%s error=%s", self._peer.address, error)
        except Exception as error:
            reason = f"sending to {self._peer.address} failed: {error!r}"
            _logger.exception("kv sender failed peer=%s", self._peer.address)
        with self._lock:
            self._is_over = True
            stream, self._stream = self._stream, None
        self._on_over(self)
        begun = connection.copies() if connection is not None else []
        for copy in begun + self._take_submitted():
            self._plane.ledger.fail(copy, reason)
        if stream is not None:
            stream.close()
        if connection is not None:
            connection.close()
        self._waker.close()
        if self._is_retired:
            self._prepare_next()

    def _retire(self) -> bool:
        """Take no more copies, unless there are some."""
        with self._lock:
            self._is_over = self._is_retired = not self._submitted
            return self._is_over

    def _prepare_next(self) -> None:
        """Make what this connection took from the stock, so that the next one need not."""
        try:
            self._plane.wire.prepare()
        except (OSError, RuntimeError) as error:
            _logger.info("no spare for the next kv connection error=%s", error)

    def _take_submitted(self) -> list[Copy]:
        with self._lock:
            submitted, self._submitted = self._submitted, []
        return submitted

    def _dial(self) -> FrameStream:
        family, address = self._plane.wire.resolve(self._peer.address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(address)
            deadline_s = time.monotonic() + self._plane.timeout_s
            while code == errno.EINPROGRESS:
                left_s = deadline_s - time.monotonic()
                if self._is_closing or left_s <= 0:
                    raise TimeoutError("the peer does not answer")
                if wait(self._waker, sock, select.POLLOUT, left_s):
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code != 0:
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        stream = FrameStream(sock, self._plane.timeout_s)
        with self._lock:
            self._stream = stream
            if self._is_closing:
                stream.hang_up()
        return stream


class _Connection:
    """The transfers on one open connection; for its thread only."""

    def __init__(self, stream: FrameStream, peer: Peer, plane: PlaneContext, waker: Waker) -> None:
        self._stream = stream
        self._peer = peer
        self._plane = plane
        self._waker = waker
        self._copier = make_copier(plane.cache, plane.slot_bytes)
        # After everything else that may fail, because the channel must be closed.
        self._channel = plane.wire.sender(peer.address)
        self._slots = self._channel.slots
        self._next_stream = 0
        self._streams: dict[int, _Outbound] = {}
        # Transfers with chunks left, in order of their turns.
        self._unpaced: deque[_Outbound] = deque()
        self._paced: deque[_Outbound] = deque()
        # Slot and start of the paced chunk in flight: the next one is sent a pause after it.
        self._paced_chunk: tuple[int, float] | None = None
        # When a slot was last filled or freed.
        self._last_activity_s = 0.0
        # Since when there has been nothing to send.
        self._empty_since_s = time.monotonic()

    def greet(self) -> None:
        """Sends the token and the layout of blocks, and waits for the destination's Welcome."""
        cache = self._plane.cache
        hello = Hello(
            version=VERSION,
            token=self._peer.token,
            label=cache.label,
            page_bytes=cache.page_bytes,
            chunk_bytes=self._plane.chunk_bytes,
            num_slots=len(self._slots),
        )
        self._stream.put(hello)
        self._stream.flush(fds=self._channel.fds)
        match self._stream.wait_frame():
            case Welcome():
                self._channel.join(self._stream)
            case Rejected(reason):
                raise TransportError(f"it was rejected: {reason}")
            case frame:
                raise TransportError(f"the peer answered with {frame}")

    def admit(self, copies: list[Copy]) -> None:
        """Adds copies; their Begin is sent by the next flush."""
        for copy in copies:
            if copy.over is not None:
                continue
            tiles = self._plane.plan(copy.num_blocks)
            outbound = _Outbound(copy, self._next_stream, tiles, time.monotonic())
            self._next_stream += 1
            self._streams[outbound.stream] = outbound
            self._stream.put(
                Begin(
                    outbound.stream,
                    copy.transfer.migration_id,
                    copy.transfer.stage,
                    copy.num_blocks,
                    copy.copy_bytes,
                    copy.transfer.hop,
                )
            )
            if tiles:
                (self._paced if copy.is_paced else self._unpaced).append(outbound)
            else:
                self._plane.ledger.extend_deadline(copy)

    def turn(self) -> None:
        """Cancels transfers that ended, sends at most one chunk, and reads the peer's frames."""
        self._cancel_ended()
        has_sent = self._send_chunk()
        self._stream.flush()
        if wait(self._waker, self._stream, timeout_s=0.0 if has_sent else self._wait_timeout_s()):
            self._stream.fill()
            while (frame := self._stream.next_frame()) is not None:
                self._on_frame(frame)
        elif self._slots.num_taken and self._stalled_s() > self._plane.timeout_s:
            raise TimeoutError(f"the peer took no data for {self._plane.timeout_s:g} s")

    @property
    def is_idle(self) -> bool:
        """Whether there has been nothing to send for `idle_timeout_s`."""
        is_empty = not (self._streams or self._slots.num_taken)
        return is_empty and self._until_idle_s() <= 0

    def copies(self) -> list[Copy]:
        return [outbound.copy for outbound in self._streams.values()]

    def close(self) -> None:
        self._channel.close()
        self._copier.close()

    def _cancel_ended(self) -> None:
        ended = [outbound for outbound in self._streams.values() if outbound.copy.over is not None]
        for outbound in ended:
            assert outbound.copy.over is not None
            self._stream.put(Cancel(outbound.stream, f"the source: {outbound.copy.over}"))
            self._forget(outbound)

    def _send_chunk(self) -> bool:
        turns = self._next_turn()
        if turns is None or (slot := self._slots.take()) is None:
            return False
        outbound = turns[0]
        begun_s = time.monotonic()
        index, tile = outbound.next_tile, outbound.tiles[outbound.next_tile]
        num_bytes = tile.num_bytes(self._plane.cache.page_bytes)
        copy = outbound.copy
        if not self._plane.ledger.enter(copy):
            self._slots.give(slot)
            return True
        try:
            buffer = self._slots.buffer(slot, num_bytes)
            self._copier.gather(tile, copy.block_ids[tile.group], buffer, copy.fence)
        finally:
            self._plane.ledger.leave(copy)
        self._last_activity_s = outbound.waits_since_s = time.monotonic()
        outbound.next_tile += 1
        turns.popleft()
        if outbound.next_tile < len(outbound.tiles):
            turns.append(outbound)
        else:
            self._plane.ledger.extend_deadline(copy)
        if copy.is_paced:
            self._paced_chunk = (slot, begun_s)
        if self._channel.ship(self._stream, Chunk(outbound.stream, index, num_bytes, slot)):
            self._give(slot)
        return True

    def _next_turn(self) -> "deque[_Outbound] | None":
        """The queue whose first transfer may send a chunk now, or None."""
        if self._paced and self._paced_chunk is None and self._pause_s() == 0:
            # The first of the queue has waited for the longest time.
            waited_s = time.monotonic() - self._paced[0].waits_since_s
            if not self._unpaced or waited_s > self._plane.timeout_s / 4:
                return self._paced
        return self._unpaced or None

    def _wait_timeout_s(self) -> float | None:
        """Longest wait for a frame or a wake-up; None is without limit."""
        if self._slots.num_taken:
            return max(self._plane.timeout_s - self._stalled_s(), 0.0) + 0.001
        if self._paced and self._paced_chunk is None:
            return self._pause_s()
        if not self._streams:
            return max(self._until_idle_s(), 0.0) + 0.001
        return None

    def _until_idle_s(self) -> float:
        return self._empty_since_s + self._plane.idle_timeout_s - time.monotonic()

    def _pause_s(self) -> float:
        return self._plane.pacer.pause_s(time.monotonic())

    def _stalled_s(self) -> float:
        return time.monotonic() - self._last_activity_s

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Credit(slot):
                self._channel.credited(slot)
                self._give(slot)
            case Done(stream):
                # A stream that is missing was cancelled before this answer arrived.
                if (outbound := self._streams.get(stream)) is not None:
                    self._finish(outbound)
            case Refused(stream, reason):
                if (outbound := self._streams.get(stream)) is not None:
                    self._plane.ledger.fail(outbound.copy, f"refused by the destination: {reason}")
                    self._forget(outbound)
            case _:
                raise TransportError(f"the peer answered with {frame}")

    def _finish(self, outbound: _Outbound) -> None:
        if outbound.next_tile < len(outbound.tiles):
            raise TransportError("the peer acknowledged chunks that were not sent")
        copy = outbound.copy
        duration_s = time.monotonic() - copy.begun_s
        self._plane.ledger.end(copy, Sent(copy.transfer, copy.copy_bytes, duration_s))
        self._forget(outbound)

    def _forget(self, outbound: _Outbound) -> None:
        del self._streams[outbound.stream]
        self._empty_since_s = time.monotonic()
        for turns in (self._unpaced, self._paced):
            if outbound in turns:
                turns.remove(outbound)

    def _give(self, slot: int) -> None:
        now_s = time.monotonic()
        self._slots.give(slot)
        self._last_activity_s = now_s
        if self._paced_chunk is not None and self._paced_chunk[0] == slot:
            self._plane.pacer.chunk_done(self._paced_chunk[1], now_s)
            self._paced_chunk = None
