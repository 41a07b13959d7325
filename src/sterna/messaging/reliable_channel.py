"""Messages from one mailbox to another arrive once and in order, also when a connection is cut.
Pure.

ZeroMQ connects again by itself after a cut, but what the kernel held of the broken connection is
lost, and nobody is told. So the messages of a **channel**, which is one mailbox's way to another,
are numbered, and kept until the other side says that it has them:

- the receiver takes the number that it expects and drops every other one: what is behind has come
  before, what is ahead shows that something was lost;
- its **receipts** name the number that it expects next. One that is asked for by a gap has
  everything sent again from there;
- a sender whose messages are without a receipt for a while sends a **probe**, which says what it
  will send next: it comes after them on the same connection, so that a receiver that lacks some
  knows it. A slow receiver is asked once in a while, and nothing is sent to it twice.

This holds as long as both processes live. Who has died is learnt from the supervisor.
"""

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Frames = Sequence[bytes]

RECEIPT_AFTER_S = 0.1
"""A receipt waits so long for more messages to speak of."""

RECEIPT_AFTER_MESSAGES = 256
"""Or for so many."""

PROBE_AFTER_S = 0.3
"""Without a receipt for so long, the sender asks."""

MESSAGE, PROBE, RECEIPT, GAP, IN_PARTS = range(5)
"""Kinds of heads. A gap is a receipt that asks for everything from its number on; what is in parts
is a message, too (`parts`)."""

CHANNEL_BYTES = 16
_HEAD = struct.Struct(f">B{CHANNEL_BYTES}sQ")
HEAD_BYTES = _HEAD.size


class Head(NamedTuple):
    """What goes before a message, or instead of one.

    Attributes:
        channel: of the sender's; ids are drawn at random.
        number: of the message; in a probe, a receipt or a gap, of the next one.
    """

    kind: int
    channel: bytes
    number: int

    def encode(self) -> bytes:
        """The head in bytes, all of the same length."""
        return _HEAD.pack(self.kind, self.channel, self.number)

    @staticmethod
    def decode(content: bytes) -> "Head":
        """The head with which these bytes begin.

        Raises ValueError: they begin with none.
        """
        if len(content) < HEAD_BYTES:
            raise ValueError(f"a head has {HEAD_BYTES} bytes, not {len(content)}")
        head = Head._make(_HEAD.unpack_from(content))
        if head.kind > IN_PARTS:
            raise ValueError(f"there is no head of kind {head.kind}")
        return head


class SendingEnd:
    """The sender's side of a channel.

    Args:
        channel: its id, of CHANNEL_BYTES.
        capacity: messages that are kept without a receipt; more are refused.
        capacity_bytes: and bytes in them, unless it is one message alone.
    """

    def __init__(self, channel: bytes, capacity: int, capacity_bytes: int) -> None:
        self._channel = channel
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._kept: deque[Frames] = deque()
        self._first = 0
        # When the other side has been silent for too long; None while nothing is without a receipt.
        self._probe_due_s: float | None = None

    @property
    def next_deadline_s(self) -> float | None:
        """When `probe` is due, or None."""
        return self._probe_due_s

    @property
    def num_kept(self) -> int:
        """Messages without a receipt."""
        return len(self._kept)

    def send(self, frames: Frames, now_s: float) -> Head | None:
        """Number a message that is to be sent now; None when too many are without a receipt."""
        num_bytes = sum(map(len, frames))
        has_room = self._num_bytes + num_bytes <= self._capacity_bytes or not self._kept
        if len(self._kept) >= self._capacity or not has_room:
            return None
        self._num_bytes += num_bytes
        head = Head(MESSAGE, self._channel, self._first + len(self._kept))
        self._kept.append(frames)
        if self._probe_due_s is None:
            self._probe_due_s = now_s + PROBE_AFTER_S
        return head

    def on_receipt(self, head: Head, now_s: float) -> list[tuple[Head, Frames]]:
        """The other side expects this number; returns what must be sent again, in order.

        A number that was never sent, or that it has said to be past, changes nothing.
        """
        last = self._first + len(self._kept)
        if not self._first <= head.number <= last:
            return []
        for _ in range(head.number - self._first):
            self._num_bytes -= sum(map(len, self._kept.popleft()))
        self._first = head.number
        self._probe_due_s = now_s + PROBE_AFTER_S if self._kept else None
        if head.kind != GAP:
            return []
        return [
            (Head(MESSAGE, self._channel, self._first + index), frames)
            for index, frames in enumerate(self._kept)
        ]

    def probe(self, now_s: float) -> Head | None:
        """What asks whether everything has arrived, when that is due."""
        if self._probe_due_s is None or now_s < self._probe_due_s:
            return None
        self._probe_due_s = now_s + PROBE_AFTER_S
        return self.hello()

    def hello(self) -> Head:
        """A probe at any time: the first thing that goes through a channel."""
        return Head(PROBE, self._channel, self._first + len(self._kept))


class ReceivingEnd:
    """The receiver's side of a channel."""

    def __init__(self, channel: bytes) -> None:
        self._channel = channel
        self._expected = 0
        self._has_asked = False
        self._num_unconfirmed = 0
        self._receipt_due_s: float | None = None

    @property
    def next_deadline_s(self) -> float | None:
        """When `receipt` is due, or None."""
        return self._receipt_due_s

    def on_message(self, number: int, now_s: float) -> bool:
        """Whether this message is the next one; every other one must be dropped."""
        if number == self._expected:
            self._expected += 1
            self._has_asked = False
            self._num_unconfirmed += 1
            is_enough = self._num_unconfirmed >= RECEIPT_AFTER_MESSAGES
            self._want_receipt(now_s if is_enough else now_s + RECEIPT_AFTER_S)
            return True
        if number < self._expected:
            # The sender does not know yet that it has come.
            self._want_receipt(now_s + RECEIPT_AFTER_S)
        elif not self._has_asked:
            # Once a gap: what else comes behind it was sent before the answer could arrive.
            self._has_asked = True
            self._want_receipt(now_s)
        return False

    def on_probe(self, number: int, now_s: float) -> None:
        """The sender asks whether everything before this number has arrived."""
        self._has_asked = number > self._expected
        self._want_receipt(now_s)

    def receipt(self, now_s: float) -> Head | None:
        """What to tell the sender, when that is due."""
        if self._receipt_due_s is None or now_s < self._receipt_due_s:
            return None
        self._receipt_due_s = None
        self._num_unconfirmed = 0
        kind = GAP if self._has_asked else RECEIPT
        return Head(kind, self._channel, self._expected)

    def _want_receipt(self, due_s: float) -> None:
        if self._receipt_due_s is None or due_s < self._receipt_due_s:
            self._receipt_due_s = due_s


def earliest(deadlines_s: Iterable[float | None]) -> float | None:
    """The first of these times, or None when there is none."""
    return min((each for each in deadlines_s if each is not None), default=None)
