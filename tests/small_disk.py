"""A file system that is soon full, for processes of tests."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

MOUNT = 'mount -t tmpfs -o "size=$1,mode=0700" tmpfs "$2" && shift 2 && exec "$@"'


def with_small_disk(folder: Path, size: str, command: Sequence[str]) -> list[str]:
    """Return a command line that runs the command where the folder is a file system of its own, as
    small as this; it goes with the last process that sees it. Skips the test where that cannot be.

    Args:
        folder: an empty one.
        size: as mount(8) takes it, such as 1m.
    """
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh", size, str(folder)]
    try:
        tried = subprocess.run([*mounted, "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no small disk can be had here: {error}")
    if tried.returncode != 0:
        pytest.skip(f"no small disk can be had here: {tried.stderr.strip()}")
    return [*mounted, *command]


def fill(folder: Path) -> Path:
    """Leave no room in the file system of the folder; returns the file that takes it."""
    filling = folder / "filling"
    with filling.open("wb", buffering=0) as file:
        num_bytes = 1 << 20
        while num_bytes:
            try:
                file.write(bytes(num_bytes))
            except OSError:
                num_bytes //= 2
    return filling
