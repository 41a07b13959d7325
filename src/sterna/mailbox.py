"""One actor's mailbox: ZeroMQ sockets that carry `messages.WireMessage` between processes.

The data path does not go through Ray: a push over ZeroMQ costs a sixth of a Ray actor call.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from sterna.messages import WireMessage

logger = logging.getLogger(__name__)

SEND_QUEUE_LIMIT = 100_000
"""Messages kept for a peer that does not read; more are dropped, and the log says so."""

Frames = Sequence[bytes | memoryview]


class Mailbox:
    """Receives messages at `address` and sends them to other mailboxes' addresses.

    Belongs to one asyncio loop. Sending never blocks and promises nothing; a dead peer is
    learnt from the supervisor's membership, not from here.
    """

    def __init__(self, host: str) -> None:
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, SEND_QUEUE_LIMIT)
        self._inbox.setsockopt(zmq.LINGER, 0)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._send_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)

    def send(self, address: str, message: WireMessage, frames: Frames = ()) -> None:
        """Queue the message for the mailbox at `address`; drop it when the queue is full, or this
        mailbox is closed."""
        if self._inbox.closed:
            return
        outbox = self._outboxes.get(address)
        if outbox is None:
            outbox = zmq.Socket(self._send_context, zmq.PUSH)
            outbox.setsockopt(zmq.SNDHWM, SEND_QUEUE_LIMIT)
            outbox.setsockopt(zmq.LINGER, 0)
            outbox.connect(address)
            self._outboxes[address] = outbox
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
            except msgspec.DecodeError as error:
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
        self._context.term()
