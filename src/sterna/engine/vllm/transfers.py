"""Transfers of one instance over all its ranks: sends commands and counts the ranks' notices.

A stage is received when every rank has received it; it has failed when one rank has failed. What
several ranks hold alike is sent to one of them, which forwards it (`transport.shards`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
)
from sterna.errors import TransportError
from sterna.migration.messages import CopyEvent, CopyFailed, StageFailed, StageReceived
from sterna.transport.data_plane import (
    Arrived,
    BlockIds,
    Hop,
    ReceiveFailed,
    SendFailed,
    Sent,
    Stopped,
    Transfer,
)
from sterna.transport.shards import Shards
from sterna.types import MigrationId

logger = logging.getLogger(__name__)

Key = TypeVar("Key")


class Transfers:
    """Commands the ranks' data planes.

    Args:
        on_transfer: called with the outcome of each stage.
        on_sent: called with the number of bytes that a rank has sent to another instance.
        on_failure: called with an error here or in a plane, which is a bug: the transfers would
            have no outcome.
    """

    def __init__(
        self,
        config: TransportConfig,
        on_transfer: Callable[[MigrationId, CopyEvent], None],
        on_sent: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._on_transfer = on_transfer
        self._on_sent = on_sent
        self._on_failure = on_failure
        self._link = PlaneLink()
        self._endpoints: tuple[str, ...] = ()
        self._shards = Shards(0, ())
        self._sending: dict[Transfer, _Countdown] = {}
        self._armed: dict[Transfer, _Countdown] = {}
        self._arriving: dict[Transfer, _Arriving] = {}
        self._stopping: dict[MigrationId, _Countdown] = {}
        self._reader: asyncio.Task[None] | None = None
        self._notices: zmq.asyncio.Socket | None = None

    def open(self, core: Any, shards: Shards, label: str) -> None:
        """Start a plane on every rank; must be called on the step thread.

        Args:
            label: see `KvCache`.
        """
        self._shards = shards
        opened = core.collective_rpc(
            "sterna_open_plane", args=(self._config, self._link.notice_address, label)
        )
        self._link.connect([command_address for command_address, _ in opened])
        self._endpoints = tuple(endpoint for _, endpoint in opened)

    @property
    def is_open(self) -> bool:
        """Whether the ranks have planes."""
        return bool(self._endpoints)

    def start(self) -> None:
        """Start to read notices; must be called on the asyncio loop."""
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
        block_ids: BlockIds,
        receivers: Sequence[str],
        *,
        is_paced: bool,
    ) -> None:
        """Command the ranks to send their shards of the blocks to their peer ranks."""
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
        leads = self._shards.leads
        self._sending[transfer] = _Countdown(len(leads))
        for rank in leads:
            ids = self._shards.part(block_ids, rank, rank)
            self._link.send_to(rank, SendStage(transfer, receivers[rank], ids, is_paced))

    def stop_sending(self, migration_id: MigrationId) -> None:
        """Cancel the migration's stages that are not sent yet."""
        for transfer in [t for t in self._sending if t.migration_id == migration_id]:
            del self._sending[transfer]
        self._link.send_to_all(StopTransfers(migration_id))

    async def expect(
        self, migration_id: MigrationId, stage: int, block_ids: BlockIds, *, is_last: bool
    ) -> tuple[str, ...]:
        """Make the ranks expect the stage; returns their endpoints when all do.

        Args:
            block_ids: () for a stage that does not come; there may be no block in any group.
            is_last: a request waits for it.
        """
        if not block_ids:
            return self._endpoints
        transfer = Transfer(migration_id, stage)
        leads, hops = self._shards.leads, self._shards.hops
        num_copies = len(leads) + len(hops)
        self._armed[transfer] = armed = _Countdown(num_copies)
        self._arriving[transfer] = _Arriving(block_ids, is_last, _Countdown(num_copies))
        for rank in leads:
            ids = self._shards.part(block_ids, rank, rank)
            self._link.send_to(rank, ReceiveStage(transfer, ids))
        for hop in hops:
            ids = self._shards.part(block_ids, *hop)
            self._link.send_to(hop.rank, ReceiveStage(replace(transfer, hop=hop), ids))
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
        match notice.event:
            case StageArmed(transfer):
                _count(self._armed, replace(transfer, hop=None))
            case Sent(transfer) as sent:
                _log("stage sent", sent)
                if transfer.hop is None:
                    self._on_sent(sent.copy_bytes)
                _count(self._sending, transfer)
            case Arrived(transfer) as arrived:
                _log("stage received", arrived)
                self._on_arrived(notice.rank, arrived)
            case SendFailed(Transfer(hop=Hop()) as transfer) as failed:
                _log_failure(notice.rank, "destination", failed)
                self._lose(transfer)
            case SendFailed(transfer) as failed:
                _log_failure(notice.rank, "source", failed)
                # The stage fails with the first rank that fails.
                if self._sending.pop(transfer, None) is not None:
                    self._on_transfer(transfer.migration_id, CopyFailed(transfer.stage))
            case ReceiveFailed(transfer) as failed:
                _log_failure(notice.rank, "destination", failed)
                self._lose(transfer)
            case Stopped(migration_id):
                _count(self._stopping, migration_id)
            case PlaneFailed(reason):
                raise TransportError(f"the KV plane of rank {notice.rank} failed: {reason}")

    def _on_arrived(self, rank: int, arrived: Arrived) -> None:
        transfer = arrived.transfer
        stage = replace(transfer, hop=None)
        arriving = self._arriving.get(stage)
        if arriving is None or arriving.is_lost:
            return
        if transfer.hop is None:
            # The source may send fewer blocks than are expected.
            came = [
                ids[:count]
                for ids, count in zip(arriving.block_ids, arrived.num_blocks, strict=True)
            ]
            is_paced = not arriving.is_last
            for hop in (hop for hop in self._shards.hops if hop.lead == rank):
                ids, endpoint = self._shards.part(came, *hop), self._endpoints[hop.rank]
                forwarded = replace(stage, hop=hop)
                self._link.send_to(rank, SendStage(forwarded, endpoint, ids, is_paced))
        if arriving.left.count():
            del self._arriving[stage]
            self._on_transfer(stage.migration_id, StageReceived(stage.stage))

    def _lose(self, transfer: Transfer) -> None:
        """Fail the stage of a transfer to or within this instance."""
        arriving = self._arriving.get(replace(transfer, hop=None))
        if arriving is not None and not arriving.is_lost:
            arriving.is_lost = True
            self._on_transfer(transfer.migration_id, StageFailed(transfer.stage))


