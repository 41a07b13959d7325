"""Folders of processes' own, for sockets and the like: in that of their run, which goes with it."""

import os
import tempfile

RUN_FOLDER_VARIABLE = "STERNA_RUN_FOLDER"
"""Where all folders of a run are, on the machine that it was started on."""

MEMORY = "/dev/shm"
"""Where files are in memory, if it is there."""


def private_folder(name: str) -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that only this user may enter; it is removed when the caller says so.

    That of a process that is killed before is removed with the run.

    Args:
        name: what it is for; becomes a part of its own name.
    """
    run_folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if run_folder is not None and os.path.isdir(run_folder):
        return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=run_folder)
    return tempfile.TemporaryDirectory(prefix=f"sterna-{name}-")


def memory_folder(run_folder: str) -> str:
    """Return a folder of a run that only this user may enter, in memory: a full disk has no room
    for the pages that are mapped there. Where that cannot be, it is within the run's own."""
    try:
        return tempfile.mkdtemp(prefix="sterna-", dir=MEMORY)
    except OSError:
        return tempfile.mkdtemp(prefix="memory-", dir=run_folder)
