"""How many files and connections a run's processes may have open."""

import logging
import resource

logger = logging.getLogger(__name__)

ENOUGH = 65_536
"""Descriptors for tens of thousands of clients; also what vLLM's own server asks for."""

FEW = 8_192
"""With fewer, clients may be turned away: worth a word at the start."""


def raise_limit() -> None:
    """Let this process, and what it starts, open as many files as it may; the usual 1,024 are used
    up by some hundred clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FEW:
        logger.warning(
            "few files may be open, each client takes one limit=%d; raise it with ulimit -Hn %d",
            wanted,
            ENOUGH,
        )
