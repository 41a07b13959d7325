"""The files in which front ends show each other their metrics, with a page for all that is written.

prometheus_client maps sparse files. Where their file system is full, the first touch of another
page ends the process by SIGBUS: with the next instance, and in each successor. Here pages are asked
for before they are touched; a series for which there are none is kept in the process, and nobody
sees it, until there are some.
"""

import contextlib
import logging
import os
import time

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

FIRST_BYTES = 1 << 16
"""What prometheus_client begins a file with; it doubles that as needed."""

MOST_BYTES_BESIDE_KEY = 28
"""Of a series: the length of its key, up to 8 bytes of padding, its value and its time."""

RETRY_S = 5.0
"""Pace of asking again for room: a full disk may answer slowly."""

logger = logging.getLogger(__name__)


def allocate_metrics() -> None:
    """Have prometheus_client keep this process's series in such files; comes before the first."""
    # It has no other place where its files could be chosen.
    values.MmapedDict = SeriesFile  # type: ignore[assignment, attr-defined]


class SeriesFile:
    """The series of this process of one kind, as prometheus_client's `MmapedDict` has them.

    Not for several threads at once: prometheus_client has a lock.
    """

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._file: _AllocatedFile | None = None
        self._placed: set[str] = set()
        self._waiting: dict[str, tuple[float, float] | None] = {}
        self._retry_at_s: float | None = None

    def read_value(self, key: str) -> tuple[float, float]:
        """Return the value and time of a series, which begins with this if there is none."""
        if (file := self._file_of(key)) is None:
            return self._waiting[key] or (0.0, 0.0)
        value: tuple[float, float] = file.read_value(key)
        return value

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set the value and time of a series."""
        if (file := self._file_of(key)) is None:
            self._waiting[key] = (value, timestamp)
        else:
            file.write_value(key, value, timestamp)

    def close(self) -> None:
        """Give the mapping back; the file stays."""
        if self._file is not None:
            self._file.close()

    def _file_of(self, key: str) -> "_AllocatedFile | None":
        """Return the file if it has, or gets, a place for the series."""
        if key not in self._placed:
            self._waiting.setdefault(key, None)
            if self._retry_at_s is None or time.monotonic() >= self._retry_at_s:
                self._place_waiting()
        return self._file if key in self._placed else None

    def _place_waiting(self) -> None:
        try:
            if self._file is None:
                self._file = _AllocatedFile(self._filename)
            while self._waiting:
                key = next(iter(self._waiting))
                # One of an earlier process with this id goes on.
                self._file.read_value(key)
                if (last := self._waiting.pop(key)) is not None:
                    self._file.write_value(key, *last)
                self._placed.add(key)
        except OSError as error:
            if self._retry_at_s is None:
                logger.error(
                    "metrics are incomplete, there is no room for them file=%s reason=%s",
                    self._filename,
                    error.strerror,
                )
            self._retry_at_s = time.monotonic() + RETRY_S
        else:
            if self._retry_at_s is not None:
                logger.info("metrics are complete again file=%s", self._filename)
            self._retry_at_s = None


class _AllocatedFile(MmapedDict):
    """A file that grows by pages that are there, or not at all.

    Raises:
        OSError: there is no room, for it or for another series; what it has stays.
    """

    def __init__(self, filename: str) -> None:
        _allocate(filename)
        super().__init__(filename)

    def _init_value(self, key: str) -> None:
        needed = self._used + len(key.encode()) + MOST_BYTES_BESIDE_KEY
        capacity = self._capacity
        while capacity < needed:
            capacity *= 2
        if capacity > self._capacity:
            os.posix_fallocate(self._f.fileno(), 0, capacity)
        super()._init_value(key)


def _allocate(filename: str) -> None:
    """Have the file with all of its pages; raises OSError where it cannot be."""
    if os.path.exists(filename):
        with open(filename, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(FIRST_BYTES, os.fstat(file.fileno()).st_size))
        return
    # Whoever reads the metrics takes a file without a page for a broken one.
    unready = f"{filename}.unready"
    try:
        with open(unready, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, FIRST_BYTES)
        os.rename(unready, filename)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unready)
        raise
