"""Link between an instance and the KV data planes of its workers, one plane a rank.

The KV cache is in the process of vLLM's worker: the instance's own process, or with tensor
parallelism one process a rank. In both cases the link uses two ZeroMQ sockets a rank, so that a
copy never waits for the worker's step or its serial RPC loop.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from sterna.folders import private_folder
from sterna.transport.data_plane import DataPlane, PlaneEvent, Transfer
from sterna.types import MigrationId

logger = logging.getLogger(__name__)


class SendStage(msgspec.Struct, frozen=True, tag=True):
    """Instance -> worker: see `DataPlane.send`."""

    transfer: Transfer
    endpoint: str
    block_ids: list[list[int]]
    is_paced: bool


class ReceiveStage(msgspec.Struct, frozen=True, tag=True):
    """Instance -> worker: see `DataPlane.receive`. Answer: StageArmed."""

    transfer: Transfer
    block_ids: list[list[int]]


class StopTransfers(msgspec.Struct, frozen=True, tag=True):
    """Instance -> worker: see `DataPlane.stop`."""

    migration_id: MigrationId


class ClosePlane(msgspec.Struct, frozen=True, tag=True):
    """Instance -> worker: close the plane and end its threads."""


class StageArmed(msgspec.Struct, frozen=True, tag=True):
    """The rank expects the transfer, and no step writes to its blocks: the source may begin."""

    transfer: Transfer


class PlaneFailed(msgspec.Struct, frozen=True, tag=True):
    """The plane failed, which is a bug; it does not answer further commands."""

    reason: str


PlaneCommand = SendStage | ReceiveStage | StopTransfers | ClosePlane
RankEvent = PlaneEvent | StageArmed | PlaneFailed


class PlaneNotice(msgspec.Struct, frozen=True):
    """Worker -> instance: what happened on a rank."""

    rank: int
    event: RankEvent


class PlaneServer:
    """Worker side: carries out commands on a data plane and reports its events.

    One thread waits for commands; the plane's own threads report.
    """

    def __init__(
        self,
        rank: int,
        notice_address: str,
        make_plane: Callable[[Callable[[PlaneEvent], None]], DataPlane],
    ) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._notices = self._context.socket(zmq.PUSH)
        self._notices.setsockopt(zmq.LINGER, 0)
        self._notices.connect(notice_address)
        # ZeroMQ sockets belong to one thread at a time; several threads report.
        self._notices_lock = threading.Lock()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._directory = private_folder("plane")
        self.command_address = f"ipc://{self._directory.name}/commands"
        self._commands.bind(self.command_address)
        self.plane = make_plane(self._report)
        self._thread = threading.Thread(
            target=self._serve, name=f"sterna-plane-{rank}", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._carry_out_commands()
        except Exception as error:
            logger.exception("kv plane failed rank=%d", self._rank)
            self._report(PlaneFailed(repr(error)))
        self.plane.close()
        self._commands.close()
        with self._notices_lock:
            # The last reports are still sent.
            self._notices.close(linger=1000)
        with contextlib.suppress(OSError):
            self._directory.cleanup()

    def _carry_out_commands(self) -> None:
        """Carry out commands until the plane is to be closed."""
        decoder: msgspec.msgpack.Decoder[PlaneCommand] = msgspec.msgpack.Decoder(PlaneCommand)
        while True:
            command = decoder.decode(self._commands.recv())
            match command:
                case SendStage(transfer, endpoint, block_ids, is_paced):
                    self.plane.send(transfer, endpoint, block_ids, is_paced=is_paced)
                case ReceiveStage(transfer, block_ids):
                    armed = StageArmed(transfer)
                    self.plane.receive(transfer, block_ids, partial(self._report, armed))
                case StopTransfers(migration_id):
                    self.plane.stop(migration_id)
                case ClosePlane():
                    return

    def _report(self, event: RankEvent) -> None:
        with self._notices_lock:
            if not self._notices.closed:
                self._notices.send(msgspec.msgpack.encode(PlaneNotice(self._rank, event)))


class PlaneLink:
    """Instance side: commands to all ranks, and the address to which they report."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._directory = private_folder("notices")
        self.notice_address = f"ipc://{self._directory.name}/notices"
        self._ranks: list[zmq.Socket[bytes]] = []

    def connect(self, command_addresses: list[str]) -> None:
        """Connect to the ranks' command sockets, in rank order."""
        for address in command_addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 200)
            socket.connect(address)
            self._ranks.append(socket)

    @property
    def num_ranks(self) -> int:
        """Number of workers."""
        return len(self._ranks)

    def send_to(self, rank: int, command: PlaneCommand) -> None:
        """Queue the command for one rank."""
        self._ranks[rank].send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    def send_to_all(self, command: PlaneCommand) -> None:
        """Queue the command for every rank."""
        for rank in range(self.num_ranks):
            self.send_to(rank, command)

    def close(self) -> None:
        """End the ranks' planes and close the sockets."""
        self.send_to_all(ClosePlane())
        for socket in self._ranks:
            socket.close()
        self._ranks.clear()
        with contextlib.suppress(OSError):
            self._directory.cleanup()
