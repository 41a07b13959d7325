"""Events of a migration: arrived messages, outcomes of effects, deaths, time. Pure."""

from dataclasses import dataclass

from sterna.migration.messages.wire import Message, Reason


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the peer arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class RequestPosition:
    """Position of a request between two steps.

    Attributes:
        is_queuing: never started or preempted: it has no KV and moves without any.
        num_full_blocks: leading blocks whose KV is complete and will not change again.
        num_blocks: blocks with any valid KV, the partial last one included.
        num_preemptions: number of its preemptions on this instance.
        is_immovable: it cannot move at this moment.
        num_valid_tokens: tokens with valid KV. Engines whose layers have windows know by it which
            memory no layer looks at any longer.
        block_bytes: bytes of a block on one rank.
        state_bytes: bytes that travel with the last stage whatever its blocks: the state of
            recurrent layers.
    """

    is_queuing: bool
    num_full_blocks: int
    num_blocks: int
    num_preemptions: int
    is_immovable: bool = False
    num_valid_tokens: int = 0
    block_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Inspected:
    """Outcome of Inspect; `progress` is None when the request is no longer on the instance.

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
        reason: None when the request has more blocks than the last stage may take (it continues
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
    """The client aborted the request; the event reaches the side that got the abort."""


@dataclass(frozen=True, slots=True)
class PeerDead:
    """The supervisor confirmed that the peer is dead and will never act again.

    A message that it sent before may still arrive afterwards.
    """


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An operator cancels the migration; ignored from Commit on.

    No interpreter reports it, because no command of operators ends a migration. The machines, the
    model and the tests have it.
    """


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
"""Outcomes of effects (`effects.EffectWithOutcome`)."""

CopyEvent = CopyFailed | StageReceived | StageFailed
"""Events of a stage's copy, at any time after it was begun or expected."""

Event = Outcome | CopyEvent | Received | RequestEnded | ClientAborted | PeerDead | Cancelled | Tick
