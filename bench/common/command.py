"""Command lines of the benchmarks: exit codes, signals, argument types and progress."""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from sterna.errors import SternaError


def ended(act: Callable[[], None]) -> int:
    """Act, and return the process's exit code; an error for the user is printed in one line."""
    try:
        act()
    except SternaError as error:
        print(f"sterna: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def end_like_ctrl_c() -> None:
    """Make SIGTERM end this process like Ctrl-C, for programs that start servers.

    A program that gets SIGTERM must end its server, too. Shells start background processes with
    Ctrl-C's signal ignored, hence the first line.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def positive(text: str) -> int:
    """A count of one or more, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


class Progress:
    """Prints lines with the time since the beginning, for benchmarks that take many minutes."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._begun_s = time.monotonic()

    def __call__(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begun_s), 60)
        print(f"[{minutes:3}:{seconds:02}] {text}", file=self._stream, flush=True)


def simulation_progress() -> ProgressBar:
    """A bar for many runs."""
    return ProgressBar(
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
