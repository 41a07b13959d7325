"""Mailboxes' connections in virtual time: what ZeroMQ's push over TCP promises, and no more.

One connection for each sender and receiver. It delivers in order and once while both live, late
when the link is slow or cut off for a time (TCP sends again), never to the dead, and of what the
dead had sent only a beginning. Messages of the migration protocol fare worse, because that claims
to bear it: they are lost, repeated and overtaken. So do a front end's questions who has a request,
and the answers, but for the last: there order counts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from fault_simulation.virtual.nodes import BACKLOG_S, Nodes
from fault_simulation.virtual.timeline import Process, Timeline
from sterna.messages.actors import MigrationMessage, OwnerQuery, OwnerReply, WireMessage

Receive = Callable[[WireMessage, Sequence[bytes]], None]


@dataclass(slots=True)
class Conditions:
    """How bad the network is at the moment.

    Attributes:
        loss: the share that is lost of the messages for which that is allowed.
        repetition: the share of them that arrives twice.
        overtaking_s: by up to so much a migration message may be overtaken.
    """

    latency_s: float = 0.0005
    loss: float = 0.0
    repetition: float = 0.0
    overtaking_s: float = 0.0


SLOW_LINK_S = 1.0
"""By up to so much what goes by a slow link is later."""

Packet = tuple[WireMessage, Sequence[bytes]]


@dataclass(slots=True)
class _Connection:
    """What is on its way from one to another.

    Attributes:
        ordered: arrives first in, first out.
        unordered: migration messages, by the number of their entry.
    """

    last_arrival_s: float = 0.0
    ordered: deque[Packet] = field(default_factory=deque)
    unordered: dict[int, Packet] = field(default_factory=dict)


class Network:
    """All connections."""

    def __init__(self, timeline: Timeline, rng: Random, nodes: Nodes) -> None:
        self._timeline = timeline
        self._nodes = nodes
        self._rng = rng
        self._receivers: dict[str, tuple[Process, Receive]] = {}
        self._connections: dict[tuple[str, str], _Connection] = {}
        # Until when the processes of these names cannot reach each other.
        self._cut_off_until_s: dict[tuple[str, str], float] = {}
        # Until when what the first sends to the second is slow.
        self._slow_until_s: dict[tuple[str, str], float] = {}
        self._num_unordered = 0
        self.conditions = Conditions()

    def join(self, process: Process, receive: Receive) -> None:
        """Give the process a mailbox, whose address is its name."""
        self._receivers[process.name] = (process, receive)

    def send(
        self, sender: Process, address: str, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> None:
        """Let the message arrive in some time, if it does."""
        connection = self._connections.setdefault((sender.name, address), _Connection())
        link = (sender.name, address)
        delay_s = self._rng.expovariate(1.0) * self.conditions.latency_s
        if self._slow_until_s.get(link, 0.0) > self._timeline.now_s:
            delay_s += self._rng.random() * SLOW_LINK_S
        if isinstance(message, MigrationMessage):
            self._send_unordered(link, connection, (message, frames), delay_s)
            return
        now_s = self._timeline.now_s
        connection.last_arrival_s = max(connection.last_arrival_s, now_s + delay_s)
        is_certain = not isinstance(message, OwnerQuery | OwnerReply)
        for _ in range(1 if is_certain else self._num_copies(sender.name)):
            connection.ordered.append((message, frames))
            self._later(
                connection.last_arrival_s - now_s, lambda: self._arrive(link, connection, None)
            )

    def _send_unordered(
        self, link: tuple[str, str], connection: _Connection, packet: Packet, delay_s: float
    ) -> None:
        conditions, rng = self.conditions, self._rng
        for _ in range(self._num_copies(link[0])):
            late_s = rng.random() * conditions.overtaking_s if conditions.overtaking_s else 0.0
            self._num_unordered += 1
            number = self._num_unordered
            connection.unordered[number] = packet
            self._later(delay_s + late_s, partial(self._arrive, link, connection, number))

    def _num_copies(self, sender: str) -> int:
        """How many times a message arrives that may be lost and repeated."""
        conditions, rng = self.conditions, self._rng
        if conditions.loss and rng.random() < conditions.loss:
            self._timeline.note(sender, "a message is lost")
            return 0
        return 2 if conditions.repetition and rng.random() < conditions.repetition else 1

    def _arrive(self, link: tuple[str, str], connection: _Connection, number: int | None) -> None:
        """Deliver the migration message of this number, or the next of the others."""
        delay_s = self._cut_off_until_s.get(link, 0.0) - self._timeline.now_s
        if (cut_left_s := self._nodes.cut_left_s(*link)) > 0:
            delay_s = max(delay_s, cut_left_s + self._nodes.rng.random() * BACKLOG_S)
        if delay_s > 0:
            self._later(delay_s, lambda: self._arrive(link, connection, number))
            return
        if number is None:
            packet = connection.ordered.popleft() if connection.ordered else None
        else:
            packet = connection.unordered.pop(number, None)
        receiver = self._receivers.get(link[1])
        if packet is None or receiver is None or not receiver[0].is_alive:
            return
        process, receive = receiver
        message, frames = packet
        self._timeline.push(0.0, process, message, lambda: receive(message, frames))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        # The entry belongs to nobody: what a sender has sent may arrive after its death.
        self._timeline.push(delay_s, None, "", action)

    # ------------------------------------------------------------------------------- faults

    def keep_only(self, sender: Process, addresses: frozenset[str]) -> None:
        """The sender closes its other connections; what is on its way may be lost."""
        for name, address in list(self._connections):
            if name == sender.name and address not in addresses:
                self._lose_end(self._connections.pop((name, address)))

    def on_death(self, process: Process) -> None:
        """Of what it had sent, a beginning arrives."""
        for name, address in list(self._connections):
            if name == process.name:
                self._lose_end(self._connections.pop((name, address)))

    def cut_off(self, one: str, other: str, duration_s: float) -> None:
        """Neither of them hears the other for so long; then all that was said arrives."""
        until_s = self._timeline.now_s + duration_s
        for link in ((one, other), (other, one)):
            self._cut_off_until_s[link] = max(until_s, self._cut_off_until_s.get(link, 0.0))

    def slow_down(self, sender: str, receiver: str, duration_s: float) -> None:
        """Let what the one sends to the other for so long take longer."""
        self._slow_until_s[sender, receiver] = self._timeline.now_s + duration_s

    def is_cut_off(self, one: str, other: str) -> bool:
        """Whether the two cannot reach each other."""
        if self._nodes.cut_left_s(one, other) > 0:
            return True
        return self._cut_off_until_s.get((one, other), 0.0) > self._timeline.now_s

    def heal(self) -> None:
        """Nothing is lost any more; who is cut off is so for as long as was said."""
        self.conditions = Conditions()
        self._slow_until_s.clear()

    def _lose_end(self, connection: _Connection) -> None:
        rng = self._rng
        num_kept = rng.randint(0, len(connection.ordered))
        while len(connection.ordered) > num_kept:
            connection.ordered.pop()
        connection.unordered = {
            number: each for number, each in connection.unordered.items() if rng.random() < 0.5
        }
