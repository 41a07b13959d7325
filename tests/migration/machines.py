"""Both machines, brought to each of their states, and every kind of event to try on them.

The current stage is stage 1 wherever there can be one, so that there is an earlier and a later
stage; stage 0 has brought 8 blocks.
"""

from collections.abc import Iterable
from copy import copy

from sterna.config import MigrationConfig
from sterna.migration.destination import MigrationDestination
from sterna.migration.messages import (
    Abort,
    Aborted,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Cancelled,
    ClientAborted,
    Commit,
    CommitQuery,
    Committed,
    CopyFailed,
    Drained,
    DrainRefused,
    Effect,
    Event,
    ForwardedAbort,
    Inspected,
    Mode,
    PeerDead,
    Reason,
    Received,
    Released,
    RequestEnded,
    RequestPosition,
    ReservationFreed,
    ReservationId,
    Reserve,
    Reserved,
    ReserveFailed,
    Send,
    StageCopied,
    StageFailed,
    StageReceived,
    Tick,
)
from sterna.migration.source import MigrationSource
from sterna.types import InstanceId, MigrationId, RequestId

M = MigrationId("A-1")
R = RequestId("r")
A = InstanceId("A")
B = InstanceId("B")
N = ReservationId(7)
OTHER = ReservationId(8)
CONFIG = MigrationConfig(last_stage_max_blocks=2, max_stages=8, lease_s=10.0, query_interval_s=1.0)
START_S = 100.0
"""When every machine below took its last event in."""
LATER_S = 0.5
"""How long after that the next event comes: before any deadline, and late enough that a deadline
that is renewed differs from one that is not."""
RECEIVERS = ("b:1",)
REQUEST = b"request"
STATE = b"state"


def name(effect: Effect) -> str:
    """An effect, as the tables of docs/migration_protocol.md call it."""
    if isinstance(effect, Send):
        return f"send {type(effect.message).__name__}"
    return type(effect).__name__


# ------------------------------------------------------------------------------------- source


def progress(
    num_blocks: int,
    *,
    num_preemptions: int = 0,
    is_queuing: bool = False,
    is_immovable: bool = False,
) -> RequestPosition:
    """A request whose last block is partial."""
    return RequestPosition(
        is_queuing=is_queuing,
        num_full_blocks=max(0, num_blocks - 1),
        num_blocks=num_blocks,
        num_preemptions=num_preemptions,
        is_immovable=is_immovable,
    )


def inspected(num_blocks: int) -> Inspected:
    return Inspected(progress(num_blocks), REQUEST)


def reserved(stage: int, reservation: ReservationId = N) -> Received:
    return Received(Reserved(M, reservation, stage, RECEIVERS))


def stage_copied(stage: int, reservation: ReservationId = N) -> Received:
    return Received(StageCopied(M, reservation, stage))


def committed(reservation: ReservationId = N) -> Received:
    return Received(Committed(M, reservation))


def aborted(reason: Reason, reservation: ReservationId | None = N) -> Received:
    return Received(Aborted(M, reservation, reason))


def new_source(mode: Mode = Mode.LIVE, config: MigrationConfig = CONFIG) -> MigrationSource:
    return MigrationSource(M, R, B, mode, config)


def source_after(events: Iterable[Event], mode: Mode = Mode.LIVE) -> MigrationSource:
    """A source that was started and took these events in, all at START_S."""
    source = new_source(mode)
    source.start(START_S)
    for event in events:
        source.on_event(event, START_S)
    return source


FIRST_STAGE = (inspected(9), reserved(0), stage_copied(0))
COPYING = (*FIRST_STAGE, inspected(14), reserved(1))
DRAINING = (*FIRST_STAGE, inspected(9), reserved(1))
COMMITTING = (*DRAINING, Drained(9, STATE))

SOURCE_STATES: dict[str, tuple[Event, ...]] = {
    "INSPECTING, first stage": (),
    "RESERVING, first stage": (inspected(9),),
    "INSPECTING": FIRST_STAGE,
    "RESERVING": (*FIRST_STAGE, inspected(14)),
    "RESERVING, last stage": (*FIRST_STAGE, inspected(9)),
    "COPYING": COPYING,
    "DRAINING": DRAINING,
    "UNDOING": (*DRAINING, Cancelled()),
    "UNDOING, client aborted": (*DRAINING, ClientAborted()),
    "COMMITTING": COMMITTING,
    "COMMITTING, nothing to copy": (*DRAINING, Drained(8, STATE)),
    "COMMITTING, client aborted": (*COMMITTING, ClientAborted()),
    "FORWARDING": (*COMMITTING, ClientAborted(), committed()),
    "OVER": (*COMMITTING, committed()),
}
"""The events after start that lead to each state; only NEW is not among them."""


def source_in(state: str) -> MigrationSource:
    if state == "NEW":
        return new_source()
    return source_after(SOURCE_STATES[state])


