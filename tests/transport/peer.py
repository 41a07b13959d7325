"""A node in a process of its own, to be killed or frozen."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from sterna.transport.data_plane import Transfer
from tests.transport.planes import WAIT_S, Node

_context = multiprocessing.get_context("forkserver")
# Importing torch takes seconds; a server that has done so forks peers in milliseconds.
_context.set_forkserver_preload(["tests.transport.peer"])


class Peer:
    """Runs a `Node` and tells it what to do; looks enough like one to be sent to."""

    def __init__(self, kind: str, **options: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(theirs, kind, options))
        self.process.start()
        theirs.close()
        # The first one waits for the server, which imports torch.
        assert self._pipe.poll(250), "the peer did not start"
        self.plane = self
        self.endpoint: str = self._pipe.recv()

    def receive(self, transfer: Transfer, ids: list[int]) -> None:
        self._call("receive", transfer, ids)

    def send(self, transfer: Transfer, endpoint: str, ids: list[int], *, is_paced: bool) -> None:
        self._call("send", transfer, endpoint, ids, is_paced)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self._pipe.close()

    def freeze(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def _call(self, *order: object) -> None:
        self._pipe.send(order)
        assert self._pipe.poll(WAIT_S), "the peer did not answer"
        self._pipe.recv()


def _run(pipe: Connection, kind: str, options: dict[str, Any]) -> None:
    node = Node(kind, **options)
    pipe.send(node.plane.endpoint)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        match order:
            case ("receive", transfer, ids):
                node.receive(transfer, ids)
            case ("send", transfer, endpoint, ids, is_paced):
                node.plane.send(transfer, endpoint, [ids], is_paced=is_paced)
        pipe.send("done")
