"""Channels of one mailbox, without its sockets: to peers, by their addresses, and from senders, by
their channels. Pure.

The connections are handed in: ZeroMQ's sockets (`mailbox`), or those of a simulation in virtual
time.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from sterna.messaging.reliable_channel import PERIODIC, Head, ReceivingEnd, SendingEnd

MAX_ORIGINS = 100_000
"""Senders of which the next message number is remembered; the one that has been silent for longest
is forgotten first, long after it has ended."""


class Connections(Protocol):
    """The connections of one mailbox to others, by their addresses. None of these calls waits."""

    def connect(self, address: str) -> bool:
        """Open a connection; returns False when none can be opened at the moment."""

    def push(self, address: str, head: Head, content: Sequence[bytes]) -> None:
        """Send this over the connection to the address. It may be lost, but is not overtaken."""

    def close(self, address: str) -> None:
        """Close the connection, if there is one, and drop what it still holds."""


@dataclass(slots=True)
class _Outbox:
    """The channel to another mailbox."""

    channel: SendingEnd
    is_connected: bool


@dataclass(slots=True)
class _Origin:
    """The channel from another mailbox; its address is known from the first probe on."""

    channel: ReceivingEnd
    address: str | None = None


class MailboxCore:
    """All channels from and to one mailbox.

    Times are of any monotonic clock. While `needs_tick` holds, `on_tick` is to be called
    periodically.

    Args:
        address: the address of this mailbox.
        draw_channel: returns a unique channel id of CHANNEL_BYTES.
        capacity: messages kept for one peer; more are refused.
        capacity_bytes: bytes of these messages; a single message may have more.
        max_origins: number of senders that are remembered.
    """

    def __init__(
        self,
        address: str,
        connections: Connections,
        draw_channel: Callable[[], bytes],
        capacity: int,
        capacity_bytes: int,
        max_origins: int = MAX_ORIGINS,
    ) -> None:
        self._own_address = address.encode("ascii")
        self._connections = connections
        self._draw_channel = draw_channel
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._max_origins = max_origins
        self._outboxes: dict[str, _Outbox] = {}
        self._addresses: dict[bytes, str] = {}
        self._origins: OrderedDict[bytes, _Origin] = OrderedDict()
        # The origins with a known address to which a receipt will be due: a tick looks at no other.
        # Without an address none can be sent; the probe that brings it is answered at once.
        self._unconfirmed: dict[bytes, _Origin] = {}

    @property
    def needs_tick(self) -> bool:
        """Whether a connection is to be opened, or a probe or a receipt will be due."""
        return bool(self._unconfirmed) or any(
            not each.is_connected or each.channel.next_deadline_s is not None
            for each in self._outboxes.values()
        )

    def num_kept(self, address: str) -> int:
        """Messages to this address that have no receipt yet."""
        outbox = self._outboxes.get(address)
        return 0 if outbox is None else outbox.channel.num_kept

    # ------------------------------------------------------------------------------ sending

    def send(
        self, address: str, content: Sequence[bytes], now_s: float, is_periodic: bool = False
    ) -> bool:
        """Number the message and send it; returns False when too much is kept for this address."""
        outbox = self._outboxes.get(address) or self._open(address)
        head = outbox.channel.send(content, now_s, is_periodic)
        if head is None:
            return False
        if outbox.is_connected:
            self._connections.push(address, head, content)
        return True

    def keep_only(self, addresses: AbstractSet[str]) -> None:
        """Forget all addresses but these, with the messages kept for them."""
        for address in [each for each in self._outboxes if each not in addresses]:
            del self._outboxes[address]
            self._connections.close(address)
        self._addresses = {
            channel: address
            for channel, address in self._addresses.items()
            if address in self._outboxes
        }

    def on_receipt(self, head: Head, now_s: float) -> None:
        """A peer sent a receipt; one for a closed channel is late, and ignored."""
        address = self._addresses.get(head.channel)
        if address is not None:
            for again, content in self._outboxes[address].channel.on_receipt(head, now_s):
                self._connections.push(address, again, content)

    # ---------------------------------------------------------------------------- receiving

    def on_message(self, head: Head, now_s: float) -> bool:
        """A message arrived. Returns whether it is the next one, which is to be delivered; every
        other one must be dropped."""
        origin = self._origins.get(head.channel) or self._origin(head.channel)
        channel = origin.channel
        is_next = channel.on_message(head.number, now_s, head.kind == PERIODIC)
        due_s = channel.next_deadline_s
        if due_s is not None and due_s <= now_s:
            self._confirm(head.channel, origin, now_s)
        elif due_s is not None and origin.address is not None:
            self._unconfirmed[head.channel] = origin
        return is_next

    def on_probe(self, head: Head, address: str, now_s: float) -> None:
        """The mailbox at this address asks whether everything has arrived; answer it."""
        origin = self._origin(head.channel)
        origin.address = address
        origin.channel.on_probe(head.number, now_s)
        self._confirm(head.channel, origin, now_s)

    # --------------------------------------------------------------------------------- time

    def on_tick(self, now_s: float) -> None:
        """Send the probes and receipts that are due, and connect where that failed."""
        for address, outbox in self._outboxes.items():
            probe = outbox.channel.probe(now_s)
            if not outbox.is_connected:
                outbox.is_connected = self._connections.connect(address)
                # The other side answers this probe by asking for the kept messages.
                probe = outbox.channel.hello()
            if probe is not None and outbox.is_connected:
                self._probe(address, probe)
        for channel, origin in list(self._unconfirmed.items()):
            self._confirm(channel, origin, now_s)

    # ------------------------------------------------------------------------------ channels

    def _new_outgoing(self, channel: bytes) -> SendingEnd:
        return SendingEnd(channel, self._capacity, self._capacity_bytes)

    def _new_incoming(self, channel: bytes) -> ReceivingEnd:
        return ReceivingEnd(channel)

    def _open(self, address: str) -> _Outbox:
        channel = self._draw_channel()
        is_connected = self._connections.connect(address)
        outbox = self._outboxes[address] = _Outbox(self._new_outgoing(channel), is_connected)
        self._addresses[channel] = address
        if is_connected:
            # The other side can answer only when it knows the address of this mailbox.
            self._probe(address, outbox.channel.hello())
        return outbox

    def _origin(self, channel: bytes) -> _Origin:
        origin = self._origins.get(channel)
        if origin is None:
            origin = self._origins[channel] = _Origin(self._new_incoming(channel))
            if len(self._origins) > self._max_origins:
                forgotten, _ = self._origins.popitem(last=False)
                self._unconfirmed.pop(forgotten, None)
        # Each sender probes now and then, so the order is nearly that of the last activity.
        self._origins.move_to_end(channel)
        return origin

    def _confirm(self, channel: bytes, origin: _Origin, now_s: float) -> None:
        """Send a receipt if one is due and the sender's address is known."""
        if (address := origin.address) is None:
            return
        receipt = origin.channel.receipt(now_s)
        if origin.channel.next_deadline_s is None:
            self._unconfirmed.pop(channel, None)
        if receipt is None:
            return
        outbox = self._outboxes.get(address) or self._open(address)
        if outbox.is_connected:
            self._connections.push(address, receipt, (b"",))

    def _probe(self, address: str, probe: Head) -> None:
        self._connections.push(address, probe, (self._own_address,))
