"""A ZeroMQ socket from which one task of an asyncio loop receives.

pyzmq's own sockets for asyncio make a future, a timer and several callbacks for each message. Here
the loop watches the socket's descriptor, and what has arrived is read in one go.

ZeroMQ's descriptor does not say whether there is a message. It becomes readable when something new
has happened to the socket, and stays so until the socket has looked. After that it says nothing of
messages that are still there: all have to be read, until there is none.
"""

import asyncio
from collections import deque

import zmq

BURST = 16
"""Messages that are read in a row. A task that receives should let others run after as many."""


class Inbox:
    """Receives on a socket, which it owns, in a loop that has `add_reader`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        # The loop that watches the descriptor.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read: deque[list[bytes]] = deque()
        # Whether everything had been read at the last look.
        self._is_empty = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed."""
        return self._socket.closed

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message; for one task at a time.

        Raises:
            RuntimeError: it is closed, or another task waits for the next message.
        """
        while not self._read:
            if self.is_closed:
                raise RuntimeError("the socket is closed")
            if self._is_empty:
                await self._wait()
            else:
                self._read_burst()
        return self._read.popleft()

    def close(self) -> None:
        """Close the socket; what has not been received is dropped, and a wait is cancelled."""
        self._watch(None)
        self._socket.close()
        self._read.clear()
        if self._waiter is not None:
            self._waiter.cancel()

    async def _wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("another task waits for the next message")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._watch(loop)
        waiter = self._waiter = loop.create_future()
        try:
            await waiter
        finally:
            # A task that was cancelled hears of it when another one may already wait.
            if self._waiter is waiter:
                self._waiter = None

    def _on_event(self) -> None:
        if len(self._read) >= BURST:
            # Its task does something else. The loop would call this again and again.
            self._watch(None)
            return
        try:
            self._read_burst()
        finally:
            # After an error the task reads itself, and gets it.
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _read_burst(self) -> None:
        self._is_empty = False
        try:
            while len(self._read) < BURST:
                self._read.append(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            self._is_empty = True

    def _watch(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have this loop watch the descriptor, and no other one."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        self._loop = loop
        if loop is not None:
            loop.add_reader(self._descriptor, self._on_event)
