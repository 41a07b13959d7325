"""Reliable channel: messages arrive once and in order, even when a connection is cut. Pure.

ZeroMQ reconnects by itself after a cut, but the messages that the kernel held for the broken
connection are lost without an error. So the messages of a **channel**, which leads from one mailbox
to another, are numbered, and kept until the other side confirms them:

- the receiver takes the message with the number that it expects and drops every other one: a lower
  number has arrived before, a higher one shows that messages were lost;
- its **receipts** name the number that it expects next. A receipt that reports a gap makes the
  sender send everything again from there;
- a sender whose messages have had no receipt for a while sends a **probe**, which names the number
  that it will send next. The probe follows the messages on the same connection, so a receiver that
  lacks some of them notices it. A slow receiver gets a probe from time to time, and no message
  twice.

A message that is **periodic** is followed by another one of its kind by itself, which shows that it
was lost. Its receipt and its probe have time: with a thousand senders nearly each of their load
reports would have a receipt of its own.

This holds as long as both processes live. The supervisor reports deaths.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

Frames = Sequence[bytes]

RECEIPT_AFTER_S = 0.1
"""Time that a receipt waits for more messages to confirm."""

RECEIPT_AFTER_MESSAGES = 256
"""Messages after which a receipt is sent at once."""

PROBE_AFTER_S = 0.3
"""Time without a receipt after which the sender sends a probe."""

PERIODIC_RECEIPT_AFTER_S, PERIODIC_PROBE_AFTER_S = 0.8, 1.2
"""The same for periodic messages."""

MESSAGE, PROBE, RECEIPT, GAP, IN_PARTS, PERIODIC = range(6)
"""Kinds of heads. A gap is a receipt that asks for everything from its number on; IN_PARTS marks a
message that was divided (`framing`), PERIODIC one whose receipt has time."""

CHANNEL_BYTES = 16
_HEAD = struct.Struct(f">B{CHANNEL_BYTES}sQ")
HEAD_BYTES = _HEAD.size


class Head(NamedTuple):
    """Header of a message, or a probe, receipt or gap on its own.

    Attributes:
        channel: the sender's channel; ids are drawn at random.
        number: number of the message; in a probe, a receipt or a gap, of the next message.
    """

    kind: int
    channel: bytes
    number: int

    def encode(self) -> bytes:
        """The head as HEAD_BYTES bytes."""
        return _HEAD.pack(self.kind, self.channel, self.number)

    @staticmethod
    def decode(content: bytes) -> "Head":
        """The head with which these bytes begin.

        Raises:
            ValueError: they do not begin with a head.
        """
        if len(content) < HEAD_BYTES:
            raise ValueError(f"a head has {HEAD_BYTES} bytes, not {len(content)}")
        head = Head._make(_HEAD.unpack_from(content))
        if head.kind > PERIODIC:
            raise ValueError(f"there is no head of kind {head.kind}")
        return head


class SendingEnd:
    """The sender's side of a channel.

    Args:
        channel: its id of CHANNEL_BYTES.
        capacity: messages that are kept without a receipt; more are refused.
        capacity_bytes: bytes of these messages; a single message may have more.
    """

    def __init__(self, channel: bytes, capacity: int, capacity_bytes: int) -> None:
        self._channel = channel
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._kept: deque[Frames] = deque()
        self._first = 0
        # Time of the next probe; None while every message has a receipt.
        self._probe_due_s: float | None = None

    @property
    def next_deadline_s(self) -> float | None:
        """When `probe` is due, or None."""
        return self._probe_due_s

    @property
    def num_kept(self) -> int:
        """Messages without a receipt."""
        return len(self._kept)

    def send(self, frames: Frames, now_s: float, is_periodic: bool = False) -> Head | None:
        """Number a message that is to be sent now; None when too many wait for a receipt."""
        num_bytes = sum(map(len, frames))
        has_room = self._num_bytes + num_bytes <= self._capacity_bytes or not self._kept
        if len(self._kept) >= self._capacity or not has_room:
            return None
        self._num_bytes += num_bytes
        kind = PERIODIC if is_periodic else MESSAGE
        head = Head(kind, self._channel, self._first + len(self._kept))
        self._kept.append(frames)
        due_s = now_s + (PERIODIC_PROBE_AFTER_S if is_periodic else PROBE_AFTER_S)
        if self._probe_due_s is None or due_s < self._probe_due_s:
            self._probe_due_s = due_s
        return head

    def on_receipt(self, head: Head, now_s: float) -> list[tuple[Head, Frames]]:
        """The other side expects this number; returns the messages to send again, in order.

        A number that was never sent, or that was confirmed before, changes nothing.
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
        """Return the probe that asks whether everything has arrived, if it is due."""
        if self._probe_due_s is None or now_s < self._probe_due_s:
            return None
        self._probe_due_s = now_s + PROBE_AFTER_S
        return self.hello()

    def hello(self) -> Head:
        """Return a probe at any time; it is sent first on a channel."""
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

    def on_message(self, number: int, now_s: float, is_periodic: bool = False) -> bool:
        """Whether this message is the next one; every other one must be dropped."""
        if number == self._expected:
            self._expected += 1
            self._has_asked = False
            self._num_unconfirmed += 1
            is_enough = self._num_unconfirmed >= RECEIPT_AFTER_MESSAGES
            after_s = PERIODIC_RECEIPT_AFTER_S if is_periodic else RECEIPT_AFTER_S
            self._want_receipt(now_s if is_enough else now_s + after_s)
            return True
        if number < self._expected:
            # The sender does not know yet that it has arrived.
            self._want_receipt(now_s + RECEIPT_AFTER_S)
        elif not self._has_asked:
            # Once for each gap: later messages were sent before the answer could arrive.
            self._has_asked = True
            self._want_receipt(now_s)
        return False

    def on_probe(self, number: int, now_s: float) -> None:
        """The sender asks whether everything before this number has arrived."""
        self._has_asked = number > self._expected
        self._want_receipt(now_s)

    def receipt(self, now_s: float) -> Head | None:
        """Return the receipt for the sender, if it is due."""
        if self._receipt_due_s is None or now_s < self._receipt_due_s:
            return None
        self._receipt_due_s = None
        self._num_unconfirmed = 0
        kind = GAP if self._has_asked else RECEIPT
        return Head(kind, self._channel, self._expected)

    def _want_receipt(self, due_s: float) -> None:
        if self._receipt_due_s is None or due_s < self._receipt_due_s:
            self._receipt_due_s = due_s
