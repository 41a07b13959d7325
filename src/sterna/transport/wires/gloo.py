"""Gloo as a wire: "the Send/Recv primitives", which the paper uses (Section 5).

Each connection has a process group of two. Four properties of Gloo shape this module:

- A receive buffer that is smaller than the message kills the receiving process. The frame that
  announces a chunk carries its size, which the destination checks before it receives.
- A receive whose peer is killed in the middle returns only at its timeout. It waits on a thread
  of its own, while the connection's thread watches the control socket and fails at once.
- After any failure or timeout the pair is closed for good. The connection then ends, and the next
  transfer opens a new one.
- The two sides find each other through a store. A TCPStore's client does a reverse lookup of its
  server's name, which takes five seconds when the name server does not answer, and it is one more
  open port. The control connection serves as the store instead.
"""

import contextlib
import datetime
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.distributed import ProcessGroupGloo, Store

from sterna.errors import TransportError
from sterna.transport.memory.staging import make_buffer
from sterna.transport.wires.channel import Slots, SocketAddress, Spares
from sterna.transport.wires.frames import Chunk, FrameStream, Hello, Meet
from sterna.transport.wires.tcp import listen_tcp, resolve_tcp
from sterna.transport.wires.waiting import Waker, wait

_NUM_SLOTS = 2
_SOURCE, _DESTINATION = 0, 1
_TAG = 0


class GlooWire:
    """Connections over Gloo between any two hosts."""

    kind = "gloo"

    def __init__(self, host: str, slot_bytes: int, device: torch.device, timeout_s: float) -> None:
        self._host = host
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._buffers = Spares(lambda: make_buffer(slot_bytes, device), _NUM_SLOTS + 1)
        self._gloo_device = ProcessGroupGloo.create_device(hostname=host)

    def listen(self) -> tuple[socket.socket, str]:
        return listen_tcp(self._host)

    def resolve(self, address: str) -> tuple[int, SocketAddress]:
        return resolve_tcp(address)

    def sender(self, address: str) -> "_Sender":
        slots = Slots([self._buffers.take() for _ in range(_NUM_SLOTS)])
        return _Sender(slots, _Pair(_SOURCE, self._gloo_device, self._timeout))

    def receiver(self, stream: FrameStream, hello: Hello) -> "_Receiver":
        pair = _Pair(_DESTINATION, self._gloo_device, self._timeout)
        return _Receiver(self._buffers.take(), pair)

    def prepare(self) -> None:
        self._buffers.refill()

    def close(self) -> None:
        self._buffers.take_all()


class _Sender:
    fds = ()

    def __init__(self, slots: Slots, pair: "_Pair") -> None:
        self.slots = slots
        self._pair = pair
        # Sends in progress, by slot; each keeps its buffer alive.
        self._sends: dict[int, torch.distributed.Work] = {}

    def join(self, stream: FrameStream) -> None:
        helper = _Helper()
        try:
            self._pair.meet(stream, helper)
        finally:
            helper.end()

    def ship(self, stream: FrameStream, chunk: Chunk) -> bool:
        stream.put(chunk)
        stream.flush()
        buffer = self.slots.buffer(chunk.slot, chunk.num_bytes)
        with _gloo_errors():
            self._sends[chunk.slot] = self._pair.group.send([buffer], _DESTINATION, _TAG)
        return False

    def credited(self, slot: int) -> None:
        # The destination has all bytes, so this waits only for Gloo's callback.
        with _gloo_errors():
            self._sends.pop(slot).wait(self._pair.timeout)

    def close(self) -> None:
        self._sends.clear()
        self._pair.close()


class _Receiver:
    gives_credit = True

    def __init__(self, buffer: torch.Tensor, pair: "_Pair") -> None:
        self._buffer = buffer
        self._pair = pair
        self._helper = _Helper()

    def join(self, stream: FrameStream) -> None:
        self._pair.meet(stream, self._helper)

    def fetch(self, stream: FrameStream, chunk: Chunk) -> torch.Tensor:
        staged = self._buffer[: chunk.num_bytes]
        with _gloo_errors():
            receive = self._pair.group.recv([staged], _SOURCE, _TAG)
        self._helper.run(lambda: receive.wait(self._pair.timeout), stream)
        return staged

    def close(self) -> None:
        self._helper.end()
        self._pair.close()


class _Pair:
    """One side of a process group of two."""

    def __init__(
        self, rank: int, gloo_device: ProcessGroupGloo.Device, timeout: datetime.timedelta
    ) -> None:
        self.timeout = timeout
        self._rank = rank
        self._gloo_device = gloo_device
        self._group: ProcessGroupGloo | None = None
        self._store: _ControlStore | None = None

    @property
    def group(self) -> ProcessGroupGloo:
        assert self._group is not None, "the pair has not met yet"
        return self._group

    def meet(self, stream: FrameStream, helper: "_Helper") -> None:
        """Forms the group; the peer does the same at the other end of the stream."""
        options = ProcessGroupGloo._Options()
        options._devices = [self._gloo_device]
        options._threads = 1
        options._timeout = self.timeout
        # The group holds only the native half of the store: keep the Python half alive as well.
        store = self._store = _ControlStore(stream)
        self._group = helper.run(lambda: ProcessGroupGloo(store, self._rank, 2, options), stream)

    def close(self) -> None:
        self._group = None
        self._store = None


class _ControlStore(Store):  # type: ignore[misc]
    """Gloo's store, carried by the control connection: each side gets what the other one sets.
    Only `_Pair.meet` uses it, at a time when nothing else reads the stream."""

    def __init__(self, stream: FrameStream) -> None:
        super().__init__()
        self._stream = stream
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = bytes(value)
        self._stream.put(Meet(key, bytes(value)))
        self._stream.flush()

    def get(self, key: str) -> bytes:
        while key not in self._values:
            frame = self._stream.wait_frame()
            if not isinstance(frame, Meet):
                raise TransportError(f"the peer sent {frame} before it could meet over Gloo")
            self._values[frame.key] = frame.value
        return self._values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


_T = TypeVar("_T")


class _Helper:
    """Runs calls that block inside Gloo on a thread of its own. When the peer hangs up, the thread
    is abandoned; it ends at Gloo's own timeout."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._returned = Waker()
        try:
            threading.Thread(target=self._run, name="sterna-kv-gloo", daemon=True).start()
        except RuntimeError:
            self._returned.close()
            raise

    def run(self, call: Callable[[], _T], stream: FrameStream) -> _T:
        """Runs the call and returns its result.

        Raises:
            TransportError: the call failed, or the stream's peer hung up before it returned.
        """
        results: list[_T] = []
        errors: list[Exception] = []

        def attempt() -> None:
            try:
                with _gloo_errors():
                    results.append(call())
            except (OSError, TransportError) as error:
                errors.append(error)
            self._returned.set()

        self._calls.put(attempt)
        while not results and not errors:
            if wait(self._returned, stream, select.POLLRDHUP):
                raise TransportError("the peer closed the connection")
        if errors:
            raise errors[0]
        return results[0]

    def end(self) -> None:
        self._calls.put(None)
        self._returned.close()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call


@contextlib.contextmanager
def _gloo_errors() -> Iterator[None]:
    """Gloo and its store raise plain RuntimeErrors with a long stack behind the first line."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"Gloo failed: {str(error).splitlines()[0]}") from error