SOURCE_EVENTS: dict[str, tuple[Event, float]] = {
    "Inspected(many blocks left)": (inspected(14), LATER_S),
    "Inspected(few blocks left)": (inspected(10), LATER_S),
    "Inspected(gone)": (Inspected(None), LATER_S),
    "Inspected(preempted since)": (Inspected(progress(9, num_preemptions=1)), LATER_S),
    "Inspected(immovable)": (Inspected(progress(9, is_immovable=True)), LATER_S),
    "Reserved(first stage)": (reserved(0), LATER_S),
    "Reserved(this stage)": (reserved(1), LATER_S),
    "Reserved(later stage)": (reserved(2), LATER_S),
    "StageCopied(first stage)": (stage_copied(0), LATER_S),
    "StageCopied(this stage)": (stage_copied(1), LATER_S),
    "StageCopied(later stage)": (stage_copied(2), LATER_S),
    "Committed": (committed(), LATER_S),
    "Aborted": (aborted(Reason.LEASE_EXPIRED), LATER_S),
    "Aborted(client)": (aborted(Reason.REQUEST_ABORTED), LATER_S),
    "CopyFailed(first stage)": (CopyFailed(0), LATER_S),
    "CopyFailed(this stage)": (CopyFailed(1), LATER_S),
    "CopyFailed(later stage)": (CopyFailed(2), LATER_S),
    "Drained": (Drained(9, STATE), LATER_S),
    "DrainRefused(too many blocks)": (DrainRefused(None), LATER_S),
    "DrainRefused(reason)": (DrainRefused(Reason.REQUEST_PREEMPTED), LATER_S),
    "RequestEnded": (RequestEnded(Reason.REQUEST_FINISHED), LATER_S),
    "ClientAborted": (ClientAborted(), LATER_S),
    "PeerDead": (PeerDead(), LATER_S),
    "Cancelled": (Cancelled(), LATER_S),
    "Tick(early)": (Tick(), LATER_S),
    "Tick(time to ask again)": (Tick(), 1.0),
    "Tick(silence too long)": (Tick(), 10.0),
}
"""What a source can be told, each with the time since its last event."""

SOURCE_ANOTHER_RESERVATION: list[Event] = [
    reserved(1, OTHER),
    stage_copied(1, OTHER),
    committed(OTHER),
    aborted(Reason.UNKNOWN_MIGRATION, OTHER),
    aborted(Reason.BUSY, None),
]

# -------------------------------------------------------------------------------- destination


def reserve(
    stage: int, *, is_last: bool = False, reservation: ReservationId | None = N
) -> Received:
    return Received(
        Reserve(
            migration_id=M,
            request_id=R,
            stage=stage,
            first_block=8 * stage,
            num_blocks=3 if is_last else 8,
            is_last=is_last,
            reservation=reservation,
            request=REQUEST if stage == 0 else None,
        )
    )


def commit(stage: int, num_blocks: int, reservation: ReservationId = N) -> Received:
    return Received(Commit(M, reservation, R, stage, num_blocks, STATE))


def commit_query(reservation: ReservationId = N) -> Received:
    return Received(CommitQuery(M, reservation))


def forwarded_abort(reservation: ReservationId = N) -> Received:
    return Received(ForwardedAbort(M, reservation, R))


def blocks_reserved(stage: int) -> BlocksReserved:
    return BlocksReserved(stage, RECEIVERS)


def new_destination(config: MigrationConfig = CONFIG) -> MigrationDestination:
    return MigrationDestination(M, R, A, N, config)


def destination_after(events: Iterable[Event]) -> MigrationDestination:
    """A destination that took these events in, all at START_S."""
    destination = new_destination()
    for event in events:
        destination.on_event(event, START_S)
    return destination


FIRST_RECEIVED = (reserve(0, reservation=None), blocks_reserved(0), StageReceived(0))
RESERVING_LAST = (*FIRST_RECEIVED, reserve(1, is_last=True))
RECEIVING_LAST = (*RESERVING_LAST, blocks_reserved(1))
ADOPTING = (*RECEIVING_LAST, commit(1, 9), StageReceived(1))

DESTINATION_STATES: dict[str, tuple[Event, ...]] = {
    "NEW": (),
    "RESERVING, first stage": (reserve(0, reservation=None),),
    "RESERVING": (*FIRST_RECEIVED, reserve(1)),
    "RECEIVING": (*FIRST_RECEIVED, reserve(1), blocks_reserved(1)),
    "RECEIVING, last stage": RECEIVING_LAST,
    "RECEIVED": (*FIRST_RECEIVED, reserve(1), blocks_reserved(1), StageReceived(1)),
    "RECEIVED, last stage": (*RECEIVING_LAST, StageReceived(1)),
    "COMMITTING": (*RECEIVING_LAST, commit(1, 9)),
    "ADOPTING": ADOPTING,
    "ADOPTING, source forwarded an abort": (*ADOPTING, forwarded_abort()),
    "ADOPTING, client aborted here": (*ADOPTING, ClientAborted()),
    "ADOPTING, source dead": (*ADOPTING, PeerDead()),
    "COMMITTED": (*ADOPTING, Adopted()),
    "GIVING_UP, first stage": (reserve(0, reservation=None), Cancelled()),
    "GIVING_UP": (*FIRST_RECEIVED, reserve(1), Cancelled()),
    "FREEING": (*RECEIVING_LAST, Cancelled()),
    "FREEING, source dead": (*RECEIVING_LAST, PeerDead()),
    "OVER": (*RECEIVING_LAST, Cancelled(), ReservationFreed()),
}


