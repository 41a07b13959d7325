"""Messages between the two llumlets of a migration (Figure 7: the handshake). Pure.

The messages are msgspec structs because they go over the wire as they are. They may be lost,
repeated and overtaken.

The destination numbers its reservations and sends the number in Reserved; all later messages carry
it (`reservation`). A copy of the first Reserve that was long under way can open a second
reservation for a migration that is over or continues under another number; by the number, a message
for one is not taken for the other. Abort and Released need no number: with them, the source is done
with every reservation of that migration.
"""

from enum import Enum
from typing import NewType

import msgspec

from sterna.types import MigrationId, RequestId

ReservationId = NewType("ReservationId", int)
"""Number of one reservation on its destination. A number is never used again."""


class Mode(Enum):
    """Way of a request's KV cache to the destination."""

    LIVE = "live"
    """In stages, while decoding goes on (Section 4.2)."""
    STOP_AND_COPY = "stop_copy"
    """Drained first, then copied whole: the paper's blocking baseline (Section 6.2)."""
    RECOMPUTE = "recompute"
    """Not at all: the destination prefills prompt and output again (Section 6.2)."""


class Reason(Enum):
    """Why a migration did not commit. Each value is shown to operators."""

    REQUEST_FINISHED = "the request finished"
    REQUEST_ABORTED = "the client aborted the request"
    REQUEST_PREEMPTED = "the request was preempted"
    REQUEST_UNKNOWN = "the request is not on this instance"
    REQUEST_IMMOVABLE = "the request cannot be migrated at this moment"
    ALREADY_MIGRATING = "the request is already migrating"
    SAME_INSTANCE = "the request is on that instance already"
    NO_MEMORY = "the destination has too little free memory"
    NO_SLOT = "the destination's batch is full"
    NO_ADAPTER_SLOT = "the destination's batch has as many LoRA adapters as it may"
    TERMINATING = "the destination is terminating"
    BUSY = "the destination takes part in as many migrations as it may"
    DUPLICATE_REQUEST = "the destination already has a request of that id"
    OTHER_WEIGHTS = "the weights of the two instances were not updated by the same calls"
    TOO_LONG = "the request is longer than the destination allows"
    UNSUPPORTED = "the destination cannot restore this request's state"
    TOO_MANY_STAGES = "the copy did not catch up with decoding within the stage limit"
    TRANSFER_FAILED = "the KV transfer failed"
    LEASE_EXPIRED = "the destination heard nothing of the migration for too long"
    PEER_SILENT = "nothing was heard from the destination for too long"
    PEER_DEAD = "the other instance died"
    COMMIT_LOST = "the source asked for the verdict of a commit that never arrived"
    UNKNOWN_MIGRATION = "the destination does not know the migration"
    CANCELLED = "the migration was cancelled"


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination, before each stage: make room for the stage's blocks.

    All or nothing. The first one carries the request as its front end sent it (`request`), so
    that the destination can prepare it (compile its grammar, say) while the bulk is copied.
    Sent again from time to time while the source waits for Reserved or StageCopied: it asks for the
    state of the stage, and renews the lease.

    Attributes:
        first_block: the stage's first block, counted from the request's first.
        num_blocks: maximum number of the stage's blocks; 0 for a stage without KV. After a last
            stage was given up for another one, they overlap the blocks reserved already.
        is_last: the request will be drained for this stage; a batch slot is reserved as well.
        reservation: None until the source has received one.
        num_valid_tokens: tokens with valid KV when the stage was planned.
    """

    migration_id: MigrationId
    request_id: RequestId
    stage: int
    first_block: int
    num_blocks: int
    is_last: bool
    reservation: ReservationId | None
    request: bytes | None = None
    num_valid_tokens: int = 0


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source: the stage's blocks are reserved and its receivers listen.

    Attributes:
        receivers: endpoints for the KV bytes, one for each tensor-parallel rank.
    """

    migration_id: MigrationId
    reservation: ReservationId
    stage: int
    receivers: tuple[str, ...]


class StageCopied(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source: every rank has the stage's blocks in place.

    Not sent for a last stage, after which the source waits for the verdict.
    """

    migration_id: MigrationId
    reservation: ReservationId
    stage: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: the request is drained, with this state; step it from here on.

    Sent together with the last stage's copy; the destination adopts the request when it has
    both. From this message on, only the destination decides how the migration ends, and the
    source keeps the request suspended until it receives the verdict.

    Attributes:
        num_blocks: blocks with valid KV, over all stages.
        state: the engine's state of the request, in the engine's own encoding.
    """

    migration_id: MigrationId
    reservation: ReservationId
    request_id: RequestId
    stage: int
    num_blocks: int
    state: bytes


class CommitQuery(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: no verdict has arrived; how did the commit end?

    A destination that has no Commit of this reservation considers it lost and aborts.
    """

    migration_id: MigrationId
    reservation: ReservationId


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source, the verdict: the request runs here; the source frees its copy.

    Sent again until Released arrives.
    """

    migration_id: MigrationId
    reservation: ReservationId


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source, the verdict: the request was not and will not be adopted under this
    reservation; or it was, and has been aborted since at the source's request.

    Answers Reserve (refused), Abort, ForwardedAbort and any message for an unknown reservation.
    Also sent when a transfer failed or the lease expired. The reservation is gone when this is
    sent.

    Attributes:
        reservation: None when the first Reserve was refused before it had a number.
    """

    migration_id: MigrationId
    reservation: ReservationId | None
    reason: Reason


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: give the reservation back.

    Before Commit this ends the migration. After Commit it is only a request, sent when the copy of
    the last stage failed: the destination aborts unless it has adopted, and sends its verdict.
    """

    migration_id: MigrationId
    reason: Reason


class Released(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: the verdict arrived; the destination may forget the migration."""

    migration_id: MigrationId


class ForwardedAbort(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: the client aborted a request whose commit is under way or done.

    Answered by Aborted once the request is nowhere on the destination; sent again until then.
    """

    migration_id: MigrationId
    reservation: ReservationId
    request_id: RequestId


Message = (
    Reserve
    | Reserved
    | StageCopied
    | Commit
    | CommitQuery
    | Committed
    | Aborted
    | Abort
    | Released
    | ForwardedAbort
)
