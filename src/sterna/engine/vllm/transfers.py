"""The transfers of one instance over all its ranks: commands out, notices in and counted.

A stage is received when every rank has received it; it has failed when one rank has failed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from sterna.config import TransportConfig
from sterna.engine.vllm.plane_link import (
    PlaneFailed,
    PlaneLink,
    PlaneNotice,
    ReceiveStage,
    SendStage,
    StageArmed,
    StopTransfers,
    TransferDone,
    TransferFailed,
    TransfersStopped,
)
from sterna.errors import TransportError
from sterna.migration.messages import CopyFailed, Event, StageFailed, StageReceived
from sterna.transport.data_plane import Transfer
from sterna.types import MigrationId

logger = logging.getLogger(__name__)


class Transfers:
    """Commands the ranks' data planes.

    Args:
        on_transfer: is told what became of each stage.
        on_failure: is told of an error here or in a plane, which is a bug: nothing would answer
            for the transfers any more.
    """

    def __init__(
        self,
        config: TransportConfig,
        on_transfer: Callable[[MigrationId, Event], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._on_transfer = on_transfer
        self._on_failure = on_failure
        self._link = PlaneLink()
        self._endpoints: tuple[str, ...] = ()
        self._sending: dict[Transfer, _Countdown] = {}
        self._armed: dict[Transfer, _Countdown] = {}
        self._arriving: dict[Transfer, _Countdown] = {}
        self._stopping: dict[MigrationId, _Countdown] = {}
        self._reader: asyncio.Task[None] | None = None
        self._notices: zmq.asyncio.Socket | None = None

    def open(self, core: Any) -> None:
        """Start a plane on every rank; belongs to the step thread."""
        opened = core.collective_rpc(
            "sterna_open_plane", args=(self._config, self._link.notice_address)
        )
        self._link.connect([command_address for command_address, _ in opened])
        self._endpoints = tuple(endpoint for _, endpoint in opened)

    def start(self) -> None:
        """Begin to listen to notices; belongs to the asyncio loop."""
        if not self._endpoints:
            return
        self._notices = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._notices.bind(self._link.notice_address)
        self._reader = asyncio.create_task(self._read(self._notices), name="sterna-notices")

    async def close(self) -> None:
        """Close the planes and stop listening."""
        if self._endpoints:
            self._link.close()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._notices is not None:
            self._notices.close(linger=0)

    def send(
        self,
        migration_id: MigrationId,
        stage: int,
        block_ids: Sequence[int],
        receivers: Sequence[str],
        *,
        is_paced: bool,
    ) -> None:
        """Have every rank send its shard of the blocks to its peer rank."""
        if len(receivers) != self._link.num_ranks:
            logger.error(
                "copy failed, the ranks differ migration=%s ours=%d theirs=%d",
                migration_id,
                self._link.num_ranks,
                len(receivers),
            )
            self._on_transfer(migration_id, CopyFailed(stage))
            return
        transfer = Transfer(migration_id, stage)
        self._sending[transfer] = _Countdown(self._link.num_ranks)
        for rank, endpoint in enumerate(receivers):
            self._link.send_to(rank, SendStage(transfer, endpoint, list(block_ids), is_paced))

    def stop_sending(self, migration_id: MigrationId) -> None:
        """Drop what is still to be sent."""
        for transfer in [t for t in self._sending if t.migration_id == migration_id]:
            del self._sending[transfer]
        self._link.send_to_all(StopTransfers(migration_id))

    async def expect(
        self, migration_id: MigrationId, stage: int, block_ids: Sequence[int]
    ) -> tuple[str, ...]:
        """Have every rank expect the stage; returns their endpoints when all do."""
        if not block_ids:
            return self._endpoints
        transfer = Transfer(migration_id, stage)
        self._armed[transfer] = armed = _Countdown(self._link.num_ranks)
        self._arriving[transfer] = _Countdown(self._link.num_ranks)
        self._link.send_to_all(ReceiveStage(transfer, list(block_ids)))
        await armed.done
        return self._endpoints

    def is_expecting(self, migration_id: MigrationId) -> bool:
        """Whether receivers listen for a stage of the migration."""
        return any(transfer.migration_id == migration_id for transfer in self._arriving)

    async def stop(self, migration_id: MigrationId) -> None:
        """Stop all transfers of the migration; returns when no rank reads or writes for it."""
        for transfer in [t for t in self._arriving if t.migration_id == migration_id]:
            del self._arriving[transfer]
        if not self._endpoints:
            return
        stopping = self._stopping.get(migration_id)
        if stopping is None:
            stopping = self._stopping[migration_id] = _Countdown(self._link.num_ranks)
            self._link.send_to_all(StopTransfers(migration_id))
        await asyncio.shield(stopping.done)

    async def _read(self, notices: zmq.asyncio.Socket) -> None:
        decoder: msgspec.msgpack.Decoder[PlaneNotice] = msgspec.msgpack.Decoder(PlaneNotice)
        try:
            while True:
                self._on_notice(decoder.decode(await notices.recv()))
        except Exception as error:
            logger.exception("transfers failed")
            self._on_failure(error)

    def _on_notice(self, notice: PlaneNotice) -> None:
        match notice:
            case StageArmed(_, transfer):
                if transfer in self._armed and self._armed[transfer].count():
                    del self._armed[transfer]
            case TransferDone(_, transfer, is_sent, copy_bytes, duration_s):
                logger.debug(
                    "stage %s migration=%s stage=%d bytes=%d duration_ms=%.1f",
                    "sent" if is_sent else "received",
                    transfer.migration_id,
                    transfer.stage,
                    copy_bytes,
                    duration_s * 1e3,
                )
                under_way = self._sending if is_sent else self._arriving
                if transfer in under_way and under_way[transfer].count():
                    del under_way[transfer]
                    if not is_sent:
                        self._on_transfer(transfer.migration_id, StageReceived(transfer.stage))
            case TransferFailed(rank, transfer, is_send, reason):
                logger.warning(
                    "stage failed migration=%s stage=%d rank=%d side=%s reason=%s",
                    transfer.migration_id,
                    transfer.stage,
                    rank,
                    "source" if is_send else "destination",
                    reason,
                )
                failed = CopyFailed(transfer.stage) if is_send else StageFailed(transfer.stage)
                under_way = self._sending if is_send else self._arriving
                # The first rank that fails has failed the stage.
                if under_way.pop(transfer, None) is not None:
                    self._on_transfer(transfer.migration_id, failed)
            case TransfersStopped(_, migration_id):
                if migration_id in self._stopping and self._stopping[migration_id].count():
                    del self._stopping[migration_id]
            case PlaneFailed(rank, reason):
                raise TransportError(f"the KV plane of rank {rank} broke: {reason}")


class _Countdown:
    """Done when every rank has been counted."""

    def __init__(self, num_ranks: int) -> None:
        self._num_left = num_ranks
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self) -> bool:
        self._num_left -= 1
        if self._num_left == 0 and not self.done.done():
            self.done.set_result(None)
        return self._num_left == 0
