"""What happens to a migration: arrived messages, outcomes of effects, deaths, time. Pure."""

from dataclasses import dataclass

from sterna.migration.messages.wire import Message, Reason


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the peer arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class RequestPosition:
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

    progress: RequestPosition | None
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


Outcome = (
    Inspected
    | Drained
    | DrainRefused
    | BlocksReserved
    | ReserveFailed
    | ReservationFreed
    | Adopted
    | AdoptFailed
)
"""How an effect ended that has an outcome (`effects.EffectWithOutcome`)."""

CopyEvent = CopyFailed | StageReceived | StageFailed
"""What happened to a stage's copy, at any time after it was begun or expected."""

Event = Outcome | CopyEvent | Received | RequestEnded | ClientAborted | PeerDead | Cancelled | Tick
