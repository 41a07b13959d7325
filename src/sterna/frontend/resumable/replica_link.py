"""Replica link: the messages from a front end to the one that keeps its replicas. Pure.

Messages are numbered. The other front end, the *buddy*, confirms the highest number that it has. If
it confirms nothing for `timeout_s`, outputs do not wait for it until it has caught up.
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
    """The link from one front end to its buddy.

    Args:
        timeout_s: a buddy that leaves a message unconfirmed for this time is slow.
    """

    def __init__(self, frontend_id: FrontendId, timeout_s: float) -> None:
        self._frontend_id = frontend_id
        self._timeout_s = timeout_s
        self._buddy: FrontendId | None = None
        self._number = 0
        self._confirmed = 0
        # Unconfirmed messages, with the times at which they were sent.
        self._unconfirmed: deque[tuple[int, float]] = deque()
        self._is_slow = False
        # Outputs for the next message.
        self._outputs: list[tuple[Group, bytes]] = []
        self._effects: list[ToBuddy] = []

    @property
    def buddy(self) -> FrontendId | None:
        """The front end that has the replicas."""
        return self._buddy

    @property
    def next_deadline_s(self) -> float | None:
        """When `flush` is due without another event; None while no confirmation is awaited."""
        if self._is_slow or not self._unconfirmed:
            return None
        return self._unconfirmed[0][1] + self._timeout_s

    def on_buddy(self, buddy: FrontendId | None) -> None:
        """This front end has the replicas from now on; the caller sends it all records."""
        self._outputs.clear()
        self._unconfirmed.clear()
        self._buddy, self._confirmed, self._is_slow = buddy, self._number, False

    def extend(self, group: Group, payload: bytes) -> int:
        """Add an output to the next message; returns the number to wait for, 0 without a buddy."""
        if self._buddy is None:
            return 0
        self._outputs.append((group, payload))
        return self._number + 1

    def send(
        self, message: Callable[[int], ReplicaMessage], frames: list[bytes], now_s: float
    ) -> int:
        """Send a message, after all outputs so far; returns the number to wait for, 0 without a
        buddy.

        Args:
            message: makes the message for its number.
        """
        self._send_outputs(now_s)
        return self._enqueue(message, frames, now_s)

    def on_kept(self, sender: FrontendId, number: int, now_s: float) -> bool:
        """A front end has all messages up to this number; returns whether that is news."""
        if sender != self._buddy or number <= self._confirmed:
            return False
        self._confirmed = number
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            self._unconfirmed.popleft()
        self._is_slow = self._is_slow and self._is_late(now_s)
        return True

    def is_waited_for(self, number: int) -> bool:
        """Whether outputs wait until the buddy confirms the message of this number."""
        return number > self._confirmed and not self._is_slow

    def flush(self, now_s: float) -> tuple[list[ToBuddy], bool]:
        """Return the messages to send, and whether the buddy has just become slow."""
        self._send_outputs(now_s)
        has_become_slow = not self._is_slow and self._is_late(now_s)
        self._is_slow = self._is_slow or has_become_slow
        effects, self._effects = self._effects, []
        return effects, has_become_slow

    def _is_late(self, now_s: float) -> bool:
        return bool(self._unconfirmed) and self._unconfirmed[0][1] + self._timeout_s <= now_s

    def _send_outputs(self, now_s: float) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            groups = tuple(group for group, _ in outputs)
            payloads = [payload for _, payload in outputs]
            self._enqueue(lambda n: ExtendStreams(self._frontend_id, n, groups), payloads, now_s)

    def _enqueue(
        self, message: Callable[[int], ReplicaMessage], frames: list[bytes], now_s: float
    ) -> int:
        if self._buddy is None:
            return 0
        self._number += 1
        self._unconfirmed.append((self._number, now_s))
        self._effects.append(ToBuddy(self._buddy, message(self._number), frames))
        return self._number
