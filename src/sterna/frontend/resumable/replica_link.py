"""What a front end tells the one that keeps its replicas, and how much of it that has. Pure.

Messages are numbered. The other one, the *buddy*, confirms numbers, and what it has confirmed it
has. One that confirms nothing for `patience_s` is not waited for until it has caught up.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sterna.messages.streams import ExtendStreams, Group, ReplicaMessage
from sterna.types import FrontendId


@dataclass(frozen=True, slots=True)
class ToBuddy:
    """Send this to the other front end."""

    buddy: FrontendId
    message: ReplicaMessage
    frames: list[bytes]


class ReplicaLink:
    """The way from one front end to its buddy."""

    def __init__(self, frontend_id: FrontendId, patience_s: float) -> None:
        self._frontend_id = frontend_id
        self._patience_s = patience_s
        self._buddy: FrontendId | None = None
        self._number = 0
        self._confirmed = 0
        # Messages that were not confirmed, and when they were sent.
        self._unconfirmed: deque[tuple[int, float]] = deque()
        self._is_slow = False
        # Outputs that go into one message.
        self._outgoing: list[tuple[Group, bytes]] = []
        self._effects: list[ToBuddy] = []

    @property
    def buddy(self) -> FrontendId | None:
        """Who has the replicas."""
        return self._buddy

    @property
    def next_deadline_s(self) -> float | None:
        """When `flush` is due although nothing has happened; None while nothing is waited for."""
        if self._is_slow or not self._unconfirmed:
            return None
        return self._unconfirmed[0][1] + self._patience_s

    def on_buddy(self, buddy: FrontendId | None) -> None:
        """This one has the replicas from now on; it is to be told everything."""
        self._outgoing.clear()
        self._unconfirmed.clear()
        self._buddy, self._confirmed, self._is_slow = buddy, self._number, False

    def extend(self, group: Group, payload: bytes) -> int:
        """Tell of an output; returns the number to wait for, 0 where there is nobody."""
        if self._buddy is None:
            return 0
        self._outgoing.append((group, payload))
        return self._number + 1

    def tell(
        self, message: Callable[[int], ReplicaMessage], frames: list[bytes], now_s: float
    ) -> int:
        """Send the message of this number; returns the number to wait for, 0 where there is
        nobody. All outputs so far are sent before."""
        self._send_outgoing(now_s)
        return self._send(message, frames, now_s)

    def on_kept(self, sender: FrontendId, number: int, now_s: float) -> bool:
        """A front end has all up to the message of this number; returns whether that is news."""
        if sender != self._buddy or number <= self._confirmed:
            return False
        self._confirmed = number
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            self._unconfirmed.popleft()
        self._is_slow = self._is_slow and self._is_late(now_s)
        return True

    def is_waited_for(self, number: int) -> bool:
        """Whether the buddy must still confirm the message of this number."""
        return number > self._confirmed and not self._is_slow

    def flush(self, now_s: float) -> tuple[list[ToBuddy], bool]:
        """Return what is to be sent, and whether the buddy is from now on not waited for."""
        self._send_outgoing(now_s)
        has_become_slow = not self._is_slow and self._is_late(now_s)
        self._is_slow = self._is_slow or has_become_slow
        effects, self._effects = self._effects, []
        return effects, has_become_slow

    def _is_late(self, now_s: float) -> bool:
        return bool(self._unconfirmed) and self._unconfirmed[0][1] + self._patience_s <= now_s

    def _send_outgoing(self, now_s: float) -> None:
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            groups = tuple(group for group, _ in outgoing)
            payloads = [payload for _, payload in outgoing]
            self._send(lambda n: ExtendStreams(self._frontend_id, n, groups), payloads, now_s)

    def _send(
        self, message: Callable[[int], ReplicaMessage], frames: list[bytes], now_s: float
    ) -> int:
        if self._buddy is None:
            return 0
        self._number += 1
        self._unconfirmed.append((self._number, now_s))
        self._effects.append(ToBuddy(self._buddy, message(self._number), frames))
        return self._number
