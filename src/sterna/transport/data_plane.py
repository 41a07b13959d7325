"""Interface of the KV data plane, and the events that it sends to its owner.

The events are msgspec structs because they are sent as they are to an owner in another process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from sterna.types import MigrationId

BlockIds = Sequence[Sequence[int]]
"""Block ids of a transfer, for each KV cache group."""


class Hop(NamedTuple):
    """A transfer within the destination, of blocks that both ranks hold."""

    lead: int
    rank: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Key of one stage of one migration on one rank.

    Attributes:
        hop: None for the transfer from the source.
    """

    migration_id: MigrationId
    stage: int
    hop: Hop | None = None


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The destination has all bytes of the transfer; the source's blocks are no longer read."""

    transfer: Transfer
    copy_bytes: int
    duration_s: float


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    """The transfer failed; the source's blocks are no longer read."""

    transfer: Transfer
    reason: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """All blocks of the transfer are in place in the destination's KV cache.

    Attributes:
        num_blocks: for each KV cache group, the number of blocks that came: the first of those
            that were expected.
    """

    transfer: Transfer
    num_blocks: tuple[int, ...]
    copy_bytes: int
    duration_s: float


class ReceiveFailed(msgspec.Struct, frozen=True, tag=True):
    """The transfer will not complete; the destination's blocks are no longer written."""

    transfer: Transfer
    reason: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Outcome of `stop`: no block of the migration is read or written any longer on this rank."""

    migration_id: MigrationId


PlaneEvent = Sent | SendFailed | Arrived | ReceiveFailed | Stopped
Notify = Callable[[PlaneEvent], None]


class DataPlane(Protocol):
    """Carries KV blocks between the caches of two instances, one plane a rank.

    No method blocks except `close`. Outcomes are passed to the `Notify` given at construction,
    one at a time, on a thread of the plane's own. Wrong calls raise at once and change nothing:
    ProtocolError for a transfer that is already in flight on that side, TransportError for blocks
    that are not in the cache and for a plane that was closed.
    """

    @property
    def endpoint(self) -> str:
        """Address at which peers reach this plane."""

    def send(
        self, transfer: Transfer, endpoint: str, block_ids: BlockIds, *, is_paced: bool
    ) -> None:
        """Gather the blocks and send them to the plane at `endpoint`.

        Paced transfers leave the memory bus to the engine for part of the time
        (`TransportConfig.bandwidth_share`); last stages and prefixes, for which requests wait, are
        not paced. A hop waits for no steps: the stage itself has. Outcome: Sent or SendFailed,
        unless stopped.
        """

    def mark_steps(self, migration_id: MigrationId) -> None:
        """Note the steps queued so far as the last that write to the migration's blocks: its next
        transfer that is not paced waits for no later ones. Without a mark it waits for all that are
        queued when it is sent. Only steps on CUDA are queued; must be called on their thread."""

    def receive(
        self, transfer: Transfer, block_ids: BlockIds, on_armed: Callable[[], None]
    ) -> None:
        """Expect the transfer and scatter it into the blocks. Outcome: Arrived or ReceiveFailed,
        unless stopped. A transfer that is not expected is refused; its sender gets SendFailed. The
        source may begin late (`TransportConfig.begin_timeout_s`), and a hop at any time, since its
        lead has to receive the stage before.

        Args:
            on_armed: called, in any case and on any thread, when the steps that are queued now have
                ended: they may still write to the blocks. The source is to begin then: chunks that
                come before have to wait, which counts as no progress.
        """

    def stop(self, migration_id: MigrationId) -> None:
        """Stop all transfers of the migration. Outcome: always Stopped, the last event of that
        migration."""

    def close(self) -> None:
        """Stop all transfers and threads, and release files, memory and ports. No outcome follows.
        Blocks for at most a second."""
