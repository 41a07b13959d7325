"""What lasts is told of once in a while, not every time that it is met."""

import time

COMPLAINT_INTERVAL_S = 10.0

FILES_ADVICE = "file descriptors are short: see ulimit -n of this process, and fs.file-max"
"""What to do where no file, and no socket, can be opened."""


class LogThrottle:
    """When the log is to have a line of something that lasts.

    Args:
        first_after_s: until the first one.
    """

    def __init__(self, first_after_s: float = 0.0) -> None:
        self._due_s = time.monotonic() + first_after_s

    def is_due(self) -> bool:
        """Say whether it is time for the next line, which is then taken for written."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + COMPLAINT_INTERVAL_S
        return True
