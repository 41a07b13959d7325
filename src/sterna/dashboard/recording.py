"""Recordings: files with the frames of a simulation, for `sterna replay`.

A recording is gzipped text, one JSON object a line: `{"sterna_recording": 1}`, the stream's header,
and its frames (`cluster_frames`).
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sterna.dashboard.cluster_frames import Frame
from sterna.errors import ConfigurationError

VERSION = 1
"""Of the format; a reader knows no other."""

FIRST_LINE = "sterna_recording"


def write(path: Path, header: Frame, frames: Iterable[Frame]) -> None:
    """Write a recording.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
            for each in ({FIRST_LINE: VERSION}, header):
                file.write(_line(each))
            file.writelines(map(_line, frames))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def read(path: Path) -> Iterator[Frame]:
    """Yield the header of a recording, then its frames.

    Raises:
        ConfigurationError: the file cannot be read, or is no recording of this version.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            version = _parsed(file.readline()).get(FIRST_LINE)
            if version != VERSION:
                raise ConfigurationError(_not_a_recording(path))
            yield _parsed(file.readline(), "title", "classes", "names")
            for line in file:
                yield _parsed(line, "t", "instances", "names")
    except OSError as error:
        reason = _not_a_recording(path) if error.errno is None else error.strerror
        raise ConfigurationError(f"{path}: {reason}") from None
    except (EOFError, zlib.error, ValueError):
        raise ConfigurationError(f"{path} is incomplete or damaged; record it again") from None


def _not_a_recording(path: Path) -> str:
    return f"{path} is no recording of this version: make one with sterna simulate --record {path}"


def _line(value: Frame) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"


def _parsed(line: str, *names: str) -> dict[str, Any]:
    """Raises ValueError: the line is no JSON object, or lacks one of these fields."""
    value = json.loads(line)
    if not isinstance(value, dict) or not value.keys() >= set(names):
        raise ValueError(f"no object with {', '.join(names)}")
    return value
