"""Stacks of running processes, as py-spy sees them."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sterna.errors import ConfigurationError

RATE = 250
"""Looks a second."""


def program() -> str | None:
    """The path of py-spy; None where it is not installed."""
    return shutil.which("py-spy")


def needed_program() -> str:
    """The path of py-spy.

    Raises:
        ConfigurationError: it is not installed.
    """
    found = program()
    if found is None:
        raise ConfigurationError("this needs py-spy on the path: pip install py-spy")
    return found


@contextlib.contextmanager
def recording(spy: str, pids: Mapping[str, int], duration_s: int) -> Iterator[dict[str, list[str]]]:
    """Record the stacks of these processes that hold the interpreter's lock.

    Yields a dictionary that has, after the context and not before `duration_s`, the lines of each
    process: its frames from the outermost on, separated by semicolons, and how often they were
    seen. A process that could not be recorded has no lines.
    """
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in pids}
        spying = [
            subprocess.Popen(
                [
                    *(spy, "record", "--pid", str(pid), "--duration", str(duration_s)),
                    *("--rate", str(RATE), "--format", "raw", "--gil"),
                    *("--output", str(paths[name])),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name, pid in pids.items()
        ]
        try:
            yield found
            for each in spying:
                each.wait()
        finally:
            for each in spying:
                each.kill()
                each.wait()
        for name, path in paths.items():
            found[name] = path.read_text().splitlines() if path.is_file() else []
