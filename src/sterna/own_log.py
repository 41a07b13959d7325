"""Sterna's own log: a rate limit for a repeated line, and loggers that stay on."""

import logging
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


def keep_loggers() -> None:
    """Turn Sterna's loggers on again after vLLM has applied a logging configuration of the user's
    (`VLLM_LOGGING_CONFIG_PATH`, `--log-config-file`).

    Python turns off each logger that such a file does not name, unless the file says otherwise.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "sterna":
            logger.disabled = False
