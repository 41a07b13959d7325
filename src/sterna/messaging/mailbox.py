"""One actor's mailbox: ZeroMQ sockets that carry `messages.WireMessage` between processes.

The data path does not go through Ray: a push over ZeroMQ costs a sixth of a Ray actor call.

Messages from one mailbox to another arrive once and in order as long as both processes live, even
when the connection is cut (`reliable_channel`). `mailbox_core` has the channels, this module the
sockets.

The mailboxes of a run authenticate each other by the run's key pair (ZeroMQ's CURVE): a process
without it can neither send a message nor read one on the way. The keys come with the arguments of
an actor's start, through Ray; they are on no command line and in no log. Until a peer has shown its
key, its connection may hold one part of a message (`framing`) for a few seconds.
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
from sterna.messages.actors import MAX_FRAME_BYTES, PERIODIC_MESSAGES, WireMessage
from sterna.messaging.framing import PART_BYTES, cut, join
from sterna.messaging.inbox import BURST, Inbox
from sterna.messaging.mailbox_core import MailboxCore
from sterna.messaging.reliable_channel import (
    CHANNEL_BYTES,
    HEAD_BYTES,
    IN_PARTS,
    MESSAGE,
    PERIODIC,
    PROBE,
    Head,
)
from sterna.own_log import FILES_ADVICE, LogThrottle

logger = logging.getLogger(__name__)

SEND_QUEUE_LIMIT = 100_000
"""Messages kept for a peer that does not read; more are dropped, and the log says so."""

SEND_QUEUE_BYTES = 2 << 30
"""Bytes of these messages; a single message is kept whatever its size."""

ADDRESS = re.compile(r"tcp://[^/\s]+:[0-9]{1,5}")

TICK_S = 0.1
"""Time between two looks at the deadlines of probes and receipts."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 3000, 4000
"""ZeroMQ's own heartbeat, by which the sending end closes a connection that no longer carries
anything, after 7 seconds at most. Each second, those of two thousand connections would take 8 % of
a core."""

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, VANISHED_MS = 10, 5, 30_000
"""TCP's keep-alive, by which the receiving end closes the connection of a peer that has vanished,
as when its node has lost power: the kernel probes an idle connection, and closes it after this time
without an answer. ZeroMQ's heartbeat cannot do this: its timer at the receiving end (HEARTBEAT_TTL)
starts at a ping, and the next message ends it."""

CONNECT_TIMEOUT_MS, HANDSHAKE_TIMEOUT_MS = 3000, 5000
"""Time limits for a connection, after which it is tried again, and for the proof of its key. The
kernel would wait longer and longer between its attempts, and be a minute late when the link works
again."""

MAX_PEERS = 16_384
"""Limit of sockets to send by; ZeroMQ's own is 1,023."""

WRAPPING_BYTES = 1024
"""Upper bound of the bytes that a head and CURVE add to a frame."""

Payload = bytes | memoryview
Frames = Sequence[Payload]


def draw_keys() -> MailboxKeys:
    """Return the key pair of a new run."""
    public, secret = zmq.curve_keypair()
    return MailboxKeys(public, secret)


