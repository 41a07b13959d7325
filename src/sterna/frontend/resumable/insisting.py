"""What a mailbox refuses to send to another front end is sent later.

A mailbox bounds what it keeps for a peer that does not take it. An answer with a hole in the middle
would be worse than one that pauses, and a client that waits for what was dropped waits for ever.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from sterna.messages.streams import StreamMessage
from sterna.types import FrontendId

AGAIN_S = 1.0
"""So long after a refusal the mailbox is asked again."""

SendTo = Callable[[FrontendId, StreamMessage, Sequence[bytes]], bool]
"""Sends to another front end; False: it lives, and cannot be sent to."""


class Insisting:
    """Sends to other front ends, to each in order. Whoever sends bounds what may wait here."""

    def __init__(self, send_to: SendTo) -> None:
        self._send_to = send_to
        self._refused: dict[FrontendId, deque[tuple[StreamMessage, Sequence[bytes]]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def send(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes] = ()
    ) -> None:
        """Send now, or when the mailbox takes it; whoever is dead by then gets nothing."""
        if frontend_id in self._refused or not self._send_to(frontend_id, message, frames):
            self._refused.setdefault(frontend_id, deque()).append((message, frames))
            self._schedule()

    def close(self) -> None:
        """Send nothing more of what was refused."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._send_again)

    def _send_again(self) -> None:
        self._timer = None
        for frontend_id, refused in list(self._refused.items()):
            while refused and self._send_to(frontend_id, *refused[0]):
                refused.popleft()
            if not refused:
                del self._refused[frontend_id]
        if self._refused:
            self._schedule()
