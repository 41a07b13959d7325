"""The transfers in flight of one plane, and the single way in which each of them ends.

A transfer's blocks may be touched only between `enter` and `leave`, which bracket one chunk.
An end of a transfer (the last chunk, a dead peer, a deadline, `stop`) takes effect at once for
all later brackets, and its event is sent when the open bracket is closed. So the blocks are no
longer read or written once the owner gets the event, and the event never waits for a socket.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from sterna.errors import ProtocolError, TransportError
from sterna.transport.data_plane import (
    Notify,
    PlaneEvent,
    ReceiveFailed,
    SendFailed,
    Stopped,
    Transfer,
)
from sterna.transport.wires.waiting import Waker
from sterna.types import MigrationId

_logger = logging.getLogger(__name__)

_STOPPED = "the migration was stopped"
_CLOSED = "the data plane was closed"


class Side(Enum):
    SOURCE = "source"
    DESTINATION = "destination"


@dataclass(eq=False, slots=True)
class Copy:
    """One side of a transfer in flight.

    Attributes:
        block_ids: int64[num_blocks] for each KV cache group.
        block_bytes: bytes of a block, for each group.
        fence: work that the engine must finish before the blocks may be touched.
        begun_s: when it was submitted (source) or its sender began (destination).
        deadline_s: when it fails, unless it ends or is extended before; None while nothing is due
            from the peer.
        over: the reason of its end, or None while it is alive.
        waker: wakes the thread that works on it when the copy ends.
    """

    side: Side
    transfer: Transfer
    block_ids: tuple[torch.Tensor, ...]
    block_bytes: tuple[int, ...]
    fence: "torch.cuda.Event | None"
    is_paced: bool
    begun_s: float
    deadline_s: float | None
    over: str | None = None
    waker: Waker | None = None
    _is_entered: bool = False
    _event: PlaneEvent | None = None

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group."""
        return tuple(len(each) for each in self.block_ids)

    @property
    def copy_bytes(self) -> int:
        """Bytes of all blocks."""
        return _num_bytes(self.num_blocks, self.block_bytes)


def _num_bytes(num_blocks: Sequence[int], block_bytes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True))


def _counts(num_blocks: Sequence[int]) -> str:
    return "+".join(map(str, num_blocks))


@dataclass(eq=False, slots=True)
class _Stop:
    migration_id: MigrationId
    entered: set[Copy]


