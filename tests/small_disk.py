"""A file system that is soon full, for processes of tests."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.common.small_disk import fill, on_small_disk
from tests.needed_tools import skip

__all__ = ["fill", "with_small_disk"]


def with_small_disk(folder: Path, size: str, command: Sequence[str]) -> list[str]:
    """Return a command line that runs the command where the folder is a file system of its own, as
    small as this; it goes with the last process that sees it. Skips the test where that cannot be
    (`needed_tools`).

    Args:
        folder: an empty one.
        size: as mount(8) takes it, such as 1m.
    """
    mounted = on_small_disk(folder, size)
    try:
        tried = subprocess.run([*mounted, "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        skip(f"no small disk can be had here: {error}")
    if tried.returncode != 0:
        skip(f"no small disk can be had here: {tried.stderr.strip()}")
    return [*mounted, *command]
