"""One actor's mailbox: ZeroMQ sockets that carry `messages.WireMessage` between processes.

The data path does not go through Ray: a push over ZeroMQ costs a sixth of a Ray actor call.

What a mailbox sends to another arrives once and in order as long as both live (`delivery`),
whatever becomes of the connection.

The mailboxes of a run know each other by its key pair (ZeroMQ's CURVE): who does not have it
neither gets a message in nor reads one on the way. The keys come with the arguments of an actor's
start, through Ray; they are on no command line and in no log. Until a peer has shown its key, its
connection may hold a part of a message (`parts`) for a few seconds, and no more.
"""

import asyncio
import errno
import hmac
import itertools
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

from sterna.config import MailboxKeys
from sterna.errors import UNREADABLE
from sterna.log_throttle import FILES_ADVICE, LogThrottle
from sterna.messages.actors import MAX_FRAME_BYTES, WireMessage
from sterna.messaging.framing import PART_BYTES, cut, join
from sterna.messaging.reliable_channel import (
    CHANNEL_BYTES,
    HEAD_BYTES,
    IN_PARTS,
    MESSAGE,
    PROBE,
    Head,
    ReceivingEnd,
    SendingEnd,
)

logger = logging.getLogger(__name__)

SEND_QUEUE_LIMIT = 100_000
"""Messages kept for a peer that does not read; more are dropped, and the log says so."""

SEND_QUEUE_BYTES = 2 << 30
"""And bytes in them; a message is kept whatever it has, where nothing else is."""

MAX_ORIGINS = 100_000
"""Mailboxes that have written, of which is remembered how far they had come; the one that has been
silent for longest is forgotten first, long after it has ended."""

ADDRESS = re.compile(r"tcp://[^/\s]+:[0-9]{1,5}")

BURST = 16
"""Messages that are handled in a row before other tasks of the loop get their turn."""

TICK_S = 0.1
"""How exactly probes and receipts are on time."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 4000
"""ZeroMQ's own, by which it gives up a connection on which nothing comes through any more."""

CONNECT_TIMEOUT_MS, HANDSHAKE_TIMEOUT_MS = 3000, 5000
"""After so long a connection that does not come about is tried anew. The kernel would wait longer
and longer between its attempts, and be a minute late where a link is whole again. Who connects and
has not shown a key by then is cut."""

WRAPPING_BYTES = 1024
"""What its head and CURVE may add to a frame, and more."""

Payload = bytes | memoryview
Frames = Sequence[Payload]


def draw_keys() -> MailboxKeys:
    """Return the key pair of a new run."""
    public, secret = zmq.curve_keypair()
    return MailboxKeys(public, secret)


@dataclass(slots=True)
class _Outbox:
    """The way to another mailbox; without a socket until there is a descriptor for one."""

    socket: zmq.Socket[bytes] | None
    channel: SendingEnd


@dataclass(slots=True)
class _Origin:
    """A way from another mailbox; its address is known from the first probe on."""

    channel: ReceivingEnd
    address: str | None = None


