"""Engine sockets: the connection of vLLM's client to its one engine, which here is the router.

All outputs go through here to vLLM's server, after every part that may have held them.
"""

from collections.abc import Sequence
from pathlib import Path

import zmq

from sterna.engine.payload_parts import unpack_frames
from sterna.engine.vllm.payload import merge_outputs
from sterna.messaging.inbox import Inbox

ENGINE_IDENTITY = (0).to_bytes(2, "little")
"""The ZeroMQ identity of the engine of rank 0 for vLLM's client."""


class EngineSockets:
    """Connects to one AsyncLLM of this process.

    Args:
        folder: a private folder for the sockets that vLLM's client binds.
        ready: an EngineCoreReadyResponse, in msgpack, which vLLM's client awaits.
    """

    def __init__(self, folder: Path, ready: bytes) -> None:
        self._input_address = f"ipc://{folder}/input"
        self._output_address = f"ipc://{folder}/output"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sending_and_receiving = self._context.socket(zmq.DEALER)
        sending_and_receiving.setsockopt(zmq.IDENTITY, ENGINE_IDENTITY)
        self._output = self._context.socket(zmq.PUSH)
        for socket, address in (
            (sending_and_receiving, self._input_address),
            (self._output, self._output_address),
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
        # ZeroMQ keeps it until the client binds its socket. So the client, which blocks the loop
        # until it has a message of its engine, can be made in this same loop.
        sending_and_receiving.send(ready, zmq.NOBLOCK)
        # Nothing more is sent on it.
        self._input = Inbox(sending_and_receiving)

    @property
    def client_addresses(self) -> dict[str, str]:
        """The addresses at which vLLM's client must bind its sockets."""
        return {"input_address": self._input_address, "output_address": self._output_address}

    async def receive(self) -> list[bytes]:
        """Return the frames of the client's next message."""
        return await self._input.receive()

    def push(self, payload: bytes) -> None:
        """Hand outputs to vLLM's client, in order."""
        self._output.send_multipart(unpack_frames(payload), zmq.NOBLOCK)

    def push_outputs(self, payloads: Sequence[bytes]) -> None:
        """Hand over the outputs of single engine requests, in as few messages as possible."""
        for payload in merge_outputs(payloads):
            self.push(payload)

    def close(self) -> None:
        """Close the sockets."""
        self._input.close()
        self._output.close()
        self._context.term()