def destination_in(state: str) -> MigrationDestination:
    return destination_after(DESTINATION_STATES[state])


DESTINATION_EVENTS: dict[str, tuple[Event, float]] = {
    "Reserve(first stage)": (reserve(0, reservation=None), LATER_S),
    "Reserve(this stage)": (reserve(1), LATER_S),
    "Reserve(next stage)": (reserve(2), LATER_S),
    "Reserve(later stage)": (reserve(3), LATER_S),
    "Commit(blocks in the last stage)": (commit(1, 9), LATER_S),
    "Commit(no blocks in the last stage)": (commit(1, 8), LATER_S),
    "Commit(more blocks than reserved)": (commit(1, 12), LATER_S),
    "Commit(other stage)": (commit(2, 9), LATER_S),
    "CommitQuery": (commit_query(), LATER_S),
    "Abort": (Received(Abort(M, Reason.REQUEST_PREEMPTED)), LATER_S),
    "Released": (Received(Released(M)), LATER_S),
    "ForwardedAbort": (forwarded_abort(), LATER_S),
    "BlocksReserved(this stage)": (blocks_reserved(1), LATER_S),
    "BlocksReserved(first stage)": (blocks_reserved(0), LATER_S),
    "ReserveFailed(this stage)": (ReserveFailed(1, Reason.NO_MEMORY), LATER_S),
    "ReserveFailed(first stage)": (ReserveFailed(0, Reason.NO_MEMORY), LATER_S),
    "StageReceived(first stage)": (StageReceived(0), LATER_S),
    "StageReceived(this stage)": (StageReceived(1), LATER_S),
    "StageReceived(later stage)": (StageReceived(2), LATER_S),
    "StageFailed(first stage)": (StageFailed(0), LATER_S),
    "StageFailed(this stage)": (StageFailed(1), LATER_S),
    "StageFailed(later stage)": (StageFailed(2), LATER_S),
    "ReservationFreed": (ReservationFreed(), LATER_S),
    "Adopted": (Adopted(), LATER_S),
    "AdoptFailed": (AdoptFailed(Reason.UNSUPPORTED), LATER_S),
    "ClientAborted": (ClientAborted(), LATER_S),
    "PeerDead": (PeerDead(), LATER_S),
    "Cancelled": (Cancelled(), LATER_S),
    "Tick(early)": (Tick(), LATER_S),
    "Tick(time to repeat)": (Tick(), 1.0),
    "Tick(lease over)": (Tick(), 10.0),
}
"""What a destination can be told, each with the time since its last event."""

DESTINATION_ANOTHER_RESERVATION: list[Event] = [
    reserve(1, reservation=OTHER),
    commit(1, 9, OTHER),
    commit_query(OTHER),
    forwarded_abort(OTHER),
]


def snapshot(machine: MigrationSource | MigrationDestination) -> dict[str, object]:
    """All that a machine remembers, except until when it waits (see `deadlines`)."""
    return {key: value for key, value in vars(machine).items() if not key.endswith("_s")}


def deadlines(machine: MigrationSource | MigrationDestination) -> dict[str, float]:
    """When a machine that is left alone asks or repeats for the first time, and when it gives up.

    A deadline that is not running is missing.
    """
    asks, gives_up = (
        ("query", "silence") if isinstance(machine, MigrationSource) else ("repeat", "lease")
    )
    left_alone = copy(machine)
    running: dict[str, float] = {}
    for _ in range(2 * round(CONFIG.lease_s / CONFIG.query_interval_s)):
        deadline_s = left_alone.next_deadline_s
        if deadline_s is None:
            break
        left_alone.on_event(Tick(), deadline_s)
        if left_alone.state is not machine.state:
            running[gives_up] = deadline_s
            break
        running.setdefault(asks, deadline_s)
    return running


INTERVALS_S = {
    "query": CONFIG.query_interval_s,
    "repeat": CONFIG.query_interval_s,
    "silence": CONFIG.lease_s,
    "lease": CONFIG.lease_s,
}
"""How far away each deadline is when it is set or renewed."""


def changes(before: dict[str, float], after: dict[str, float], now_s: float) -> str:
    """What became of the deadlines, as the tables of docs/migration_protocol.md say it."""
    words = {
        "set": [each for each in after if each not in before],
        "renew": [each for each in after if each in before and after[each] != before[each]],
        "clear": [each for each in before if each not in after],
    }
    for each in words["set"] + words["renew"]:
        assert after[each] == now_s + INTERVALS_S[each], f"{each} is not set from the event on"
    return "; ".join(f"{verb} {', '.join(each)}" for verb, each in words.items() if each) or "—"
