"""Private folders of processes, for sockets and the like: within the folder of their run, and
removed with it."""

import os
import tempfile

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


def memory_folder(run_folder: str) -> str:
    """Return a folder of a run that only this user may enter.

    It is in memory, since a full disk has no room for the pages that are mapped there; without
    such a file system it is within the run's own folder.
    """
    try:
        return tempfile.mkdtemp(prefix="sterna-", dir=MEMORY)
    except OSError:
        return tempfile.mkdtemp(prefix="memory-", dir=run_folder)