class Mailbox:
    """Receives messages at `address` and sends them to other mailboxes' addresses.

    Belongs to one asyncio loop. Sending never blocks. Deaths of peers are known from the
    supervisor's membership, not from a mailbox.

    Args:
        keys: the run's keys. None: any process that reaches the address may send, and the
            messages can be read on the way; for the processes of one test or benchmark.
    """

    def __init__(self, host: str, keys: MailboxKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_PEERS)
        self._authenticator = None if keys is None else _Authenticator(self._context, keys)
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, SEND_QUEUE_LIMIT)
        socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + WRAPPING_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
        # The kernel's TCP_USER_TIMEOUT. It ends the probes, and the wait for a confirmation of what
        # was sent last, during which the kernel does not probe.
        socket.setsockopt(zmq.TCP_MAXRT, VANISHED_MS)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        port = socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._inbox = Inbox(socket)
        self._connections = _Connections(self._context, keys)
        self._throttle, self._num_dropped = LogThrottle(), 0
        self._core = MailboxCore(
            self.address,
            self._connections,
            lambda: os.urandom(CHANNEL_BYTES),
            SEND_QUEUE_LIMIT,
            SEND_QUEUE_BYTES,
        )
        # The loop in which it is first used.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._last_message: WireMessage | None = None
        self._last_encoded = b""
        self._decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)

    def send(self, address: str, message: WireMessage, frames: Frames = ()) -> bool:
        """Queue the message for the mailbox at `address`; drop it, and return False, when it is too
        large, the queue is full, or this mailbox is closed."""
        if self._inbox.is_closed:
            return False
        encoded = self._encoded(message)
        if any(len(each) > MAX_FRAME_BYTES for each in (encoded, *frames)):
            logger.error("message dropped, too large peer=%s type=%s", address, type(message))
            return False
        content = [encoded, *map(bytes, frames)]
        if not self._core.send(address, content, _now_s(), isinstance(message, PERIODIC_MESSAGES)):
            self._num_dropped += 1
            if self._throttle.is_due():
                logger.error(
                    "message dropped, queue full peer=%s type=%s dropped_so_far=%d",
                    address,
                    type(message).__name__,
                    self._num_dropped,
                )
            return False
        if self._ticking is None:
            self._tick_later()
        return True

    def _encoded(self, message: WireMessage) -> bytes:
        """The bytes of the message; one that goes to several mailboxes in a row, such as the
        membership of a thousand, is encoded and kept once."""
        if message is not self._last_message:
            self._last_message, self._last_encoded = message, self._encoder.encode(message)
        return self._last_encoded

    async def receive(self) -> tuple[WireMessage, list[bytes]]:
        """Return the next message and its payload frames.

        Raises:
            msgspec.DecodeError, ValueError, RecursionError: the content is no message.
        """
        while True:
            first, *frames = await self._inbox.receive()
            head = Head.decode(first)
            if self._ticking is None:
                self._tick_later()
            if head.kind in (MESSAGE, PERIODIC, IN_PARTS):
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
        task: it is a bug, and the actor must not continue without it.
        """
        for number in itertools.count(1):
            try:
                message, frames = await self.receive()
            except (*UNREADABLE, ValueError) as error:
                logger.error("message dropped, undecodable error=%s", error)
            else:
                handle(message, frames)
            if number % BURST == 0:
                # Other tasks of the loop must not starve.
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
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()

    def _tick_later(self) -> None:
        if self._ticking is None and not self._inbox.is_closed:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self._core.on_tick(_now_s())
        if self._core.needs_tick:
            self._tick_later()


class _Connections:
    """The sockets by which one mailbox sends to others; see `mailbox_core.Connections`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: MailboxKeys | None) -> None:
        self._context = context
        self._keys = keys
        self._throttle, self._full_throttle = LogThrottle(), LogThrottle()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def connect(self, address: str) -> bool:
        """Open a socket for this peer; returns False when no file descriptor is left."""
        try:
            outbox = zmq.Socket(self._context, zmq.PUSH)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if self._throttle.is_due():
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
            # Messages are kept and sent again on request; everything else is repeated anyway.
            if self._full_throttle.is_due():
                logger.warning("sending pauses, queue full peer=%s", address)

    def close(self, address: str) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close()


def _address(content: bytes) -> str:
    """Return the address in a probe; raises ValueError when it is no mailbox's address."""
    address = content.decode("ascii")
    if ADDRESS.fullmatch(address) is None:
        raise ValueError("a probe must have the address of its sender's mailbox")
    return address


def _now_s() -> float:
    return time.monotonic()


class _Authenticator:
    """Authenticator of connecting peers (ZeroMQ's ZAP, RFC 27): it accepts only those that have
    proved to own the run's key.

    pyzmq's own authenticator for asyncio leaves the loop watching a descriptor that it has closed;
    the next socket with the same number then never becomes readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: MailboxKeys) -> None:
        self._public = zmq.utils.z85.decode(keys.public)
        self._requests = zmq.asyncio.Context.shadow(context).socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind("inproc://zeromq.zap.01")
        self._task = asyncio.create_task(self._answer())

    def close(self) -> None:
        """Accept no more connections."""
        self._task.cancel()
        self._requests.close()

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
            ) = await self._requests.recv_multipart()
            is_member = (
                mechanism == b"CURVE"
                and len(proved) == 1
                and hmac.compare_digest(proved[0], self._public)
            )
            if not is_member:
                logger.warning("peer rejected address=%s", address.decode(errors="replace"))
            status = (b"200", b"OK") if is_member else (b"400", b"not of this run")
            await self._requests.send_multipart([version, number, *status, b"", b""])
