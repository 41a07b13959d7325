"""Messages, effects and events of a migration's two state machines. Pure.

Three closed sets, one for each direction:

- **messages** (`wire`) travel between the source's and the destination's llumlet (Figure 7 of
  the paper: the handshake);
- **effects** (`effects`) are actions that a state machine requests: an interpreter (`instance`,
  `simulator`) carries them out;
- **events** (`events`) are its inputs: an arrived message, an effect's outcome, a death, time.

The interpreter's contract:

1. Effects of one migration take effect in the order in which they were returned, those on the
   engine between two steps; AbortRequest takes effect after the effects that were returned before
   it for the same request. Effects of different migrations need not wait for each other.
2. An effect that has an outcome names the events that report it. Exactly one of them comes, once,
   for each time the effect was returned; and for `CopyBlocks` at most one. While an outcome of
   `ReserveBlocks`, `FreeReservation`, `Adopt`, `Inspect` or `Drain` is due, no other of these
   effects is returned for that migration, so their outcomes cannot be confused.
3. Each stage of at least one block, once it is reserved, ends in StageReceived or StageFailed,
   once, unless `FreeReservation` or `Adopt` stops it; a stage that gets no bytes for too long has
   failed. It waits longer for its first ones: the source of a last stage drains the request before
   it sends any. A stage of no blocks ends in neither.
4. PeerDead is reported only of an instance that will never act again.

`sterna.migration.effect_queue` keeps the order of 1 and 2 for every interpreter.

Import all of them from here.

Offers: nothing.
Imports: types.
"""

from sterna.migration.messages.effects import (
    AbortDrained,
    AbortRequest,
    Adopt,
    CopyBlocks,
    Drain,
    Effect,
    EffectWithOutcome,
    Ended,
    FreeReservation,
    Inspect,
    KeepPrefix,
    Release,
    ReserveBlocks,
    Resume,
    Send,
    StopCopying,
)
from sterna.migration.messages.events import (
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Cancelled,
    ClientAborted,
    CopyEvent,
    CopyFailed,
    Drained,
    DrainRefused,
    Event,
    Inspected,
    Outcome,
    PeerDead,
    Received,
    RequestEnded,
    RequestPosition,
    ReservationFreed,
    ReserveFailed,
    StageFailed,
    StageReceived,
    Tick,
)
from sterna.migration.messages.wire import (
    Abort,
    Aborted,
    Commit,
    CommitQuery,
    Committed,
    ForwardedAbort,
    Message,
    Mode,
    Reason,
    Released,
    ReservationId,
    Reserve,
    Reserved,
    StageCopied,
)

__all__ = [
    "Abort",
    "AbortDrained",
    "AbortRequest",
    "Aborted",
    "Adopt",
    "AdoptFailed",
    "Adopted",
    "BlocksReserved",
    "Cancelled",
    "ClientAborted",
    "Commit",
    "CommitQuery",
    "Committed",
    "CopyBlocks",
    "CopyEvent",
    "CopyFailed",
    "Drain",
    "DrainRefused",
    "Drained",
    "Effect",
    "EffectWithOutcome",
    "Ended",
    "Event",
    "ForwardedAbort",
    "FreeReservation",
    "Inspect",
    "Inspected",
    "KeepPrefix",
    "Message",
    "Mode",
    "Outcome",
    "PeerDead",
    "Reason",
    "Received",
    "Release",
    "Released",
    "RequestEnded",
    "RequestPosition",
    "ReservationFreed",
    "ReservationId",
    "Reserve",
    "ReserveBlocks",
    "ReserveFailed",
    "Reserved",
    "Resume",
    "Send",
    "StageCopied",
    "StageFailed",
    "StageReceived",
    "StopCopying",
    "Tick",
]
