"""TCP as a wire: chunks are sent from one staging buffer into another, behind their frames."""

import socket

import torch

from sterna.transport.memory.staging import make_buffer
from sterna.transport.wires.channel import Slots, SocketAddress, Spares
from sterna.transport.wires.frames import Chunk, FrameStream, Hello


class TcpWire:
    """Connections over TCP between any two hosts."""

    kind = "tcp"

    def __init__(self, host: str, slot_bytes: int, device: torch.device) -> None:
        self._host = host
        self._buffers = Spares(lambda: make_buffer(slot_bytes, device), 2)

    def listen(self) -> tuple[socket.socket, str]:
        return listen_tcp(self._host)

    def resolve(self, address: str) -> tuple[int, SocketAddress]:
        return resolve_tcp(address)

    def sender(self, address: str) -> "_Sender":
        return _Sender(self._buffers.take())

    def receiver(self, stream: FrameStream, hello: Hello) -> "_Receiver":
        return _Receiver(self._buffers.take())

    def prepare(self) -> None:
        self._buffers.refill()

    def close(self) -> None:
        self._buffers.take_all()


def listen_tcp(host: str) -> tuple[socket.socket, str]:
    """A listening socket on a free port of the host's address, and `host:port`."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family, backlog=128)
    shown = f"[{host}]" if ":" in host else host
    return listener, f"{shown}:{listener.getsockname()[1]}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolve_tcp(address: str) -> tuple[int, SocketAddress]:
    """The socket family and address of `host:port`."""
    host, port = split_address(address)
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, where


class _Sender:
    # One slot is enough: the kernel buffers the bytes in flight.
    fds = ()

    def __init__(self, buffer: torch.Tensor) -> None:
        self.slots = Slots([buffer])

    def join(self, stream: FrameStream) -> None:
        pass

    def ship(self, stream: FrameStream, chunk: Chunk) -> bool:
        stream.put(chunk)
        stream.flush(memoryview(self.slots.buffer(chunk.slot, chunk.num_bytes).numpy()))
        return True

    def credited(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Receiver:
    gives_credit = False

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def join(self, stream: FrameStream) -> None:
        pass

    def fetch(self, stream: FrameStream, chunk: Chunk) -> torch.Tensor:
        staged = self._buffer[: chunk.num_bytes]
        stream.read_payload(memoryview(staged.numpy()))
        return staged

    def close(self) -> None:
        pass
