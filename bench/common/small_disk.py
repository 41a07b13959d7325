"""File systems that are soon full, for processes of tests and benchmarks."""

from pathlib import Path

MOUNT = 'mount -t tmpfs -o "size=$1,mode=$2" tmpfs "$3" && shift 3 && exec "$@"'

PRIVATE, SHARED = "0700", "1777"
"""Modes of a folder: of one user, and as that of temporary files."""


def on_small_disk(folder: Path, size: str, mode: str = PRIVATE) -> list[str]:
    """Return a command that becomes the one that follows it, where the folder is a file system of
    its own, of this size. It goes with the last process that sees it. Needs `unshare`.

    Args:
        folder: an existing one.
        size: as mount(8) takes it, such as 1m.
    """
    namespace = ["unshare", "--map-root-user", "--mount"]
    return [*namespace, "sh", "-c", MOUNT, "sh", size, mode, str(folder)]


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
