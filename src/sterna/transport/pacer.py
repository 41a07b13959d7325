"""Pauses between paced chunks, which leave the memory bus to the engine's steps."""

import threading

_MAX_LATENESS_S = 0.002
"""If a chunk begins late because the thread woke late, the pause after it is shortened by the
delay, at most by this. Timers are as coarse as the copies of small chunks."""


class Pacer:
    """Pauses between the paced chunks of one plane, over all its peers.

    After a chunk that kept the bus busy for t, the bus is left alone for
    `t * (1 - share) / share`.
    """

    def __init__(self, share: float, max_pause_s: float) -> None:
        """
        Args:
            share: fraction of time that paced copies may take, in (0, 1].
            max_pause_s: longest pause after one chunk, so that a paced transfer never exceeds
                the receiver's timeout.
        """
        self._share = share
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._ready_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """Time until the next paced chunk may begin; 0 when it may begin at once."""
        with self._lock:
            return max(self._ready_s - now_s, 0.0)

    def chunk_done(self, begun_s: float, now_s: float) -> None:
        """Counts a paced chunk that began at `begun_s` and ended at `now_s`."""
        busy_s = now_s - begun_s
        pause_s = min(busy_s * (1 - self._share) / self._share, self._max_pause_s)
        with self._lock:
            lateness_s = min(max(begun_s - self._ready_s, 0.0), _MAX_LATENESS_S)
            # Pauses of chunks to different peers add up, because they share the bus.
            self._ready_s = max(self._ready_s, now_s - lateness_s) + pause_s