def _log(what: str, event: Sent | Arrived) -> None:
    logger.debug(
        "%s migration=%s stage=%d bytes=%d duration_ms=%.1f",
        what,
        event.transfer.migration_id,
        event.transfer.stage,
        event.copy_bytes,
        event.duration_s * 1e3,
    )


def _log_failure(rank: int, side: str, event: SendFailed | ReceiveFailed) -> None:
    logger.warning(
        "stage failed migration=%s stage=%d rank=%d side=%s reason=%s",
        event.transfer.migration_id,
        event.transfer.stage,
        rank,
        side,
        event.reason,
    )


class _Countdown:
    """Counter of ranks; `done` ends when every rank has been counted."""

    def __init__(self, num_ranks: int) -> None:
        self._num_left = num_ranks
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self) -> bool:
        self._num_left -= 1
        if self._num_left == 0 and not self.done.done():
            self.done.set_result(None)
        return self._num_left == 0


@dataclass(slots=True)
class _Arriving:
    """A stage that is expected.

    Attributes:
        block_ids: where it is to go.
        is_last: a request waits for it; others are forwarded as bulk copies.
        left: transfers to ranks, from the source and by hops.
        is_lost: it has failed; other ranks may still expect their part.
    """

    block_ids: BlockIds
    is_last: bool
    left: _Countdown
    is_lost: bool = False


def _count(countdowns: dict[Key, _Countdown], key: Key) -> bool:
    """Count a rank of a pending outcome; returns whether it was the last, and removes it then."""
    if key not in countdowns or not countdowns[key].count():
        return False
    del countdowns[key]
    return True
