"""What the KV data plane asks of a wire, and what it tells its owner.

The events are structs because they go over the wire as they are where the owner is another process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from sterna.types import MigrationId


@dataclass(frozen=True, slots=True)
class Transfer:
    """Names one stage of one migration on one rank."""

    migration_id: MigrationId
    stage: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The source handed all bytes of the transfer over; its blocks are not read any more."""

    transfer: Transfer
    copy_bytes: int
    duration_s: float


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    """The transfer did not go through; the source's blocks are not read any more."""

    transfer: Transfer
    reason: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """All blocks of the transfer are in place in the destination's KV cache."""

    transfer: Transfer
    copy_bytes: int
    duration_s: float


class ReceiveFailed(msgspec.Struct, frozen=True, tag=True):
    """The transfer will not complete; the destination's blocks are not written any more."""

    transfer: Transfer
    reason: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Outcome of `stop`: nothing of the migration is read or written any more, on this rank."""

    migration_id: MigrationId


PlaneEvent = Sent | SendFailed | Arrived | ReceiveFailed | Stopped
Notify = Callable[[PlaneEvent], None]


class DataPlane(Protocol):
    """Carries KV blocks between the caches of two instances, one plane a rank.

    No method blocks, but for `close`. Outcomes come through the `Notify` given at construction,
    one at a time, on a thread of the plane's own. What the owner itself does wrong is raised at
    once and changes nothing: ProtocolError for a transfer that is in flight on that side already,
    TransportError for blocks that are not in the cache and for a plane that was closed.
    """

    @property
    def endpoint(self) -> str:
        """Where peers reach this plane's receivers."""

    def send(
        self, transfer: Transfer, endpoint: str, block_ids: Sequence[int], *, paced: bool
    ) -> None:
        """Gather the blocks and send them to the plane at `endpoint`.

        Paced transfers leave the memory bus to the engine for part of the time
        (`TransportConfig.bandwidth_share`); the last stage is not paced. Outcome: Sent or
        SendFailed, unless stopped.
        """

    def receive(self, transfer: Transfer, block_ids: Sequence[int]) -> None:
        """Expect the transfer and scatter it into the blocks. Outcome: Arrived or ReceiveFailed,
        unless stopped. A transfer that nobody expects is refused, and its sender told."""

    def stop(self, migration_id: MigrationId) -> None:
        """Stop all transfers of the migration. Outcome: Stopped, always, and nothing of that
        migration after it."""

    def close(self) -> None:
        """Stop all transfers and threads, and give back files, memory and ports, silently: there
        is no outcome any more. Blocks for at most a second."""
