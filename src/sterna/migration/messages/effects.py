"""Effects of a migration's state machines, which an interpreter carries out. Pure.

`sterna.migration.messages` has the interpreter's contract.
"""

from dataclasses import dataclass

from sterna.migration.messages.wire import Message, Mode, Reason
from sterna.types import InstanceId, MigrationId, RequestId


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the peer's llumlet. Best effort; no outcome."""

    peer: InstanceId
    message: Message


@dataclass(frozen=True, slots=True)
class KeepPrefix:
    """Source: hold the blocks of a prompt's prefix that the prefix cache has, under an id of their
    own (`types.prefix_id`), so that they move like a request that has left the batch. They are held
    until `Release`; none are where nothing is found. No outcome.

    Attributes:
        block_hashes: those of the prompt, packed (`types.packed`).
        first_token: tokens before it are on the destination already, and stay out.
    """

    migration_id: MigrationId
    request_id: RequestId
    block_hashes: bytes
    first_token: int


@dataclass(frozen=True, slots=True)
class Inspect:
    """Source: look at the request between two steps of the engine. Outcome: Inspected."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Source: gather blocks `first_block` to `first_block + num_blocks` of the request and send
    them to the destination's receivers, rank by rank. Outcome: none when it succeeds (the
    destination sends StageCopied), CopyFailed when it does not.

    Attributes:
        num_valid_tokens: that of the stage's `ReserveBlocks`.
    """

    migration_id: MigrationId
    request_id: RequestId
    stage: int
    first_block: int
    num_blocks: int
    receivers: tuple[str, ...]
    is_last: bool
    num_valid_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StopCopying:
    """Source: drop all blocks of this migration that are still to be sent. No outcome."""

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
    """Source: free the drained request and its blocks, unnoticed by its client. No outcome."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class AbortDrained:
    """Source: free the drained request, which its client has aborted. No outcome."""

    migration_id: MigrationId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Either side: end this request, whose client has gone, in the engine. An unknown request is
    ignored. No outcome.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Destination: extend the reservation to the end of the stage, prepare the request when
    `request` is given, and make the receivers listen for the stage. Outcome: BlocksReserved or
    ReserveFailed (then nothing changed).

    The stage is written to blocks `first_block` to `first_block + num_blocks` of the
    reservation; only those that it does not hold yet are added to it. A stage may bring fewer
    blocks than were reserved, and a last stage that was given up brings none.

    Attributes:
        num_valid_tokens: tokens with valid KV when the stage was planned: memory that no layer
            looks at any longer for a request of this length is not copied.
    """

    migration_id: MigrationId
    request_id: RequestId
    stage: int
    first_block: int
    num_blocks: int
    is_last: bool
    request: bytes | None
    num_valid_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FreeReservation:
    """Destination: stop the receivers, then free the reserved blocks and the prepared request.

    The blocks are free only when no receiver can write to them. Outcome:
    ReservationFreed.
    """

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Adopt:
    """Destination: stop receivers that still listen, and make the request part of the next
    step's batch, or queue it when it comes without blocks. Outcome: Adopted or AdoptFailed (then
    nothing changed).

    The request owns the first `num_blocks` blocks of the reservation; the engine keeps the rest for
    its next tokens, or frees it.
    """

    migration_id: MigrationId
    request_id: RequestId
    num_blocks: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """Either side: the end of the migration is settled for this side.

    No effect on the engine follows, except to end a request whose client has gone; messages may
    follow, until both sides know the end.

    Attributes:
        peer: the other instance.
        is_outgoing: whether this is the source's side.
        aborted: the reason why it did not commit, or None when the destination owns the request.
        stages: number of stages that were reserved.
    """

    migration_id: MigrationId
    request_id: RequestId
    peer: InstanceId
    is_outgoing: bool
    aborted: Reason | None
    stages: int


EffectWithOutcome = Inspect | Drain | ReserveBlocks | FreeReservation | Adopt
"""Effects of which exactly one outcome is reported, once (`events.Outcome`)."""

Effect = (
    EffectWithOutcome
    | Send
    | KeepPrefix
    | CopyBlocks
    | StopCopying
    | Resume
    | Release
    | AbortDrained
    | AbortRequest
    | Ended
)
