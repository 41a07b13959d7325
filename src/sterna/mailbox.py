"""One actor's mailbox: ZeroMQ sockets that carry `messages.WireMessage` between processes.

The data path does not go through Ray: a push over ZeroMQ costs a sixth of a Ray actor call.

The mailboxes of a run know each other by its key pair (ZeroMQ's CURVE): who does not have it
neither gets a message in nor reads one on the way. The keys come with the arguments of an actor's
start, through Ray; they are on no command line and in no log.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

from sterna.config import MailboxKeys
from sterna.messages import WireMessage

logger = logging.getLogger(__name__)

SEND_QUEUE_LIMIT = 100_000
"""Messages kept for a peer that does not read; more are dropped, and the log says so."""

MAX_FRAME_BYTES = 512 << 20
"""Of one frame: far above the largest request that a front end lets in, with its images as tensors.
The connection of a peer that sends more is cut."""

WRAPPING_BYTES = 1024
"""What CURVE may add to a frame, and more."""

Frames = Sequence[bytes | memoryview]


def draw_keys() -> MailboxKeys:
    """Return the key pair of a new run."""
    public, secret = zmq.curve_keypair()
    return MailboxKeys(public, secret)


class Mailbox:
    """Receives messages at `address` and sends them to other mailboxes' addresses.

    Belongs to one asyncio loop. Sending never blocks and promises nothing; a dead peer is
    learnt from the supervisor's membership, not from here.

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
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + WRAPPING_BYTES)
        self._inbox.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._inbox.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._inbox.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._send_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)

    def send(self, address: str, message: WireMessage, frames: Frames = ()) -> None:
        """Queue the message for the mailbox at `address`; drop it when it is too large, the queue
        is full, or this mailbox is closed."""
        if self._inbox.closed:
            return
        if any(len(frame) > MAX_FRAME_BYTES for frame in frames):
            # The other side would cut the connection, and what else is on its way would be lost.
            logger.error("message dropped, too large peer=%s type=%s", address, type(message))
            return
        outbox = self._outboxes.get(address)
        if outbox is None:
            outbox = self._outboxes[address] = self._connect(address)
        try:
            outbox.send_multipart([self._encoder.encode(message), *frames], zmq.NOBLOCK)
        except zmq.Again:
            logger.error("message dropped, queue full peer=%s type=%s", address, type(message))

    async def receive(self) -> tuple[WireMessage, list[bytes]]:
        """Return the next message and its payload frames."""
        head, *frames = await self._inbox.recv_multipart()
        return self._decoder.decode(head), frames

    async def deliver(self, handle: Callable[[WireMessage, list[bytes]], None]) -> None:
        """Hand every message to `handle`, forever.

        A message that does not decode is logged and dropped. An error of the handler ends the
        task: it is a bug, and the actor must not go on half alive.
        """
        while True:
            try:
                message, frames = await self.receive()
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                logger.error("message dropped, undecodable error=%s", error)
                continue
            handle(message, frames)
            # A burst must not starve the loop's other tasks.
            await asyncio.sleep(0)

    def keep_only(self, addresses: set[str]) -> None:
        """Close the connections to all mailboxes but these."""
        for address in set(self._outboxes) - addresses:
            self._outboxes.pop(address).close()

    def close(self) -> None:
        """Close all sockets; queued messages are dropped."""
        self.keep_only(set())
        self._inbox.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        outbox = zmq.Socket(self._send_context, zmq.PUSH)
        outbox.setsockopt(zmq.SNDHWM, SEND_QUEUE_LIMIT)
        outbox.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            outbox.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            outbox.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            outbox.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)
        outbox.connect(address)
        return outbox


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
