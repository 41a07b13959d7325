"""Allocated files: the files in which front ends share their metrics, allocated before each write.

prometheus_client maps sparse files. If their file system is full, the first touch of another page
ends the process by SIGBUS: at the next new instance, and again in each successor. Here pages are
allocated before they are touched. A series without room is kept in the process, and not shown,
until there is room.

A process keeps its counts in the files of a *slot*, the lowest one that is free. When it has ended,
the next process takes the slot and goes on with its counts. Each scrape reads all files: they are
those of the processes that live at a time, not of all that ever lived.

docs/internals/parts.md compares a server without this.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Set
from pathlib import Path

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from sterna.folders import lock_file

FIRST_BYTES = 1 << 16
"""The initial size of prometheus_client's files; it doubles the size as needed."""

MOST_BYTES_BESIDE_KEY = 28
"""Bytes of a series: the length of its key, up to 8 bytes of padding, its value and its time."""

RETRY_S = 5.0
"""Time between two attempts to get room: a full disk may answer slowly."""

logger = logging.getLogger(__name__)


def allocate_metrics() -> None:
    """Make prometheus_client keep this process's series in such files; call it before the first
    series."""
    # prometheus_client has no option for it.
    values.MmapedDict = functools.partial(  # type: ignore[assignment, attr-defined]
        _series_file, functools.cache(_take_slot)
    )
    # It would ask the kernel for the process's number with every count, to notice a fork.
    process_id = os.getpid()
    values.ValueClass = values.MultiProcessValue(lambda: process_id)


def _series_file(slot_in: Callable[[str], str], filename: str) -> "SeriesFile":
    """Return the series for which prometheus_client names this file, in a file of the slot.

    Live gauges stay in the file with the process's id, which the supervisor deletes when the
    process has ended (`mark_process_dead`).
    """
    folder, name = os.path.split(filename)
    if name.startswith("gauge_live"):
        return SeriesFile(filename)
    kind, _, _ = name.rpartition("_")
    return SeriesFile(os.path.join(folder, f"{kind}_{slot_in(folder)}.db"))


def _take_slot(folder: str) -> str:
    """Return the lowest slot that is free, and drop the gauges of an earlier process there. The
    slot is free again when this process has ended, since the kernel then releases its lock.

    Where no lock can be had, the process's id stands for a slot.
    """
    slots = map("slot{}".format, itertools.count())
    try:
        slot = next(each for each in slots if lock_file(Path(folder, f"{each}.lock")) is not None)
    except OSError:
        return str(os.getpid())
    for path in Path(folder).glob(f"gauge_*_{slot}.db"):
        try:
            _put_empty(str(path))
        except OSError:
            # A scrape that has just listed the file fails, but none shows its gauges any longer.
            with contextlib.suppress(OSError):
                path.unlink()
    return slot


_files: "list[SeriesFile]" = []
"""Those of this process; prometheus_client does not show its own list."""


def forget_series(label: str, gone: Set[tuple[str, str]]) -> bool:
    """Take these series of this process out of its files, which prometheus_client cannot; returns
    whether there was room for that.

    To be called in the thread that counts: prometheus_client's lock does not cover it.

    Args:
        gone: the metric's name, and the value of the label, of each.
    """
    has_room = True
    for each in _files:
        has_room = each.forget(label, gone) and has_room
    return has_room


class SeriesFile:
    """The series of this process of one kind, with the interface of prometheus_client's
    `MmapedDict`.

    Not thread-safe: prometheus_client has a lock.
    """

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._file: _AllocatedFile | None = None
        self._placed: set[str] = set()
        # None for a series that has not been read yet.
        self._waiting: dict[str, tuple[float, float] | None] = {}
        # What an earlier process had counted of series that were read before they had a place.
        self._earlier: dict[str, float] = {}
        self._retry_at_s: float | None = None
        _files.append(self)

    def read_value(self, key: str) -> tuple[float, float]:
        """Return the value and time of a series; a new one begins with zeros."""
        if (file := self._file_of(key)) is None:
            last = self._waiting[key] = self._waiting[key] or (0.0, 0.0)
            return last
        value, timestamp = file.read_value(key)
        return value - self._earlier.get(key, 0.0), timestamp

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set the value and time of a series."""
        if (file := self._file_of(key)) is None:
            self._waiting[key] = (value, timestamp)
        else:
            file.write_value(key, value + self._earlier.get(key, 0.0), timestamp)

    def forget(self, label: str, gone: Set[tuple[str, str]]) -> bool:
        """Take these series out of the file (`forget_series`): another one replaces it, since
        readers may be reading. Without room for that it stays as it is."""
        leaving = {key for key in (*self._placed, *self._waiting) if _series(key, label) in gone}
        self._waiting = {key: last for key, last in self._waiting.items() if key not in leaving}
        if self._file is None or leaving.isdisjoint(self._placed):
            return True
        staying = self._placed - leaving
        unready = f"{self._filename}.unready"
        with contextlib.suppress(OSError):
            os.unlink(unready)
        try:
            file = _AllocatedFile(unready)
            for key in staying:
                file.read_value(key)
                file.write_value(key, *self._file.read_value(key))
            os.rename(unready, self._filename)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unready)
            return False
        self._file.close()
        self._file, self._placed = file, staying
        self._earlier = {key: each for key, each in self._earlier.items() if key in staying}
        return True

    def close(self) -> None:
        """Unmap the file, which stays."""
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
                # A series of an earlier process in this slot goes on.
                earlier, _ = self._file.read_value(key)
                if (last := self._waiting.pop(key)) is not None:
                    value, timestamp = last
                    self._earlier[key] = earlier
                    self._file.write_value(key, earlier + value, timestamp)
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


def _series(key: str, label: str) -> tuple[str, str | None]:
    """The metric's name and the value of the label, which are in prometheus_client's key."""
    name, _, labels, _ = json.loads(key)
    return name, labels.get(label)


class _AllocatedFile(MmapedDict):
    """A file that grows only by allocated pages.

    Raises:
        OSError: there is no room for the file, or for another series; the existing ones stay.
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
    """Create the file, or allocate all pages of an existing one.

    Raises:
        OSError: there is no room.
    """
    if os.path.exists(filename):
        with open(filename, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(FIRST_BYTES, os.fstat(file.fileno()).st_size))
        return
    _put_empty(filename)


def _put_empty(filename: str) -> None:
    """Put a file without series there, in the place of one that others may be reading.

    Raises:
        OSError: there is no room; what was there stays.
    """
    # Readers of the metrics take a file without a page for a broken one.
    unready = f"{filename}.unready"
    try:
        with open(unready, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, FIRST_BYTES)
        os.rename(unready, filename)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unready)
        raise