class Ledger:
    """All copies of a plane, and the thread that notifies the plane's owner of their ends."""

    def __init__(self, notify: Notify, timeout_s: float) -> None:
        self._notify = notify
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._copies: dict[tuple[Side, Transfer], Copy] = {}
        self._stops: list[_Stop] = []
        self._is_closed = False
        # None makes the thread check its state: there are copies to watch, or the ledger is closed.
        self._events: queue.SimpleQueue[PlaneEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sterna-kv-notify", daemon=True)
        self._thread.start()

    def add(self, copy: Copy) -> None:
        """Adds a copy.

        Raises:
            ProtocolError: the same transfer is in flight on this side.
            TransportError: the plane is closed.
        """
        key = (copy.side, copy.transfer)
        with self._lock:
            if self._is_closed:
                raise TransportError(f"{_CLOSED}; nothing can be copied")
            if key in self._copies:
                raise ProtocolError(f"{copy.transfer} is already in flight on its {key[0].value}")
            self._copies[key] = copy
            if len(self._copies) == 1:
                self._events.put(None)

    def claim(
        self, transfer: Transfer, num_blocks: Sequence[int], copy_bytes: int, waker: Waker
    ) -> Copy | str:
        """The destination's side of a transfer that its source has begun, or why there is none.

        The source may send fewer blocks of a group than are expected: they go to the first ones. A
        refusal changes nothing. Otherwise the deadline starts again.
        """
        with self._lock:
            copy = self._copies.get((Side.DESTINATION, transfer))
            if copy is None or copy.over is not None:
                return "this transfer is not expected"
            if copy.waker is not None:
                return "this transfer is being received already"
            expected = copy.num_blocks
            if (
                len(num_blocks) != len(expected)
                or any(not 0 <= n <= most for n, most in zip(num_blocks, expected, strict=True))
                or copy_bytes != _num_bytes(num_blocks, copy.block_bytes)
            ):
                return (
                    f"{_counts(expected)} blocks of {copy.copy_bytes} bytes in all are expected, "
                    f"not {_counts(num_blocks)} of {copy_bytes}"
                )
            # A last stage is reserved with room to grow and may have fewer blocks.
            copy.block_ids = tuple(
                ids[:n] for ids, n in zip(copy.block_ids, num_blocks, strict=True)
            )
            copy.waker = waker
            copy.begun_s = time.monotonic()
            copy.deadline_s = copy.begun_s + self._timeout_s
            return copy

    def enter(self, copy: Copy) -> bool:
        """Whether the copy is alive and its blocks may be touched, until `leave`."""
        with self._lock:
            copy._is_entered = copy.over is None
            return copy._is_entered

    def leave(self, copy: Copy) -> None:
        """Closes the bracket that an `enter` opened by returning True."""
        with self._lock:
            copy._is_entered = False
            if copy.over is None:
                return
            self._remove(copy)
            for stop in list(self._stops):
                stop.entered.discard(copy)
                if not stop.entered:
                    self._stops.remove(stop)
                    self._events.put(Stopped(stop.migration_id))

    def extend_deadline(self, copy: Copy) -> None:
        """Starts the timeout of the copy again."""
        copy.deadline_s = time.monotonic() + self._timeout_s

    def end(self, copy: Copy, event: PlaneEvent) -> bool:
        """Ends the copy with the event unless it is already over; returns whether it did."""
        with self._lock:
            if copy.over is not None:
                return False
            reason = event.reason if isinstance(event, SendFailed | ReceiveFailed) else "it is done"
            self._end(copy, event, reason)
            return True

    def fail(self, copy: Copy, reason: str) -> None:
        """Ends the copy with its side's failure unless it is already over."""
        failed = SendFailed if copy.side is Side.SOURCE else ReceiveFailed
        self.end(copy, failed(copy.transfer, reason))

    def stop(self, migration_id: MigrationId) -> None:
        """Ends all copies of the migration without their events, then sends Stopped."""
        with self._lock:
            entered = set()
            for copy in list(self._copies.values()):
                if copy.transfer.migration_id == migration_id:
                    # An event that waits for the end of a chunk is not sent.
                    copy._event = None
                    if copy._is_entered:
                        entered.add(copy)
                    if copy.over is None:
                        self._end(copy, None, _STOPPED)
            if entered:
                self._stops.append(_Stop(migration_id, entered))
            elif not self._is_closed:
                self._events.put(Stopped(migration_id))

    def close(self) -> None:
        """Ends all copies without events, and the thread; `join` waits for it."""
        with self._lock:
            self._is_closed = True
            self._stops.clear()
            for copy in list(self._copies.values()):
                copy._event = None
                if copy.over is None:
                    self._end(copy, None, _CLOSED)
            self._events.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits until the last call of `notify` has returned. Called from `notify` itself, returns
        at once."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _end(self, copy: Copy, event: PlaneEvent | None, reason: str) -> None:
        copy.over = reason
        copy._event = event
        if not copy._is_entered:
            self._remove(copy)
        if copy.waker is not None:
            copy.waker.set()

    def _remove(self, copy: Copy) -> None:
        del self._copies[copy.side, copy.transfer]
        if copy._event is not None:
            self._events.put(copy._event)

    def _run(self) -> None:
        # Deadlines need no exact check: copies are to fail after about a timeout.
        period_s = self._timeout_s / 4
        checked_s = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=period_s if self._copies else None)
            except queue.Empty:
                event = None
            if self._is_closed:
                return
            # Events of other copies may come all the time.
            if event is None or time.monotonic() >= checked_s + period_s:
                self._fail_overdue()
                checked_s = time.monotonic()
            if event is None:
                continue
            try:
                self._notify(event)
            except Exception:
                _logger.exception("the owner of the data plane failed on event=%s", event)

    def _fail_overdue(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            overdue = [
                copy
                for copy in self._copies.values()
                if copy.deadline_s is not None and copy.deadline_s < now_s
            ]
        for copy in overdue:
            is_expected = copy.side is Side.DESTINATION and copy.waker is None
            late = "its source did not begin it in time"
            self.fail(copy, late if is_expected else f"no progress for {self._timeout_s:g} s")
