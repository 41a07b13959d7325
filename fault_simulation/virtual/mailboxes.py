"""Mailboxes in virtual time, in place of the ZeroMQ sockets of `messaging.mailbox`.

The decisions are those of `MailboxCore`. Each message on its way has a number that no mailbox sees,
so that one that is handed over twice, too early or not at all is found here.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fault_simulation.virtual.settings import TICK_S, Queues
from fault_simulation.virtual.timeline import Action, Process, Timeline, Violation
from sterna.messages.actors import PERIODIC_MESSAGES, RequestNews, WireMessage
from sterna.messaging.mailbox_core import Connections, MailboxCore
from sterna.messaging.reliable_channel import GAP, MESSAGE, PERIODIC, PROBE, Head

Receive = Callable[[WireMessage, Sequence[bytes]], None]

LATE_S = 1.0
"""A message that is on its way for longer may exceed a time-out of its receiver."""

LATEST_S = 2.0
"""Time within which each message arrives once the connections between the two are whole."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)


@dataclass(slots=True, eq=False)
class Tally:
    """The messages of one mailbox to one address, from its first connection to its last.

    Attributes:
        last_s: when the last message was sent.
        sent_s: when each message was sent that is still on its way.
    """

    sender: str
    address: str
    num_handed: int = 0
    last_s: float = 0.0
    sent_s: deque[float] = field(default_factory=deque)

    def is_under_way_since(self, before_s: float) -> bool:
        """Whether a message that was sent before then has not been handed over."""
        return bool(self.sent_s) and self.sent_s[0] < before_s

    def on_handed(self, letter: "Letter") -> float:
        """The receiver takes this as the next message; returns when it was sent.

        Raises:
            Violation: it is not the next one.
        """
        if letter.number != self.num_handed:
            raise Violation(
                f"{self.address} gets message {letter.number} of {self.sender}, and "
                f"{self.num_handed} is the next"
            )
        self.num_handed += 1
        return self.sent_s.popleft()


class Letter(list[bytes]):
    """The content of a message, and its number among those of its sender."""

    __slots__ = ("number", "tally")

    def __init__(self, content: Sequence[bytes], tally: Tally) -> None:
        super().__init__(content)
        self.tally = tally
        self.number = tally.num_handed + len(tally.sent_s)


class Carrier(Protocol):
    """The network, as a mailbox sees it."""

    timeline: Timeline
    counts: Counter[str]
    queues: Queues

    def new_core(self, name: str, connections: Connections, capacity: int) -> MailboxCore:
        """Make the core of the mailbox of this name."""

    def connect(self, sender: str, address: str) -> bool:
        """See `mailbox_core.Connections`."""

    def close(self, sender: str, address: str) -> None:
        """See `mailbox_core.Connections`."""

    def carry(self, sender: str, address: str, head: Head, content: Sequence[bytes]) -> None:
        """Let the frame arrive in some time, if it does."""

    def delays_of(self, receiver: str, message: WireMessage) -> list[float]:
        """Return the delays after which the message is handed over: one for each time."""

    def hindered_s(self, sender: str, address: str, since_s: float) -> float:
        """Time since then in which something may have kept the two from hearing each other."""


