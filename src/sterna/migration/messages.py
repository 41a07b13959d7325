"""What the two sides of a migration say to each other, ask of the world, and hear back. Pure.

Three closed sets, one for each direction:

- **messages** travel between the source's and the destination's llumlet (Figure 7 of the paper:
  the handshake); they are msgspec structs because they go over the wire as they are. They may
  be lost, repeated and overtaken;
- **effects** are what a state machine wants done: an interpreter (`runtime`, `simulator`) carries
  them out;
- **events** are what happened: an arrived message, an effect's outcome, a death, time.

The interpreter's contract:

1. Effects of one migration take effect in the order in which they were returned, those on the
   engine between two steps; AbortRequest takes effect after what was returned before it for the
   same request. Effects of different migrations need not wait for each other.
2. An effect that has an outcome names the events that report it. Exactly one of them comes, once,
   for each time the effect was returned; and for `CopyBlocks` at most one. While an outcome of
   `ReserveBlocks`, `FreeReservation`, `Adopt`, `Inspect` or `Drain` is due, no other of these
   effects is returned for that migration, so their outcomes cannot be confused.
3. Each stage of at least one block, once it is reserved, ends in StageReceived or StageFailed,
   once, unless `FreeReservation` or `Adopt` stops it; one that gets no bytes for too long has
   failed. A stage of no blocks ends in neither.
4. PeerDead is told only of an instance that will never act again.

A conversation is named by its `reservation`: the destination numbers the reservations it makes
and says the number in Reserved; whatever is said from then on repeats it. A copy of the first
Reserve that was long under way can open a second reservation for a migration that is over or
goes on under another number; nothing that was meant for one is then taken for the other. Abort
and Released need no number: the source is done with every reservation of that migration.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

import msgspec

from sterna.types import InstanceId, MigrationId, RequestId

ReservationId = NewType("ReservationId", int)
"""Names one reservation on its destination. A number is never used again."""


class Mode(Enum):
    """How a request's KV cache gets to the destination."""

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
    TERMINATING = "the destination is terminating"
    BUSY = "the destination takes part in as many migrations as it may"
    DUPLICATE_REQUEST = "the destination already has a request of that id"
    UNSUPPORTED = "the destination cannot restore this request's state"
    TOO_MANY_STAGES = "the copy did not catch up with decoding within the stage limit"
    TRANSFER_FAILED = "the KV transfer failed"
    LEASE_EXPIRED = "the destination heard nothing of the migration for too long"
    PEER_SILENT = "nothing was heard from the destination for too long"
    PEER_DEAD = "the other instance died"
    COMMIT_LOST = "the source asked for the verdict of a commit that never arrived"
    UNKNOWN_MIGRATION = "the destination does not know the migration"
    CANCELLED = "the migration was cancelled"


# ---------------------------------------------------------------------------------- messages


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination, before each stage: make room for the stage's blocks.

    All or nothing. The first one carries the request as its front end sent it (`request`), so
    that the destination can prepare it (compile its grammar, say) while the bulk is copied.
    Sent again from time to time while the source waits for Reserved or StageCopied: it asks how
    far the stage is, and renews the lease.

    Attributes:
        first_block: the stage's first block, counted from the request's first.
        num_blocks: blocks of the stage, at most; 0 for a stage without KV. After a last stage
            was given up for another one they overlap what is reserved already.
        is_last: the request will be drained for this stage; a batch slot is reserved as well.
        reservation: None as long as the source knows none.
    """

    migration_id: MigrationId
    request_id: RequestId
    stage: int
    first_block: int
    num_blocks: int
    is_last: bool
    reservation: ReservationId | None
    request: bytes | None = None


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source: the stage's blocks are reserved and its receivers listen.

    Attributes:
        receivers: where to send the KV bytes, one endpoint for each tensor-parallel rank.
    """

    migration_id: MigrationId
    reservation: ReservationId
    stage: int
    receivers: tuple[str, ...]


