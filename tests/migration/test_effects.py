"""What the machines of a migration want done, with all that belongs to it.

The tables compare the names of effects, and the transcripts what matters of them.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sterna.migration.messages import (
    Abort,
    AbortRequest,
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Cancelled,
    ClientAborted,
    Commit,
    Committed,
    CopyBlocks,
    CopyFailed,
    Drain,
    Drained,
    DrainRefused,
    Effect,
    Ended,
    Event,
    FreeReservation,
    Inspected,
    Mode,
    PeerDead,
    Reason,
    Received,
    Release,
    Released,
    ReservationFreed,
    Reserve,
    ReserveBlocks,
    Reserved,
    ReserveFailed,
    Resume,
    Send,
)
from tests.migration.machines import (
    DESTINATION_ANOTHER_RESERVATION,
    RECEIVERS,
    REQUEST,
    START_S,
    STATE,
    A,
    B,
    M,
    N,
    R,
    aborted,
    committed,
    destination_in,
    inspected,
    progress,
    reserve,
    reserved,
    source_in,
    stage_copied,
)


def source_ended(reason: Reason | None, num_stages: int) -> Ended:
    return Ended(M, R, B, is_outgoing=True, aborted=reason, stages=num_stages)


def destination_ended(reason: Reason | None, num_stages: int) -> Ended:
    return Ended(M, R, A, is_outgoing=False, aborted=reason, stages=num_stages)


def refused(reason: Reason) -> Send:
    return Send(A, aborted(reason).message)


SOURCE_EFFECTS: dict[str, tuple[str, Sequence[Event], list[Effect]]] = {
    "the first Reserve brings the request": (
        "INSPECTING, first stage",
        [inspected(9)],
        [Send(B, Reserve(M, R, 0, 0, 8, False, None, REQUEST))],
    ),
    "the next one names the reservation": (
        "INSPECTING",
        [inspected(14)],
        [Send(B, Reserve(M, R, 1, 8, 5, False, N, None))],
    ),
    "a stage goes to the receivers that listen": (
        "RESERVING",
        [reserved(1)],
        [CopyBlocks(M, R, 1, 8, 5, RECEIVERS, is_last=False)],
    ),
    "the drain is for the request as it was inspected": (
        "RESERVING, last stage",
        [reserved(1)],
        [Drain(M, R, Mode.LIVE, 0, first_block=8, max_blocks=2)],
    ),
    "the last stage and the commit": (
        "DRAINING",
        [Drained(9, STATE)],
        [
            CopyBlocks(M, R, 1, 8, 1, RECEIVERS, is_last=True),
            Send(B, Commit(M, N, R, 1, 9, STATE)),
        ],
    ),
    "the verdict": (
        "COMMITTING",
        [committed()],
        [Release(M, R), Send(B, Released(M)), source_ended(None, 2)],
    ),
    "nothing is sent any more of a copy that failed": (
        "COMMITTING",
        [CopyFailed(1), aborted(Reason.TRANSFER_FAILED)],
        [
            Send(B, Abort(M, Reason.TRANSFER_FAILED)),
            Resume(M, R),
            source_ended(Reason.TRANSFER_FAILED, 2),
        ],
    ),
    "a request that was never there": (
        "INSPECTING, first stage",
        [Inspected(None)],
        [source_ended(Reason.REQUEST_UNKNOWN, 0)],
    ),
    "a request that has finished since": (
        "INSPECTING",
        [Inspected(None)],
        [Send(B, Abort(M, Reason.REQUEST_FINISHED)), source_ended(Reason.REQUEST_FINISHED, 1)],
    ),
    "a request that is preempted is not the same one": (
        "INSPECTING",
        [Inspected(progress(9, num_preemptions=1))],
        [Send(B, Abort(M, Reason.REQUEST_PREEMPTED)), source_ended(Reason.REQUEST_PREEMPTED, 1)],
    ),
    "why it was given up during a drain": (
        "DRAINING",
        [PeerDead(), DrainRefused(None)],
        [source_ended(Reason.PEER_DEAD, 2)],
    ),
}


@pytest.mark.parametrize("what", SOURCE_EFFECTS)
def test_source_wants_done_all_that_belongs_to_it(what: str) -> None:
    state, events, expected = SOURCE_EFFECTS[what]
    source = source_in(state)
    assert [each for event in events for each in source.on_event(event, START_S)] == expected


def test_each_stage_names_the_valid_tokens_of_the_request_when_it_was_planned() -> None:
    """By it the engines leave out memory that no layer looks at any longer. The copy names those
    of its stage, although the request has gone on."""
    source = source_in("INSPECTING")
    position = replace(progress(14), num_valid_tokens=431)
    (asked,) = source.on_event(Inspected(position), START_S)
    assert asked == Send(B, Reserve(M, R, 1, 8, 5, False, N, None, num_valid_tokens=431))
    (copied,) = source.on_event(reserved(1), START_S)
    assert copied == CopyBlocks(M, R, 1, 8, 5, RECEIVERS, False, num_valid_tokens=431)
    source.on_event(stage_copied(1), START_S)
    last = replace(progress(15), num_valid_tokens=470)
    source.on_event(Inspected(last), START_S)
    source.on_event(reserved(2), START_S)
    copied, _ = source.on_event(Drained(15, STATE), START_S)
    assert copied == CopyBlocks(M, R, 2, 13, 2, RECEIVERS, True, num_valid_tokens=470)


def test_a_destination_reserves_for_the_length_that_the_source_has_named() -> None:
    destination = destination_in("NEW")
    message = Reserve(M, R, 0, 0, 8, False, None, REQUEST, num_valid_tokens=260)
    (effect,) = destination.on_event(Received(message), START_S)
    assert effect == ReserveBlocks(M, R, 0, 0, 8, False, REQUEST, num_valid_tokens=260)


DESTINATION_EFFECTS: dict[str, tuple[str, Sequence[Event], list[Effect]]] = {
    "the request is reserved for": (
        "NEW",
        [reserve(0, reservation=None)],
        [ReserveBlocks(M, R, 0, 0, 8, is_last=False, request=REQUEST)],
    ),
    "the receivers are named": (
        "RESERVING",
        [BlocksReserved(1, ("b:2",)), reserve(1)],
        2 * [Send(A, Reserved(M, N, 1, ("b:2",)))],
    ),
    "the request is adopted": (
        "RECEIVED, last stage",
        [Received(Commit(M, N, R, 1, 9, STATE)), Adopted()],
        [Adopt(M, R, 9, STATE), Send(A, Committed(M, N)), destination_ended(None, 2)],
    ),
    "a client that is gone is why nothing was adopted": (
        "ADOPTING, client aborted here",
        [AdoptFailed(Reason.UNSUPPORTED), ReservationFreed()],
        [
            FreeReservation(M),
            refused(Reason.REQUEST_ABORTED),
            destination_ended(Reason.REQUEST_ABORTED, 2),
        ],
    ),
    "the engine's reason, where the client is there": (
        "ADOPTING",
        [AdoptFailed(Reason.UNSUPPORTED), ReservationFreed()],
        [FreeReservation(M), refused(Reason.UNSUPPORTED), destination_ended(Reason.UNSUPPORTED, 2)],
    ),
    "a request whose source and client are gone ends here": (
        "ADOPTING, client aborted here",
        [PeerDead(), Adopted()],
        [AbortRequest(R), destination_ended(None, 2)],
    ),
    "a stage that was reserved as the migration was given up is a stage": (
        "GIVING_UP, first stage",
        [BlocksReserved(0, RECEIVERS), ReservationFreed()],
        [FreeReservation(M), refused(Reason.CANCELLED), destination_ended(Reason.CANCELLED, 1)],
    ),
    "why it was given up as blocks were reserved": (
        "RESERVING, first stage",
        [Received(Abort(M, Reason.REQUEST_PREEMPTED)), ReserveFailed(0, Reason.NO_MEMORY)],
        [refused(Reason.REQUEST_PREEMPTED), destination_ended(Reason.REQUEST_PREEMPTED, 0)],
    ),
    "why it was given up between stages": (
        "RECEIVED",
        [ClientAborted(), Cancelled(), ReservationFreed()],
        [
            FreeReservation(M),
            refused(Reason.REQUEST_ABORTED),
            destination_ended(Reason.REQUEST_ABORTED, 2),
        ],
    ),
}


@pytest.mark.parametrize("what", DESTINATION_EFFECTS)
def test_destination_wants_done_all_that_belongs_to_it(what: str) -> None:
    state, events, expected = DESTINATION_EFFECTS[what]
    destination = destination_in(state)
    assert [each for event in events for each in destination.on_event(event, START_S)] == expected


@pytest.mark.parametrize("event", DESTINATION_ANOTHER_RESERVATION, ids=repr)
def test_a_destination_that_is_over_answers_nothing(event: Received) -> None:
    """The coordinator answers for it."""
    assert destination_in("OVER").on_event(event, START_S) == []
