"""What the programs of this folder do alike with their command line."""

import argparse
import signal
import sys
from collections.abc import Callable

from sterna.errors import SternaError


def ended(act: Callable[[], None]) -> int:
    """Act, and return the process's exit code: what the user can act on is said in one line."""
    try:
        act()
    except SternaError as error:
        print(f"sterna: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def end_like_ctrl_c() -> None:
    """Have SIGTERM end this process as Ctrl-C does, for programs that start servers.

    Whoever is told to end must end its server, too. Shells start what they put into the background
    with Ctrl-C's signal ignored, hence the first line.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def positive(text: str) -> int:
    """A count of one or more, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
