"""Waiting for a socket and for other threads at once."""

import os
import select
import threading
from typing import Protocol


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class Waker:
    """Wakes the one thread that waits with it. `set` is for any thread and never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        assert self._fd is not None
        return self._fd

    def set(self) -> None:
        """Ends the current wait, or the next one."""
        # The lock keeps a late call from writing into a descriptor that was closed and reused.
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Undoes the calls of `set` so far."""
        try:
            os.eventfd_read(self.fileno())
        except BlockingIOError:
            # Nothing was set.
            return

    def close(self) -> None:
        """Closes the descriptor; `set` does nothing from then on."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def wait(
    waker: Waker,
    peer: _HasFileno | None = None,
    events: int = select.POLLIN,
    timeout_s: float | None = None,
) -> bool:
    """Waits until the waker is set, the peer has one of the events or a hang-up, or the time
    is over. Clears the waker.

    Returns: whether the peer has an event.
    """
    poll = select.poll()
    poll.register(waker, select.POLLIN)
    if peer is not None:
        poll.register(peer, events)
    shown = poll.poll(None if timeout_s is None else timeout_s * 1000)
    waker_fd = waker.fileno()
    if any(fd == waker_fd for fd, _ in shown):
        waker.clear()
    return any(fd != waker_fd for fd, _ in shown)
