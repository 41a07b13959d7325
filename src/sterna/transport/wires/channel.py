"""What the three wires have in common: how bytes of chunks get from one side to the other.

The frames (`frames.py`), the order of chunks and all bookkeeping are the same for every wire; a
channel only moves the bytes of one chunk at a time.
"""

import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from sterna.errors import TransportError
from sterna.transport.wires.frames import Chunk, FrameStream, Hello

SocketAddress = str | tuple[Any, ...]
"""As the socket module wants it for the family."""


class SendChannel(Protocol):
    """The source's end of one connection; for its thread only."""

    @property
    def slots(self) -> "Slots":
        """Where chunks are gathered."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that go to the destination with the Hello."""

    def join(self, stream: FrameStream) -> None:
        """Completes the connection after the destination's Welcome."""

    def ship(self, stream: FrameStream, chunk: Chunk) -> bool:
        """Sends the chunk, whose bytes are in its slot; returns whether the slot is free again
        already. Otherwise a Credit will tell."""

    def credited(self, slot: int) -> None:
        """The destination has taken the slot's bytes."""

    def close(self) -> None:
        """Gives back what the channel holds, after the last call of another method."""


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
        """Gives back what the channel holds, after the last call of another method."""


class Wire(Protocol):
    """One way of carrying bytes, for all connections of a plane. Its methods are for any
    thread."""

    @property
    def kind(self) -> str:
        """The endpoint's scheme."""

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket and its address as it is written in an endpoint."""

    def resolve(self, address: str) -> tuple[int, SocketAddress]:
        """The socket family and the socket address of an address in an endpoint.

        Raises:
            OSError, ValueError: it is none.
        """

    def sender(self, address: str) -> SendChannel:
        """The source's end of a connection to that address."""

    def receiver(self, stream: FrameStream, hello: Hello) -> ReceiveChannel:
        """The destination's end of a connection whose source said hello.

        Raises:
            TransportError: the source did not bring what this wire needs.
        """

    def close(self) -> None:
        """Gives back what the wire holds."""


class Slots:
    """Staging buffers, each either free or on its way to the destination."""

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
        """The slot is free again.

        Raises:
            TransportError: it was not taken.
        """
        if slot in self._free or not 0 <= slot < len(self._buffers):
            raise TransportError(f"the peer gave back slot {slot}, which was not on its way")
        self._free.append(slot)


_T = TypeVar("_T")


class Spares(Generic[_T]):
    """Things that are slow to make, some of them made beforehand. `take` is for any thread."""

    def __init__(self, make: Callable[[], _T], num_spares: int) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spares = [make() for _ in range(num_spares)]

    def take(self) -> _T:
        with self._lock:
            if self._spares:
                return self._spares.pop()
        return self._make()

    def drain(self) -> list[_T]:
        """All that were not taken."""
        with self._lock:
            spares, self._spares = self._spares, []
        return spares
