"""One actor's mailbox: ZeroMQ sockets that carry `messages.WireMessage` between processes.

The data path does not go through Ray: a push over ZeroMQ costs a sixth of a Ray actor call.

What a mailbox sends to another arrives once and in order as long as both live (`delivery`),
whatever becomes of the connection. Which channels there are is decided by `mailbox_core`; here are
its sockets.

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
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

from sterna.config import MailboxKeys
from sterna.errors import UNREADABLE
from sterna.log_throttle import FILES_ADVICE, LogThrottle
from sterna.messages.actors import MAX_FRAME_BYTES, WireMessage
from sterna.messaging.framing import PART_BYTES, cut, join
from sterna.messaging.mailbox_core import MailboxCore
from sterna.messaging.reliable_channel import (
    CHANNEL_BYTES,
    HEAD_BYTES,
    IN_PARTS,
    MESSAGE,
    PROBE,
    Head,
)

logger = logging.getLogger(__name__)

SEND_QUEUE_LIMIT = 100_000
"""Messages kept for a peer that does not read; more are dropped, and the log says so."""

SEND_QUEUE_BYTES = 2 << 30
"""And bytes in them; a message is kept whatever it has, where nothing else is."""

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
        self._connections = _Connections(self._context, keys)
        self._core = MailboxCore(
            self.address,
            self._connections,
            lambda: os.urandom(CHANNEL_BYTES),
            SEND_QUEUE_LIMIT,
            SEND_QUEUE_BYTES,
        )
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
        if not self._core.send(address, content, _now_s()):
            logger.error("message dropped, queue full peer=%s type=%s", address, type(message))
            return False
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
            head = Head.decode(first)
            if self._ticking is None:
                self._tick_later()
            if head.kind in (MESSAGE, IN_PARTS):
                if self._core.on_message(head, _now_s()):
                    encoded: Payload = memoryview(first)[HEAD_BYTES:]
                    if head.kind == IN_PARTS:
                        encoded, *frames = join(frames)
                    return self._decoder.decode(encoded), frames
            elif head.kind == PROBE:
                self._core.on_probe(head, _address(first[HEAD_BYTES:]), _now_s())
            else:
                self._core.on_receipt(head, _now_s())

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
        self._core.keep_only(addresses)

    def close(self) -> None:
        """Close all sockets; queued messages are dropped."""
        if self._ticking is not None:
            self._ticking.cancel()
        self.keep_only(set())
        self._inbox.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()

    def _tick_later(self) -> None:
        if self._ticking is None and not self._inbox.closed:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self._core.on_tick(_now_s())
        if self._core.needs_tick:
            self._tick_later()


class _Connections:
    """The sockets by which one mailbox writes to others; see `mailbox_core.Connections`."""

    def __init__(self, context: zmq.asyncio.Context, keys: MailboxKeys | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._keys = keys
        self._complaint = LogThrottle()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def connect(self, address: str) -> bool:
        """Open a socket for this peer; returns False where there is no descriptor for one."""
        try:
            outbox = zmq.Socket(self._context, zmq.PUSH)
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
            return False
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
        self._sockets[address] = outbox
        return True

    def push(self, address: str, head: Head, content: Sequence[bytes]) -> None:
        if max(map(len, content)) <= PART_BYTES:
            frames = [head.encode() + content[0], *content[1:]]
        else:
            frames = [head._replace(kind=IN_PARTS).encode(), *cut(content)]
        try:
            self._sockets[address].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # Messages are kept, and asked for again; everything else is repeated anyway.
            logger.warning("sending pauses, queue full")

    def close(self, address: str) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close()


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
