"""The network in virtual time: connections between mailboxes, with the guarantees of ZeroMQ's push
over TCP and no more.

There is one connection for each sender and receiver. Frames arrive in order, and late when the link
is slow or cut off for a time. Nothing arrives at a dead process, and only a beginning of what a
dead process had sent. A connection that breaks comes back at once or when the link is whole again,
and what was on its way is lost: messages, probes and receipts alike. Mailboxes must see to it that
messages arrive all the same, once and in order while both sides live.

Messages of the migration protocol, which claims to tolerate it, are also lost, repeated and
overtaken behind the mailbox. The questions of a front end for the owner of a request, and the
answers, are lost and repeated; their order is kept, since it matters.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from random import Random

from fault_simulation.virtual.mailboxes import LATE_S, LATEST_S, Receive, Tally, VirtualMailbox
from fault_simulation.virtual.nodes import BACKLOG_S, Nodes
from fault_simulation.virtual.settings import SEND_QUEUE_BYTES, WIDE, Queues
from fault_simulation.virtual.timeline import Action, Process, Timeline, Violation
from sterna.messages.actors import MigrationMessage, OwnerQuery, OwnerReply, WireMessage
from sterna.messaging.mailbox_core import Connections, MailboxCore
from sterna.messaging.reliable_channel import CHANNEL_BYTES, MESSAGE, PERIODIC, Head


@dataclass(slots=True)
class Conditions:
    """The present quality of the network.

    Attributes:
        loss: the share that is lost of the messages that may be lost.
        repetition: the share of them that arrives twice.
        overtaking_s: longest time by which a migration message may be overtaken.
        unconnected: the share of connections that cannot be opened at the first try.
    """

    latency_s: float = 0.0005
    loss: float = 0.0
    repetition: float = 0.0
    overtaking_s: float = 0.0
    unconnected: float = 0.0


SLOW_LINK_S = 1.0
"""Longest delay by a slow link."""

BROKEN_SHARE = 0.5
"""Of the connections over a link that is cut: those that break."""

Link = tuple[str, str]


@dataclass(slots=True)
class _Connection:
    """The frames on their way from one process to another.

    Attributes:
        last_arrival_s: of the frames, which arrive first in, first out.
        num_to_lose: number of the next frames that are lost.
        lost_until_s: all frames that are sent until then are lost as well.
    """

    last_arrival_s: float = 0.0
    frames: deque[tuple[Head, Sequence[bytes]]] = field(default_factory=deque)
    num_to_lose: int = 0
    lost_until_s: float = 0.0


class Network:
    """All mailboxes and their connections.

    Args:
        breaks: draws which connections break, and what is lost by that.
        core: the class of the core of each mailbox.
        queues: the limits of what mailboxes keep.

    Attributes:
        counts: how often each thing worth counting happened.
    """

    def __init__(
        self,
        timeline: Timeline,
        rng: Random,
        nodes: Nodes,
        breaks: Random,
        core: type[MailboxCore] = MailboxCore,
        queues: Queues = WIDE,
    ) -> None:
        self.timeline = timeline
        self.counts: Counter[str] = Counter()
        self.conditions = Conditions()
        self._nodes = nodes
        self._rng = rng
        self._breaks = breaks
        self.queues = queues
        self._core = core
        self._mailboxes: dict[str, tuple[Process, VirtualMailbox]] = {}
        self._connections: dict[Link, _Connection] = {}
        # The end of the time in which the processes of these names cannot reach each other.
        self._cut_off_until_s: dict[Link, float] = {}
        # The end of the time in which what the first sends to the second is slow.
        self._slow_until_s: dict[Link, float] = {}
        # When something of what the first sends to the second was last lost, or late.
        self._trouble_s: dict[Link, float] = {}

    # ---------------------------------------------------------------------------- processes

    def join(self, process: Process, receive: Receive, queue_limit: int) -> None:
        """Give the process a mailbox, whose address is its name.

        Args:
            queue_limit: messages that it keeps for a peer; more are refused.
        """
        mailbox = VirtualMailbox(process, receive, self, queue_limit)
        self._mailboxes[process.name] = (process, mailbox)

    def send(
        self, sender: Process, address: str, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> bool:
        """Send by the mailbox of the sender; returns False when that refuses it."""
        return self._mailboxes[sender.name][1].send(address, message, frames)

    def keep_only(self, sender: Process, addresses: AbstractSet[str]) -> None:
        """The sender closes its other connections; what is on its way may be lost."""
        self._mailboxes[sender.name][1].keep_only(addresses)

    def on_death(self, process: Process) -> None:
        """A beginning of what it had sent arrives."""
        for name, address in list(self._connections):
            if name == process.name:
                self.close(name, address)

    # ---------------------------------------------------------------------------- mailboxes

    def new_core(self, name: str, connections: Connections, capacity: int) -> MailboxCore:
        """Make the core of the mailbox of this name."""

        def draw_channel() -> bytes:
            return self._breaks.randbytes(CHANNEL_BYTES)

        return self._core(name, connections, draw_channel, capacity, SEND_QUEUE_BYTES)

    def connect(self, sender: str, address: str) -> bool:
        """See `mailbox_core.Connections`."""
        share = self.conditions.unconnected
        if share and self._breaks.random() < share:
            self._trouble_s[sender, address] = self.timeline.now_s
            self.counts["connection: cannot be opened"] += 1
            return False
        self._connections[sender, address] = _Connection()
        return True

    def close(self, sender: str, address: str) -> None:
        """See `mailbox_core.Connections`; of what was on its way a beginning arrives."""
        connection = self._connections.pop((sender, address), None)
        if connection is not None:
            num_kept = self._rng.randint(0, len(connection.frames))
            while len(connection.frames) > num_kept:
                connection.frames.pop()

    def carry(self, sender: str, address: str, head: Head, content: Sequence[bytes]) -> None:
        """Let the frame arrive in some time, if it does."""
        link = (sender, address)
        connection = self._connections[link]
        now_s = self.timeline.now_s
        if connection.num_to_lose or connection.lost_until_s > now_s:
            connection.num_to_lose = max(0, connection.num_to_lose - 1)
            self._lose(link, head)
            return
        delay_s = self._rng.expovariate(1.0) * self.conditions.latency_s
        if self._slow_until_s and self._slow_until_s.get(link, 0.0) > now_s:
            delay_s += self._rng.random() * SLOW_LINK_S
            self._trouble_s[link] = now_s + delay_s
        connection.last_arrival_s = max(connection.last_arrival_s, now_s + delay_s)
        connection.frames.append((head, content))
        self._later(connection.last_arrival_s - now_s, lambda: self._arrive(link, connection))

    def delays_of(self, receiver: str, message: WireMessage) -> list[float]:
        """Return the delays after which the message is handed over: one for each time."""
        if isinstance(message, MigrationMessage):
            overtaking_s, latency_s = self.conditions.overtaking_s, self.conditions.latency_s
            rng = self._rng
            return [
                rng.expovariate(1.0) * latency_s
                + (rng.random() * overtaking_s if overtaking_s else 0.0)
                for _ in range(self._num_copies(receiver))
            ]
        if isinstance(message, OwnerQuery | OwnerReply):
            return [0.0] * self._num_copies(receiver)
        return [0.0]

    def _num_copies(self, receiver: str) -> int:
        """Return how often a message arrives that may be lost and repeated."""
        conditions, rng = self.conditions, self._rng
        if conditions.loss and rng.random() < conditions.loss:
            self.timeline.note(receiver, "a message is lost")
            return 0
        return 2 if conditions.repetition and rng.random() < conditions.repetition else 1

    def _arrive(self, link: Link, connection: _Connection) -> None:
        """Let the next frame out of the connection."""
        delay_s = self._cut_left_s(link)
        if delay_s > 0:
            self._trouble_s[link] = self.timeline.now_s + delay_s
            self._later(delay_s, lambda: self._arrive(link, connection))
        elif connection.frames:
            head, content = connection.frames.popleft()
            receiver = self._mailboxes.get(link[1])
            if receiver is not None:
                receiver[1].on_frame(link[0], head, content)

    def _cut_left_s(self, link: Link) -> float:
        """Time until the link is whole; what then arrives may take a moment longer."""
        delay_s = self._cut_off_until_s.get(link, 0.0) - self.timeline.now_s
        if (cut_left_s := self._nodes.cut_left_s(*link)) > 0:
            delay_s = max(delay_s, cut_left_s + self._nodes.rng.random() * BACKLOG_S)
        return delay_s

    def _later(self, delay_s: float, action: Action) -> None:
        # The entry has no owner: what a sender has sent may arrive after its death.
        self.timeline.push(delay_s, None, "", action)

    # ------------------------------------------------------------------------------- faults

    def cut_off(self, one: str, other: str, duration_s: float) -> None:
        """Neither of them hears the other for this time. Then what is on its way arrives, unless
        its connection has broken."""
        until_s = self.timeline.now_s + duration_s
        for link in ((one, other), (other, one)):
            self._cut_off_until_s[link] = max(until_s, self._cut_off_until_s.get(link, 0.0))
            self._may_break(link, until_s)

    def on_node_cut(self, node: int, duration_s: float) -> None:
        """Nothing passes between this node and all others for this time."""
        until_s = self.timeline.now_s + duration_s
        for link in self._connections:
            if (self._nodes.node_of(link[0]) == node) != (self._nodes.node_of(link[1]) == node):
                self._may_break(link, until_s)

    def break_one(self, num_frames: int) -> None:
        """Break one of the connections."""
        links = [each for each in self._connections if each[1] in self._mailboxes]
        if links:
            self.break_connection(*self._breaks.choice(links), num_frames)

    def break_connection(self, sender: str, address: str, num_frames: int) -> None:
        """Lose this number of frames, the next that the sender sends to the address."""
        self._connections[sender, address].num_to_lose = num_frames
        self.counts["connection: broken"] += 1
        self.timeline.note(sender, f"its connection to {address} breaks")

    def slow_down(self, sender: str, receiver: str, duration_s: float) -> None:
        """Let what the one sends to the other during this time take longer."""
        self._slow_until_s[sender, receiver] = self.timeline.now_s + duration_s

    def is_cut_off(self, one: str, other: str) -> bool:
        """Whether the two cannot reach each other."""
        if self._nodes.cut_left_s(one, other) > 0:
            return True
        return self._cut_off_until_s.get((one, other), 0.0) > self.timeline.now_s

    def heal(self) -> None:
        """No more is lost; a process that is cut off stays so for the time that was given."""
        self.conditions = Conditions()
        self._slow_until_s.clear()
        for connection in self._connections.values():
            connection.num_to_lose = 0

    def _may_break(self, link: Link, until_s: float) -> None:
        """The link is cut until then. The kernel, which sends again what is not confirmed, may give
        the connection up, and loses what it then holds of it."""
        connection = self._connections.get(link)
        if connection is None or self._breaks.random() >= BROKEN_SHARE:
            return
        self.counts["connection: broken"] += 1
        connection.lost_until_s = self._breaks.uniform(self.timeline.now_s, until_s)
        num_kept = self._breaks.randint(0, len(connection.frames))
        while len(connection.frames) > num_kept:
            self._lose(link, connection.frames.pop()[0])

    def _lose(self, link: Link, head: Head) -> None:
        self._trouble_s[link] = max(self._trouble_s.get(link, 0.0), self.timeline.now_s)
        is_message = head.kind in (MESSAGE, PERIODIC)
        self.counts["lost: message" if is_message else "lost: probe or receipt"] += 1

    # ------------------------------------------------------------------------------ promises

    def hindered_s(self, sender: str, address: str, since_s: float) -> float:
        """Time since then in which something may have kept the two from hearing each other."""
        links = (sender, address), (address, sender)
        went_on_s = [self._mailboxes[each][0].went_on_s for each in (sender, address)]
        return (
            max(*went_on_s, *(self._trouble_s.get(each, 0.0) for each in links), since_s) - since_s
        )

    def is_late(self) -> bool:
        """Whether some message is on its way for longer than it should be, or was when its sender
        died: a membership, without which an instance does not know a new front end."""
        before_s = self.timeline.now_s - LATE_S
        tallies = self._tallies(of_dead_senders=True)
        return any(each.is_under_way_since(before_s) for _, each in tallies)

    def check_rest(self) -> None:
        """After all has healed, and some time.

        Raises:
            Violation: a message has not arrived, or its sender does not know that it has.
        """
        before_s = self.timeline.now_s - LATEST_S
        for mailbox, tally in self._tallies():
            sender, address = tally.sender, tally.address
            if tally.is_under_way_since(before_s):
                raise Violation(f"a message of {sender} to {address} has not arrived")
            if mailbox.core.num_kept(address) and tally.last_s < before_s:
                raise Violation(f"{sender} does not know that {address} has got its messages")

    def _tallies(self, *, of_dead_senders: bool = False) -> Iterator[tuple[VirtualMailbox, Tally]]:
        """The tallies between processes that both live, or whose receiver does."""
        for process, mailbox in self._mailboxes.values():
            if process.is_alive or of_dead_senders:
                for address, tally in mailbox.tallies.items():
                    receiver = self._mailboxes.get(address)
                    if receiver is not None and receiver[0].is_alive:
                        yield mailbox, tally