class VirtualMailbox:
    """The mailbox of one process, whose name is its address."""

    def __init__(
        self, process: Process, receive: Receive, network: Carrier, queue_limit: int
    ) -> None:
        self._process = process
        self._receive = receive
        self._network = network
        self._timeline = network.timeline
        self.core = network.new_core(process.name, self, queue_limit)
        self.tallies: dict[str, Tally] = {}
        self._is_ticking = False

    # ------------------------------------------------------------------------- the process

    def send(self, address: str, message: WireMessage, frames: Sequence[bytes]) -> bool:
        """As `Mailbox.send`."""
        tally = self.tallies.get(address)
        if tally is None:
            tally = self.tallies[address] = Tally(self._process.name, address)
        letter = Letter([_ENCODER.encode(message), *frames], tally)
        now_s = self._timeline.now_s
        is_refused = isinstance(message, RequestNews) and self._is_full(address)
        is_periodic = isinstance(message, PERIODIC_MESSAGES)
        if is_refused or not self.core.send(address, letter, now_s, is_periodic):
            self._network.counts[f"refused: {type(message).__name__}"] += 1
            self._timeline.note(self._process.name, f"refuses a message to {address}")
            return False
        tally.last_s = now_s
        tally.sent_s.append(now_s)
        self._tick_later()
        return True

    def _is_full(self, address: str) -> bool:
        return self.core.num_kept(address) >= self._network.queues.of_tokens

    def keep_only(self, addresses: AbstractSet[str]) -> None:
        """As `Mailbox.keep_only`."""
        self.core.keep_only(addresses)

    # ------------------------------------------------------------------------- connections

    def connect(self, address: str) -> bool:
        """See `Connections`."""
        return self._network.connect(self._process.name, address)

    def push(self, address: str, head: Head, content: Sequence[bytes]) -> None:
        """See `Connections`."""
        if head.kind == GAP:
            what = f"has nothing of {address} from message {head.number} on"
            self._timeline.note(self._process.name, what)
        self._network.carry(self._process.name, address, head, content)

    def close(self, address: str) -> None:
        """See `Connections`."""
        # What is still under way may be lost.
        self.tallies.pop(address, None)
        self._network.close(self._process.name, address)

    def on_frame(self, sender: str, head: Head, content: Sequence[bytes]) -> None:
        """This frame has arrived; a process that hangs takes it when it continues."""
        self._when_it_runs(lambda: self._take(sender, head, content))

    def _take(self, sender: str, head: Head, content: Sequence[bytes]) -> None:
        now_s = self._timeline.now_s
        if head.kind in (MESSAGE, PERIODIC):
            if self.core.on_message(head, now_s):
                self._hand(content)
        elif head.kind == PROBE:
            self.core.on_probe(head, content[0].decode("ascii"), now_s)
        else:
            self.core.on_receipt(head, now_s)
            self._check_keeps(sender)
        self._tick_later()

    def _check_keeps(self, address: str) -> None:
        """Raises Violation: a message that has not arrived can no longer be sent again."""
        tally = self.tallies.get(address)
        if tally is not None and self.core.num_kept(address) < len(tally.sent_s):
            raise Violation(
                f"{self._process.name} forgets message {tally.num_handed} to {address}, which has "
                "not arrived"
            )

    def _hand(self, letter: Sequence[bytes]) -> None:
        assert isinstance(letter, Letter)
        self._check_is_in_time(letter, letter.tally.on_handed(letter))
        message, frames = _DECODER.decode(letter[0]), letter[1:]

        def receive() -> None:
            self._receive(message, frames)

        for delay_s in self._network.delays_of(self._process.name, message):
            self._timeline.push(delay_s, self._process, message, receive)

    def _check_is_in_time(self, letter: Letter, sent_s: float) -> None:
        """Raises Violation: nothing has kept the message from coming earlier."""
        late_s = self._timeline.now_s - sent_s
        if late_s <= LATEST_S:
            return
        sender, address = letter.tally.sender, letter.tally.address
        late_s -= self._network.hindered_s(sender, address, sent_s)
        if late_s > LATEST_S:
            raise Violation(
                f"{address} gets message {letter.number} of {sender} {late_s:.1f} s later than it "
                "could have"
            )

    # --------------------------------------------------------------------------------- time

    def _tick_later(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            # An entry without an owner, so that it leaves no trace.
            self._timeline.push(TICK_S, None, "", lambda: self._when_it_runs(self._tick))

    def _tick(self) -> None:
        self._is_ticking = False
        self.core.on_tick(self._timeline.now_s)
        if self.core.needs_tick:
            self._tick_later()

    def _when_it_runs(self, action: Action) -> None:
        process = self._process
        if process.is_hung:
            process.frozen.append(("", action))
        elif process.is_alive:
            action()
