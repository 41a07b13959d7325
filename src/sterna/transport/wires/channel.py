"""Channel: the interface of the three wires, which moves the bytes of one chunk at a time.

The frames (`frames.py`), the order of chunks and all bookkeeping are the same for every wire.
"""

import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from sterna.errors import TransportError
from sterna.transport.wires.frames import Chunk, FrameStream, Hello

SocketAddress = str | tuple[Any, ...]
"""An address in the form that the socket module takes for its family."""


class SendChannel(Protocol):
    """The source's end of one connection; for its thread only."""

    @property
    def slots(self) -> "Slots":
        """The buffers into which chunks are gathered."""

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that are sent with the Hello."""

    def join(self, stream: FrameStream) -> None:
        """Completes the connection after the destination's Welcome."""

    def ship(self, stream: FrameStream, chunk: Chunk) -> bool:
        """Sends the chunk, whose bytes are in its slot; returns whether the slot is already free
        again. Otherwise a Credit frees it."""

    def credited(self, slot: int) -> None:
        """Called when the destination has read the slot's bytes."""

    def close(self) -> None:
        """Releases the channel's resources, after the last call of another method."""


class ReceiveChannel(Protocol):
    """The destination's end of one connection; for its thread only."""

    @property
    def gives_credit(self) -> bool:
        """Whether the source waits for a Credit before it uses a slot again."""

    def join(self, stream: FrameStream) -> None:
        """Completes the connection after the Welcome was sent."""

    def fetch(self, stream: FrameStream, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes, uint8[chunk.num_bytes], valid until the Credit or the next fetch."""

    def close(self) -> None:
        """Releases the channel's resources, after the last call of another method."""


class Wire(Protocol):
    """One way to carry bytes, for all connections of a plane. Its methods may be called from any
    thread."""

    @property
    def kind(self) -> str:
        """The endpoint's scheme."""

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket, and its address as written in an endpoint."""

    def resolve(self, address: str) -> tuple[int, SocketAddress]:
        """The socket family and the socket address of an address in an endpoint.

        Raises:
            OSError, ValueError: the address is not valid.
        """

    def sender(self, address: str) -> SendChannel:
        """The source's end of a connection to that address."""

    def receiver(self, stream: FrameStream, hello: Hello) -> ReceiveChannel:
        """The destination's end of a connection whose source sent `hello`.

        Raises:
            TransportError: the source did not send what this wire needs.
        """

    def prepare(self) -> None:
        """Makes what the next connection needs, if it is not there: that may take long."""

    def close(self) -> None:
        """Releases the wire's resources."""


class Slots:
    """Staging buffers, each either free or being sent."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._free = list(range(len(buffers)))

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def num_taken(self) -> int:
        return len(self._buffers) - len(self._free)

    def buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        """uint8[num_bytes], the start of the slot."""
        return self._buffers[slot][:num_bytes]

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Marks the slot as free.

        Raises:
            TransportError: it was not taken.
        """
        if slot in self._free or not 0 <= slot < len(self._buffers):
            raise TransportError(f"the peer gave back slot {slot}, which was not on its way")
        self._free.append(slot)


_T = TypeVar("_T")


class Spares(Generic[_T]):
    """Stock of objects that are slow to make, `num_spares` of them made beforehand. `take` may be
    called from any thread."""

    def __init__(self, make: Callable[[], _T], num_spares: int) -> None:
        self._make = make
        self._num_spares = num_spares
        self._lock = threading.Lock()
        self._spares = [make() for _ in range(num_spares)]

    def take(self) -> _T:
        with self._lock:
            if self._spares:
                return self._spares.pop()
        return self._make()

    def refill(self) -> None:
        """Make as many as there were at first; no effect after `take_all`."""
        with self._lock:
            while len(self._spares) < self._num_spares:
                self._spares.append(self._make())

    def take_all(self) -> list[_T]:
        """All objects that were not taken; none is made beforehand any longer."""
        with self._lock:
            self._num_spares = 0
            spares, self._spares = self._spares, []
        return spares
