"""The timer of an emulated engine's steps, which wakes its loop a few tenths of a millisecond late.

An asyncio loop waits for whole milliseconds, so that its own timers are late by one of them. A real
engine waits in its step, and goes on at once when that ends. The kernel's timers (timerfd) are
exact, and readable like a socket.
"""

import asyncio
import ctypes
import errno
import os
import time
from collections.abc import Callable

CLOSE_ON_EXEC_AND_NONBLOCKING = os.O_CLOEXEC | os.O_NONBLOCK
ABSOLUTE = 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class StepTimer:
    """Calls `on_due`, on the loop, once the last deadline that was set has come.

    Raises:
        OSError: no file descriptor is left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = _checked(
            self._libc.timerfd_create(time.CLOCK_MONOTONIC, CLOSE_ON_EXEC_AND_NONBLOCKING)
        )
        self.is_set = False
        try:
            loop.add_reader(self._descriptor, self._on_readable)
        except BaseException:
            os.close(self._descriptor)
            raise

    def set(self, deadline_s: float) -> None:
        """Call when `time.monotonic()` is this; at once if it is later. The deadline before is
        forgotten if it has not come."""
        # Never early.
        seconds, nanoseconds = divmod(max(0, int(deadline_s * 1e9)) + 1, 10**9)
        setting = _Setting(_Time(0, 0), _Time(seconds, nanoseconds))
        _checked(
            self._libc.timerfd_settime(self._descriptor, ABSOLUTE, ctypes.byref(setting), None)
        )
        self.is_set = True

    def close(self) -> None:
        """Call no more."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        self._descriptor, self.is_set = -1, False

    def _on_readable(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            # Another deadline has been set since.
            return
        self.is_set = False
        self._on_due()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, os.strerror(number))
    return result
