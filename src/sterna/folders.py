"""Private folders of processes, for sockets and the like: within the folder of their run, and
removed with it, or for all runs of a user."""

import fcntl
import os
import stat
import tempfile
from pathlib import Path

RUN_FOLDER_VARIABLE = "STERNA_RUN_FOLDER"
"""Names the folder of a run, which contains all its other folders, on its home node."""

MEMORY = "/dev/shm"
"""A file system in memory, on most machines."""


def private_folder(name: str) -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that only this user may enter; the caller removes it.

    If the caller is killed first, the folder is removed with that of the run.

    Args:
        name: its purpose, which becomes a part of the folder's name.
    """
    run_folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if run_folder is not None and os.path.isdir(run_folder):
        return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=run_folder)
    return tempfile.TemporaryDirectory(prefix=f"sterna-{name}-")


def users_folder(name: str, parent: Path | None = None) -> Path:
    """Return a folder of this user's for all runs, which no other user may enter; it stays.

    Args:
        name: its purpose, which becomes a part of the folder's name.
        parent: where it is; by default in the temporary folder.

    Raises:
        PermissionError: it belongs to another user, who may have made it on purpose.
        OSError: it cannot be made.
    """
    folder = users_path(name, parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        # As Ray makes it where this machine joined another server before.
        folder.chmod(0o700)
    return folder


def users_path(name: str, parent: Path | None = None) -> Path:
    """Return the path of `users_folder`, which need not exist."""
    return (parent or Path(tempfile.gettempdir())) / f"sterna-{name}-{os.getuid()}"


def lock_file(path: Path, *, is_shared: bool = False) -> int | None:
    """Return a descriptor of the file that holds its lock until it is closed, or its process ends;
    None if another one has the lock.

    Args:
        is_shared: several may hold it at a time, but none alone.

    Raises:
        OSError: the file cannot be made or locked.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


def memory_folder(run_folder: str) -> str:
    """Return a folder of a run that only this user may enter.

    It is in memory, since a full disk has no room for the pages that are mapped there; without
    such a file system it is within the run's own folder.
    """
    try:
        return tempfile.mkdtemp(prefix="sterna-", dir=MEMORY)
    except OSError:
        return tempfile.mkdtemp(prefix="memory-", dir=run_folder)
