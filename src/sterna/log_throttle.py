"""Rate limit for a repeated log line."""

import time

LOG_INTERVAL_S = 10.0

FILES_ADVICE = "file descriptors are short: see ulimit -n of this process, and fs.file-max"
"""Advice for the user when no file and no socket can be opened."""


class LogThrottle:
    """Lets one log line pass in each `LOG_INTERVAL_S`.

    Args:
        first_after_s: delay of the first line.
    """

    def __init__(self, first_after_s: float = 0.0) -> None:
        self._due_s = time.monotonic() + first_after_s

    def is_due(self) -> bool:
        """Return whether to write the next line; True starts the next interval."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + LOG_INTERVAL_S
        return True
