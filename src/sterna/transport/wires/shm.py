"""Shared memory as a wire: chunks are gathered into it on one side and scattered on the other.

Each connection has a ring of slots in an anonymous memory file that the source makes and passes
over a Unix socket. The file has no name, so the kernel frees it when both processes have ended in
any way.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Iterator

import torch

from sterna.errors import TransportError
from sterna.transport.memory.staging import page_lock, page_unlock
from sterna.transport.wires.channel import Slots, SocketAddress, Spares
from sterna.transport.wires.frames import Chunk, FrameStream, Hello, close_fds

_NUM_SLOTS = 4
_MAX_SLOTS = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ShmWire:
    """Connections between processes of one host."""

    kind = "shm"

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes = _round_up(slot_bytes, mmap.PAGESIZE)
        self._device = device
        self._rings = Spares(lambda: _Ring.make(_NUM_SLOTS, self._slot_bytes, device), 1)

    def listen(self) -> tuple[socket.socket, str]:
        # An abstract name (it begins with a zero byte) leaves no file behind.
        address = f"sterna-kv-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + address)
        listener.listen(128)
        return listener, address

    def resolve(self, address: str) -> tuple[int, SocketAddress]:
        return socket.AF_UNIX, "\0" + address

    def sender(self, address: str) -> "_Sender":
        return _Sender(self._rings.take())

    def receiver(self, stream: FrameStream, hello: Hello) -> "_Receiver":
        if not 1 <= hello.num_slots <= _MAX_SLOTS or len(stream.received_fds) != 1:
            raise TransportError("the source sent no ring of shared memory")
        fd = stream.received_fds.pop()
        ring = _Ring.map(fd, hello.num_slots, self._slot_bytes, self._device)
        return _Receiver(ring)

    def prepare(self) -> None:
        self._rings.refill()

    def close(self) -> None:
        for ring in self._rings.take_all():
            ring.close()


class _Ring:
    """Slots in a memory file, mapped. Owns the descriptor."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.fds = [fd]
        # To map all pages at once is much faster than to fault them in one by one.
        mapped = mmap.mmap(fd, num_slots * slot_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # The mapping lives as long as a tensor over it does.
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._device = device
        page_lock(self._memory, device)
        self.slots = list(self._memory.split(slot_bytes))

    @classmethod
    def make(cls, num_slots: int, slot_bytes: int, device: torch.device) -> "_Ring":
        fd = os.memfd_create("sterna-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with _closed_on_error(fd):
            # Access to a page that cannot be allocated would kill the process.
            os.posix_fallocate(fd, 0, num_slots * slot_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, num_slots, slot_bytes, device)

    @classmethod
    def map(cls, fd: int, num_slots: int, slot_bytes: int, device: torch.device) -> "_Ring":
        """
        Raises:
            TransportError: the file is not a ring of that size, or its maker could still shrink
                it, which would kill the process that reads it.
        """
        with _closed_on_error(fd):
            try:
                is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:
                is_sealed = False
            size = os.fstat(fd).st_size
            if not is_sealed or size != num_slots * slot_bytes:
                raise TransportError(
                    f"the source's ring has {size} bytes, not {num_slots} slots of {slot_bytes}, "
                    "or is no sealed memory file"
                )
            return cls(fd, num_slots, slot_bytes, device)

    def close(self) -> None:
        page_unlock(self._memory, self._device)
        close_fds(self.fds)


class _Sender:
    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self.slots = Slots(ring.slots)

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self._ring.fds)

    def join(self, stream: FrameStream) -> None:
        # The destination has mapped the file; each mapping has a descriptor of its own.
        close_fds(self._ring.fds)

    def ship(self, stream: FrameStream, chunk: Chunk) -> bool:
        stream.put(chunk)
        stream.flush()
        return False

    def credited(self, slot: int) -> None:
        pass

    def close(self) -> None:
        self._ring.close()


class _Receiver:
    gives_credit = True

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        close_fds(ring.fds)

    def join(self, stream: FrameStream) -> None:
        pass

    def fetch(self, stream: FrameStream, chunk: Chunk) -> torch.Tensor:
        if not 0 <= chunk.slot < len(self._ring.slots):
            raise TransportError(f"the source named slot {chunk.slot}, which does not exist")
        return self._ring.slots[chunk.slot][: chunk.num_bytes]

    def close(self) -> None:
        self._ring.close()


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