class StageCopied(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source: every rank has the stage's blocks in place.

    Not sent of a last stage, after which the source waits for the verdict.
    """

    migration_id: MigrationId
    reservation: ReservationId
    stage: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: the request is drained, this is its state; step it from here on.

    Sent together with the last stage's copy; the destination adopts the request when it has
    both. From this message on, only the destination decides how the migration ends, and the
    source keeps the request suspended until it hears the verdict.

    Attributes:
        num_blocks: blocks with valid KV, over all stages.
        state: what the engine needs to go on, in the engine's own encoding.
    """

    migration_id: MigrationId
    reservation: ReservationId
    request_id: RequestId
    stage: int
    num_blocks: int
    state: bytes


class CommitQuery(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: no verdict has come; how did the commit end?

    A destination that has no Commit of this reservation takes it for lost and aborts.
    """

    migration_id: MigrationId
    reservation: ReservationId


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source, the verdict: the request runs here; free yours.

    Sent again until Released comes.
    """

    migration_id: MigrationId
    reservation: ReservationId


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Destination -> source, the verdict: the request was not and will not be adopted under this
    reservation; or it was, and has been aborted since, as the source had asked.

    Answers Reserve (refused), Abort, ForwardedAbort, anything of an unknown reservation, and goes
    out unasked when a transfer failed or the lease ran out. The reservation is gone when this is
    sent.

    Attributes:
        reservation: None when the first Reserve was refused before it had a number.
    """

    migration_id: MigrationId
    reservation: ReservationId | None
    reason: Reason


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: give the reservation back.

    Before Commit this ends the migration. After Commit it is a wish, when the copy of the last
    stage failed: the destination aborts unless it has adopted, and the verdict tells which.
    """

    migration_id: MigrationId
    reason: Reason


class Released(msgspec.Struct, frozen=True, tag=True):
    """Source -> destination: the verdict was heard; the destination may forget the migration."""

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

# ----------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the peer's llumlet. Best effort; no outcome."""

    peer: InstanceId
    message: Message


@dataclass(frozen=True, slots=True)
class Inspect:
    """Source: look at the request between two steps of the engine. Outcome: Inspected."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Source: gather blocks `first_block` to `first_block + num_blocks` of the request and send
    them to the destination's receivers, rank by rank. Outcome: none when it succeeds (the
    destination tells by StageCopied), CopyFailed when it does not.
    """

    migration_id: MigrationId
    request_id: RequestId
    stage: int
    first_block: int
    num_blocks: int
    receivers: tuple[str, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class StopCopying:
    """Source: drop whatever of this migration is still to be sent. No outcome."""

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Drain:
    """Source: take the request out of the batch or the queue, keep its blocks, export its state.

    One operation of the engine between two steps. Refused when the request is gone, was
    preempted since (`num_preemptions` differs), is immovable, or has more than `max_blocks`
    blocks from `first_block` on (then nothing changes). With Mode.RECOMPUTE the number of blocks
    does not matter, and the exported state is one without KV. Outcome: Drained or DrainRefused.
    """

    migration_id: MigrationId
    request_id: RequestId
    mode: Mode
    num_preemptions: int
    first_block: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Source: put the drained request back into the batch or queue that it left. No outcome."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Release:
    """Source: free the drained request and its blocks; its client notices nothing. No outcome."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class AbortDrained:
    """Source: free the drained request, which its client has aborted. No outcome."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Either side: end this request, whose client has gone, in the engine. One that is not there
    is ignored. No outcome.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Destination: let the reservation reach to the end of the stage, prepare the request when
    `request` is given, and make the receivers listen for the stage. Outcome: BlocksReserved or
    ReserveFailed (then nothing changed).

    The stage is written to blocks `first_block` to `first_block + num_blocks` of the
    reservation; only those that it does not hold yet are added to it. A stage may bring fewer
    blocks than were asked for, and a last stage that was given up brings none.
    """

    migration_id: MigrationId
    request_id: RequestId
    stage: int
    first_block: int
    num_blocks: int
    is_last: bool
    request: bytes | None


@dataclass(frozen=True, slots=True)
class FreeReservation:
    """Destination: stop the receivers, then free the reserved blocks and the prepared request.

    The blocks are free only when no receiver can write to them any more. Outcome:
    ReservationFreed.
    """

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Adopt:
    """Destination: stop receivers that still listen, and make the request part of the next
    step's batch, or queue it when it comes without blocks. Outcome: Adopted or AdoptFailed (then
    nothing changed).

    The request owns the first `num_blocks` blocks of the reservation; the rest is its to grow
    into, or free.
    """

    migration_id: MigrationId
    request_id: RequestId
    num_blocks: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """Either side: how the migration ended is settled for this side.

    Nothing else of it is asked of the engine afterwards, except to end a request whose client
    has gone; messages may follow, until both sides know.

    Attributes:
        peer: the other instance.
        is_outgoing: whether this is the source's side.
        aborted: why it did not commit, or None when the destination owns the request.
        stages: stages that were reserved.
    """

    migration_id: MigrationId
    request_id: RequestId
    peer: InstanceId
    is_outgoing: bool
    aborted: Reason | None
    stages: int


Effect = (
    Send
    | Inspect
    | CopyBlocks
    | StopCopying
    | Drain
    | Resume
    | Release
    | AbortDrained
    | AbortRequest
    | ReserveBlocks
    | FreeReservation
    | Adopt
    | Ended
)

# ------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the peer arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands between two steps.

    Attributes:
        is_queuing: never started or preempted: it has no KV and moves without any.
        num_full_blocks: leading blocks whose KV is complete and will not change again.
        num_blocks: blocks with any valid KV, the partial last one included.
        num_preemptions: counts the times that its memory was taken back here.
        immovable: it cannot move at this moment.
    """

    is_queuing: bool
    num_full_blocks: int
    num_blocks: int
    num_preemptions: int
    immovable: bool = False


@dataclass(frozen=True, slots=True)
class Inspected:
    """Outcome of Inspect; None when the request is not on the instance any more.

    Attributes:
        request: the request as its front end sent it; needed with the first outcome only.
    """

    progress: Progress | None
    request: bytes | None = None


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """The source could not gather or send the stage."""

    stage: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The request has left the batch; `num_blocks` of it hold valid KV in all."""

    num_blocks: int
    state: bytes


@dataclass(frozen=True, slots=True)
class DrainRefused:
    """The request stays where it is.

    Attributes:
        reason: why, or None when it has more blocks than the last stage may take (it goes on
            decoding: another stage must come first).
    """

    reason: Reason | None


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """Outcome of ReserveBlocks; see `Reserved.receivers`."""

    stage: int
    receivers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReserveFailed:
    """Outcome of ReserveBlocks: nothing was reserved."""

    stage: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class StageReceived:
    """Every rank of the destination has scattered the stage's blocks."""

    stage: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A receiver of the destination failed; the stage will not complete."""

    stage: int


@dataclass(frozen=True, slots=True)
class ReservationFreed:
    """Outcome of FreeReservation."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """Outcome of Adopt: the destination's engine steps the request."""


@dataclass(frozen=True, slots=True)
class AdoptFailed:
    """Outcome of Adopt: the engine is as before."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Source: the request finished or was preempted or aborted while it could still step.

    A hint that saves time: `Inspect` and `Drain` would find out as well.
    """

    reason: Reason


@dataclass(frozen=True, slots=True)
class ClientAborted:
    """The client aborted the request; it reaches whichever side it was sent to."""


@dataclass(frozen=True, slots=True)
class PeerDead:
    """The supervisor confirmed that the peer is dead and will never act again.

    A message that it sent before may still arrive afterwards.
    """


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An operator or the llumlet wants the migration stopped; ignored from Commit on."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are compared with the `now_s` given along."""


Event = (
    Received
    | Inspected
    | CopyFailed
    | Drained
    | DrainRefused
    | BlocksReserved
    | ReserveFailed
    | StageReceived
    | StageFailed
    | ReservationFreed
    | Adopted
    | AdoptFailed
    | RequestEnded
    | ClientAborted
    | PeerDead
    | Cancelled
    | Tick
)