class Mailbox:
    """Receives messages at `address` and sends them to other mailboxes' addresses.

    Belongs to one asyncio loop. Sending never blocks; a dead peer is learnt from the supervisor's
    membership, not from here.

    Args:
        keys: those of the run. None: whoever reaches the address may send, and read what passes;
            for processes that one test or benchmark has started for itself.
    """

    def __init__(self, host: str, keys: MailboxKeys | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._keys = keys
        self._doorkeeper = None if keys is None else _Doorkeeper(self._context, keys)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, SEND_QUEUE_LIMIT)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + WRAPPING_BYTES)
        self._inbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        self._inbox.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._inbox.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._inbox.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._burst: zmq.Socket[bytes] = zmq.Socket.shadow(self._inbox)
        self._send_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._complaint = LogThrottle()
        self._outboxes: dict[str, _Outbox] = {}
        self._addresses: dict[bytes, str] = {}
        self._origins: OrderedDict[bytes, _Origin] = OrderedDict()
        # The first that it is used in.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)

    def send(self, address: str, message: WireMessage, frames: Frames = ()) -> bool:
        """Queue the message for the mailbox at `address`; drop it, and return False, when it is too
        large, the queue is full, or this mailbox is closed."""
        if self._inbox.closed:
            return False
        encoded = self._encoder.encode(message)
        if any(len(each) > MAX_FRAME_BYTES for each in (encoded, *frames)):
            logger.error("message dropped, too large peer=%s type=%s", address, type(message))
            return False
        content = [encoded, *map(bytes, frames)]
        outbox = self._outboxes.get(address) or self._outbox(address)
        head = outbox.channel.send(content, _now_s())
        if head is None:
            logger.error("message dropped, queue full peer=%s type=%s", address, type(message))
            return False
        _push(outbox, head, content)
        if self._ticking is None:
            self._tick_later()
        return True

    async def receive(self) -> tuple[WireMessage, list[bytes]]:
        """Return the next message and its payload frames.

        Raises:
            msgspec.DecodeError, ValueError, RecursionError: what came is no message.
        """
        while True:
            try:
                # In a burst, asyncio would cost more than the rest. A descriptor of ZeroMQ's tells
                # only once of what has come; pyzmq looks again before it waits for it, so that
                # nothing is missed as long as one task receives.
                first, *frames = self._burst.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                first, *frames = await self._inbox.recv_multipart()
            head = kind, channel, number = Head.decode(first)
            if kind in (MESSAGE, IN_PARTS):
                origin = self._origins.get(channel) or self._origin(channel)
                now_s = _now_s()
                is_next = origin.channel.on_message(number, now_s)
                due_s = origin.channel.next_deadline_s
                if due_s is not None and due_s <= now_s:
                    self._confirm(origin)
                elif self._ticking is None:
                    self._tick_later()
                if is_next:
                    encoded: Payload = memoryview(first)[HEAD_BYTES:]
                    if kind == IN_PARTS:
                        encoded, *frames = join(frames)
                    return self._decoder.decode(encoded), frames
            elif kind == PROBE:
                origin = self._origin(channel)
                origin.address = _address(first[HEAD_BYTES:])
                origin.channel.on_probe(number, _now_s())
                self._confirm(origin)
            else:
                self._on_receipt(head)

    async def deliver(self, handle: Callable[[WireMessage, list[bytes]], None]) -> None:
        """Hand every message to `handle`, forever.

        A message that does not decode is logged and dropped. An error of the handler ends the
        task: it is a bug, and the actor must not go on half alive.
        """
        for number in itertools.count(1):
            try:
                message, frames = await self.receive()
            except (*UNREADABLE, ValueError) as error:
                logger.error("message dropped, undecodable error=%s", error)
            else:
                handle(message, frames)
            if number % BURST == 0:
                # The loop's other tasks must not starve.
                await asyncio.sleep(0)

    def keep_only(self, addresses: set[str]) -> None:
        """Close the connections to all mailboxes but these."""
        for address in set(self._outboxes) - addresses:
            socket = self._outboxes.pop(address).socket
            if socket is not None:
                socket.close()
        self._addresses = {
            channel: address
            for channel, address in self._addresses.items()
            if address in self._outboxes
        }

    def close(self) -> None:
        """Close all sockets; queued messages are dropped."""
        if self._ticking is not None:
            self._ticking.cancel()
        self.keep_only(set())
        self._inbox.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()

    # ----------------------------------------------------------------------------- channels

    def _outbox(self, address: str) -> _Outbox:
        outbox = self._outboxes.get(address)
        if outbox is None:
            channel = os.urandom(CHANNEL_BYTES)
            outbox = _Outbox(
                self._connect(address), SendingEnd(channel, SEND_QUEUE_LIMIT, SEND_QUEUE_BYTES)
            )
            self._outboxes[address] = outbox
            self._addresses[channel] = address
            self._probe(outbox, outbox.channel.hello())
        return outbox

    def _origin(self, channel: bytes) -> _Origin:
        origin = self._origins.get(channel)
        if origin is None:
            origin = self._origins[channel] = _Origin(ReceivingEnd(channel))
            if len(self._origins) > MAX_ORIGINS:
                self._origins.popitem(last=False)
        # Each asks now and then, so that the order is that of the last signs of life, nearly.
        self._origins.move_to_end(channel)
        return origin

    def _on_receipt(self, head: Head) -> None:
        address = self._addresses.get(head.channel)
        if address is not None:
            outbox = self._outboxes[address]
            for again, content in outbox.channel.on_receipt(head, _now_s()):
                _push(outbox, again, content)

    def _confirm(self, origin: _Origin) -> None:
        """Send a receipt if one is due, else see to it that it will be sent."""
        if origin.address is not None and not self._inbox.closed:
            receipt = origin.channel.receipt(_now_s())
            if receipt is not None:
                _push(self._outbox(origin.address), receipt, (b"",))
        self._tick_later()

    def _probe(self, outbox: _Outbox, probe: Head) -> None:
        _push(outbox, probe, [self.address.encode("ascii")])

    def _tick_later(self) -> None:
        if self._ticking is None and not self._inbox.closed:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        for address, outbox in list(self._outboxes.items()):
            probe = outbox.channel.probe(_now_s())
            if outbox.socket is None:
                outbox.socket = self._connect(address)
                probe = outbox.channel.hello()
            if probe is not None:
                self._probe(outbox, probe)
        for origin in list(self._origins.values()):
            if origin.channel.next_deadline_s is not None:
                self._confirm(origin)
        if any(
            each.socket is None or each.channel.next_deadline_s is not None
            for each in self._outboxes.values()
        ):
            self._tick_later()

    def _connect(self, address: str) -> zmq.Socket[bytes] | None:
        """Return a socket for this peer; None where there is no descriptor for one."""
        try:
            outbox = zmq.Socket(self._send_context, zmq.PUSH)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if self._complaint.is_due():
                logger.error(
                    "peer cannot be connected to, its messages wait peer=%s reason=%s; %s",
                    address,
                    error,
                    FILES_ADVICE,
                )
            self._tick_later()
            return None
        outbox.setsockopt(zmq.SNDHWM, SEND_QUEUE_LIMIT)
        outbox.setsockopt(zmq.LINGER, 0)
        outbox.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        outbox.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        outbox.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        outbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        if self._keys is not None:
            outbox.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            outbox.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            outbox.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)
        outbox.connect(address)
        return outbox


