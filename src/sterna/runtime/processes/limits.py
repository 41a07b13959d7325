"""Limits of the machine: room on the disks of a run, the number of open files, main memory."""

import logging
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from sterna.errors import SternaError

LOW_BYTES = 64 << 20
"""Several times the amount that the start of a run, or of an actor, writes."""

LOW_INODES = 1_000
"""A run has some hundred files."""

INTERVAL_S = 1.0

logger = logging.getLogger("sterna.launch")


class NoRoomError(SternaError):
    """A disk has no room for the files of a run; the message names it and says what to do."""


class DiskWatch:
    """Logs when a disk becomes nearly full, while there is still room for the log line, and when
    it has room again. The caller calls `look` often.

    Args:
        folders: folders on the disks to watch.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        # One folder for each file system.
        self._folders = {os.stat(folder).st_dev: folder for folder in folders}
        self._low: set[str] = set()
        self._due_s = 0.0

    def look(self, now_s: float) -> None:
        """Check the disks and log changes, at most once a second."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        for folder in self._folders.values():
            # Two bounds, so that a disk near the limit does not fill the log.
            low_bytes = 2 * LOW_BYTES if folder in self._low else LOW_BYTES
            self._log_change(folder, is_low=_is_low(folder, low_bytes))

    def _log_change(self, folder: str, *, is_low: bool) -> None:
        if is_low and folder not in self._low:
            self._low.add(folder)
            logger.error(
                "disk nearly full: without room lines of the log are lost, and what dies is not "
                "replaced folder=%s",
                folder,
            )
        elif not is_low and folder in self._low:
            self._low.discard(folder)
            logger.info("disk has room again folder=%s", folder)


def check_room(folders: Iterable[str]) -> None:
    """Check that none of the folders, which need not exist yet, is on a disk that is nearly full:
    the start of Ray would hang there for minutes.

    Raises:
        NoRoomError: one of them is.
    """
    for folder in folders:
        if _is_low(folder, LOW_BYTES):
            raise NoRoomError(
                f"the disk of {folder} is nearly full, and the server needs {LOW_BYTES >> 20} MiB "
                "there: make room, or name another folder by TMPDIR, or RAY_TMPDIR"
            )


def _is_low(folder: str, low_bytes: int) -> bool:
    try:
        status = os.statvfs(folder)
    except OSError:
        # The folder does not exist yet, or no longer.
        return False
    # Some file systems do not count files.
    has_inodes = status.f_files == 0 or status.f_favail >= LOW_INODES
    return status.f_bavail * status.f_frsize < low_bytes or not has_inodes


ENOUGH = 65_536
"""Descriptors for tens of thousands of clients; vLLM's own server sets the same limit."""

FEW = 8_192
"""With fewer descriptors clients may be refused, so the start logs a warning."""


def raise_limit() -> None:
    """Raise the limit of open files of this process, and of those that it starts, to `ENOUGH` or
    the hard limit: some hundred clients use up the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FEW:
        logger.warning(
            "few files may be open, each client takes one limit=%d; raise it with ulimit -Hn %d",
            wanted,
            ENOUGH,
        )


class MemoryFiles(NamedTuple):
    """Files about the memory of a container, of one version of control groups.

    Attributes:
        limit: with the memory that it may have.
        used: with the memory that it has, the contents of files that it has read included.
        cached: the lines of `memory.stat` beside it with these contents, which are given up when
            there is no other memory. Files in memory (`/dev/shm`) are not among them.
    """

    limit: str
    used: str
    cached: tuple[str, ...]


MEMORY_FILES = (
    MemoryFiles(
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        cached=("inactive_file", "active_file"),
    ),
    MemoryFiles(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        cached=("total_inactive_file", "total_active_file"),
    ),
)


def available_memory_bytes() -> int:
    """Return the main memory that is free, within the limit of the container."""
    available = int(psutil.virtual_memory().available)
    for files in MEMORY_FILES:
        try:
            limit, used = (Path(path).read_text().strip() for path in (files.limit, files.used))
        except OSError:
            continue
        if limit.isdecimal():
            in_use = max(0, int(used) - _cached_bytes(files))
            available = min(available, max(0, int(limit) - in_use))
    return available


def _cached_bytes(files: MemoryFiles) -> int:
    try:
        lines = Path(files.used).with_name("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return sum(int(values.get(name, 0)) for name in files.cached)
