"""Leaves the memory bus to the engine's steps for part of the time."""

import threading

_MAX_LATENESS_S = 0.002
"""A chunk that began later than it might have, because the thread woke late, shortens the pause
after it by at most this. Timers are as coarse as the copies of small chunks."""


class Pacer:
    """Spaces the bulk chunks of one plane, over all its peers.

    After a chunk that kept the bus busy for t, the bus is left alone for
    `t * (1 - share) / share`.
    """

    def __init__(self, share: float, max_pause_s: float) -> None:
        """
        Args:
            share: fraction of time that bulk copies may take, in (0, 1].
            max_pause_s: longest pause after one chunk, so that a receiver never takes a paced
                transfer for a dead one.
        """
        self._share = share
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._ready_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """How long to wait until the next bulk chunk may begin; 0 when it may begin at once."""
        with self._lock:
            return max(self._ready_s - now_s, 0.0)

    def chunk_done(self, begun_s: float, now_s: float) -> None:
        """Counts a bulk chunk that began at `begun_s` and is through at `now_s`."""
        busy_s = now_s - begun_s
        pause_s = min(busy_s * (1 - self._share) / self._share, self._max_pause_s)
        with self._lock:
            lateness_s = min(max(begun_s - self._ready_s, 0.0), _MAX_LATENESS_S)
            # Pauses of chunks to different peers add up: the bus is one.
            self._ready_s = max(self._ready_s, now_s - lateness_s) + pause_s