def _push(outbox: _Outbox, head: Head, content: Sequence[bytes]) -> None:
    if outbox.socket is None:
        # The probe that goes first, when there is one, has the other side ask for what is kept.
        return
    if max(map(len, content)) <= PART_BYTES:
        frames = [head.encode() + content[0], *content[1:]]
    else:
        frames = [head._replace(kind=IN_PARTS).encode(), *cut(content)]
    try:
        outbox.socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        # Messages are kept, and asked for again; everything else is repeated anyway.
        logger.warning("sending pauses, queue full")


def _address(content: bytes) -> str:
    """Raises ValueError: it is no mailbox's address."""
    address = content.decode("ascii")
    if ADDRESS.fullmatch(address) is None:
        raise ValueError("a probe must say where its sender has its mailbox")
    return address


def _now_s() -> float:
    return time.monotonic()


class _Doorkeeper:
    """Answers what ZeroMQ asks of each peer that wants to come in (its ZAP, RFC 27): only who has
    proved to own the run's key may.

    pyzmq's own for asyncio leaves the loop watching a descriptor that it has closed, and the next
    socket with the same number is then never heard.
    """

    def __init__(self, context: zmq.asyncio.Context, keys: MailboxKeys) -> None:
        self._public = zmq.utils.z85.decode(keys.public)
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind("inproc://zeromq.zap.01")
        self._answering = asyncio.create_task(self._answer())

    def close(self) -> None:
        """Let nobody in any more."""
        self._answering.cancel()
        self._questions.close()

    async def _answer(self) -> None:
        while True:
            (
                version,
                number,
                _,
                address,
                _,
                mechanism,
                *proved,
            ) = await self._questions.recv_multipart()
            is_member = (
                mechanism == b"CURVE"
                and len(proved) == 1
                and hmac.compare_digest(proved[0], self._public)
            )
            if not is_member:
                logger.warning("stranger turned away address=%s", address.decode(errors="replace"))
            status = (b"200", b"OK") if is_member else (b"400", b"not of this run")
            await self._questions.send_multipart([version, number, *status, b"", b""])
