"""Stacks of running processes, as py-spy sees them."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sterna.errors import ConfigurationError

RATE = 250
"""Samples a second."""


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
    process: its frames from the outermost on, separated by semicolons, and the number of samples.

    Raises:
        ConfigurationError: a process could not be recorded; the message has py-spy's own words.
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
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, pid in pids.items()
        ]
        try:
            yield found
            said = [each.communicate()[1] for each in spying]
        finally:
            for each in spying:
                each.kill()
                each.wait()
        for (name, path), words in zip(paths.items(), said, strict=True):
            if not path.is_file():
                raise ConfigurationError(f"py-spy has not recorded the {name}: {words.strip()}")
            found[name] = path.read_text().splitlines()
