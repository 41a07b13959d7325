"""The wires of the KV data plane without it: the same bytes from one contiguous buffer to another.

A transfer also gathers blocks from a cache and scatters them into another one; its rate is compared
with these. One thread at each end; chunks of the size that the data plane has.
"""

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

import numpy as np

NUM_SLOTS = 4
"""Chunks that lie in shared memory at once."""

_LENGTH = struct.Struct("!Q")
_TICK = b"."


class RawWire(Protocol):
    """The end of the source."""

    def send(self, num_bytes: int) -> None:
        """Send as many bytes; the other end calls its `notify` when it has them."""

    def close(self) -> None:
        """Close this end; the other one ends."""


class Destination:
    """The other end, in a thread of its own.

    Args:
        kind: `tcp` or `shm`.
        max_bytes: most that are sent at once.
        chunk_bytes: as of the data plane.
        notify: called when all bytes of a `send` are here.

    Attributes:
        address: for `connect`.
        buffer: what has arrived.
    """

    def __init__(
        self, kind: str, max_bytes: int, chunk_bytes: int, notify: Callable[[], None]
    ) -> None:
        self.buffer = np.zeros(max_bytes, np.uint8)
        self._chunk_bytes = chunk_bytes
        self._notify = notify
        self._shared: SharedMemory | None = None
        if kind == "tcp":
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address: tuple[str, ...] = ("tcp", str(self._listener.getsockname()[1]))
        else:
            self._shared = SharedMemory(create=True, size=NUM_SLOTS * chunk_bytes)
            path = os.path.join(tempfile.mkdtemp(), "ticks")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen()
            self.address = ("shm", path, self._shared.name)
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Remove the shared memory, if there is any."""
        if self._shared is not None:
            self._shared.close()
            self._shared.unlink()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while header := _received(connection, _LENGTH.size):
                (num_bytes,) = _LENGTH.unpack(header)
                if self._shared is None:
                    _receive_into(connection, self.buffer.data[:num_bytes])
                else:
                    self._copy_from(self._shared, connection, num_bytes)
                self._notify()

    def _copy_from(self, shared: SharedMemory, ticks: socket.socket, num_bytes: int) -> None:
        slots = np.ndarray((NUM_SLOTS, self._chunk_bytes), np.uint8, shared.buf)
        for number, begin in enumerate(range(0, num_bytes, self._chunk_bytes)):
            _received(ticks, len(_TICK))
            chunk = self.buffer[begin : min(num_bytes, begin + self._chunk_bytes)]
            np.copyto(chunk, slots[number % NUM_SLOTS, : len(chunk)])
            ticks.sendall(_TICK)


def connect(address: tuple[str, ...], max_bytes: int, chunk_bytes: int) -> RawWire:
    """The end of the source for the `address` of a destination."""
    if address[0] == "tcp":
        return _Tcp(int(address[1]), max_bytes, chunk_bytes)
    return _Shm(address[1], address[2], max_bytes, chunk_bytes)


class _Tcp:
    def __init__(self, port: int, max_bytes: int, chunk_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = np.ones(max_bytes, np.uint8)
        self._chunk_bytes = chunk_bytes

    def send(self, num_bytes: int) -> None:
        self._socket.sendall(_LENGTH.pack(num_bytes))
        whole = self._buffer.data[:num_bytes]
        for begin in range(0, num_bytes, self._chunk_bytes):
            self._socket.sendall(whole[begin : begin + self._chunk_bytes])

    def close(self) -> None:
        self._socket.close()


class _Shm:
    def __init__(self, path: str, name: str, max_bytes: int, chunk_bytes: int) -> None:
        self._ticks = socket.socket(socket.AF_UNIX)
        self._ticks.connect(path)
        self._shared = SharedMemory(name=name)
        self._buffer = np.ones(max_bytes, np.uint8)
        self._chunk_bytes = chunk_bytes

    def send(self, num_bytes: int) -> None:
        self._ticks.sendall(_LENGTH.pack(num_bytes))
        slots = np.ndarray((NUM_SLOTS, self._chunk_bytes), np.uint8, self._shared.buf)
        num_free = NUM_SLOTS
        for number, begin in enumerate(range(0, num_bytes, self._chunk_bytes)):
            if num_free == 0:
                _received(self._ticks, len(_TICK))
                num_free += 1
            chunk = self._buffer[begin : min(num_bytes, begin + self._chunk_bytes)]
            np.copyto(slots[number % NUM_SLOTS, : len(chunk)], chunk)
            num_free -= 1
            self._ticks.sendall(_TICK)
        while num_free < NUM_SLOTS:
            _received(self._ticks, len(_TICK))
            num_free += 1

    def close(self) -> None:
        self._ticks.close()
        self._shared.close()


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """As many bytes, or none if the other end has closed."""
    data = bytearray(num_bytes)
    return bytes(data) if _receive_into(connection, memoryview(data)) else b""


def _receive_into(connection: socket.socket, view: memoryview) -> bool:
    while len(view):
        num_bytes = connection.recv_into(view)
        if num_bytes == 0:
            return False
        view = view[num_bytes:]
    return True
