"""Processes of one node: identity, state, garbage collection, and an end that is certain."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import ray

from sterna.config import WatchConfig
from sterna.own_log import FILES_ADVICE, LOG_INTERVAL_S, LogThrottle
from sterna.supervisor.failure_detector import FailureDetector, ProcessIdentity, ProcessState

logger = logging.getLogger(__name__)

_ONLY = "the process"

POLL_INTERVAL_S = 0.01
"""Time between two checks whether a killed process has ended."""

COLLECTION_THRESHOLDS = (5_000, 10, 20)
"""As of `gc.set_threshold`; those of Python 3.11 and 3.12 are 700, 10 and 10."""


def collect_garbage_seldom() -> None:
    """Have Python look for garbage less often in this process.

    A front end with hundreds of streams and a scheduler that knows many prefix caches keep many
    objects for long. Python looks through all of them again and again, for up to some hundred
    milliseconds, in which no token and no answer goes out. Nearly all that they drop is freed
    without it.
    """
    gc.set_threshold(*COLLECTION_THRESHOLDS)


def own_identity() -> ProcessIdentity:
    """Return the identity of this process, which is an actor's. Call it when the actor starts: it
    takes a descriptor, and later there may be none left."""
    identity = identity_of(os.getpid(), ray.get_runtime_context().get_node_id())
    assert identity is not None
    return identity


def identity_of(process_id: int, node_id: str = "") -> ProcessIdentity | None:
    """Return the identity of a process of this node; None if there is no such process.

    Raises:
        OSError: it cannot be looked at, for instance because no file can be opened.
    """
    stat = _stat(process_id)
    return None if stat is None else ProcessIdentity(node_id, process_id, stat[1])


def state_of_process(process: ProcessIdentity) -> ProcessState:
    """Return the state of a process of this node. A zombie counts as gone: it will not act
    again."""
    try:
        stat = _stat(process.process_id)
    except OSError:
        return ProcessState.UNSEEN
    if stat is None or stat[1] != process.started_ticks or stat[0] in "ZX":
        return ProcessState.GONE
    # A debugger's stop ("t") is on purpose, and no failure.
    return ProcessState.STOPPED if stat[0] == "T" else ProcessState.RUNNING


class ProcessWatch:
    """Failure detector of one process of this node. The caller calls `why_halted` several times a
    second.

    Args:
        stopped_timeout_s: how long the process may be stopped.
    """

    def __init__(self, process: ProcessIdentity, stopped_timeout_s: float) -> None:
        self._process = process
        self._detector = FailureDetector(WatchConfig(stopped_timeout_s=stopped_timeout_s))
        self._detector.on_joined(_ONLY)
        self._throttle = LogThrottle()

    def why_halted(self) -> str | None:
        """Return, once, the reason why the process counts as lost: it has ended or is stopped."""
        now_s = time.monotonic()
        state = state_of_process(self._process)
        if state is ProcessState.UNSEEN and self._throttle.is_due():
            logger.error(
                "process cannot be looked at, and counts as running pid=%d; %s",
                self._process.process_id,
                FILES_ADVICE,
            )
        self._detector.on_state(_ONLY, state, now_s)
        return next((each.reason for each in self._detector.on_time(now_s)), None)


def watch_of_child(process_id: int, stopped_timeout_s: float) -> ProcessWatch | None:
    """Return a watch of a child process that has not been waited for; None while it cannot be
    looked at."""
    try:
        identity = identity_of(process_id)
    except OSError:
        return None
    # A child has an entry until its parent waits for it.
    assert identity is not None
    return ProcessWatch(identity, stopped_timeout_s)


async def end_process(process: ProcessIdentity) -> None:
    """Kill a process of this node and its descendants; returns when they have ended.

    SIGKILL also ends a stopped process. The call does not return while the kernel keeps the
    process, or while its state cannot be read: a process that may still act must not be taken for
    dead.
    """
    throttle = LogThrottle()
    while (family := _family(process)) is None:
        if throttle.is_due():
            _log_unseen(process)
        await asyncio.sleep(POLL_INTERVAL_S)
    for each in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.process_id, signal.SIGKILL)
    await _until_gone(family)


async def _until_gone(family: Iterable[ProcessIdentity]) -> None:
    throttle = LogThrottle(LOG_INTERVAL_S)
    for process in family:
        while (state := state_of_process(process)) is not ProcessState.GONE:
            await asyncio.sleep(POLL_INTERVAL_S)
            if throttle.is_due():
                if state is ProcessState.UNSEEN:
                    _log_unseen(process)
                else:
                    logger.error("killed process does not end pid=%d", process.process_id)


def _log_unseen(process: ProcessIdentity) -> None:
    logger.error(
        "process that is to end cannot be looked at pid=%d; %s", process.process_id, FILES_ADVICE
    )


def _family(process: ProcessIdentity) -> list[ProcessIdentity] | None:
    """The process, unless it has ended, and its descendants; None if they cannot be looked at."""
    match state_of_process(process):
        case ProcessState.GONE:
            return []
        case ProcessState.UNSEEN:
            return None
    family = [process]
    try:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.process_id).children(recursive=True):
                if (identity := identity_of(child.pid, process.node_id)) is not None:
                    family.append(identity)
    except OSError:
        return None
    return family


def _stat(process_id: int) -> tuple[str, int] | None:
    """The state and start of a process, as in proc(5); None if there is no such process.

    Raises:
        OSError: they cannot be read, which says nothing about the process.
    """
    try:
        content = Path(f"/proc/{process_id}/stat").read_text("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name, which may contain any character.
    fields = content.rpartition(")")[2].split()
    return fields[0], int(fields[19])
