"""The code that runs while a scenario is played."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def folders_called(package: str) -> Iterator[dict[str, int]]:
    """Yield how many calls of functions in each folder of the package, from its root, there have
    been in this thread; complete at the end."""
    num_calls: dict[str, int] = {}
    root = f"/{package}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and root in frame.f_code.co_filename:
            folder = frame.f_code.co_filename.rpartition(root)[2].rpartition("/")[0]
            num_calls[folder] = num_calls.get(folder, 0) + 1

    sys.setprofile(note)
    try:
        yield num_calls
    finally:
        sys.setprofile(None)
