"""Golden transcripts of migrations whose request ends, and of those that are called off."""

from sterna.migration.messages import (
    Cancelled,
    ClientAborted,
    DrainRefused,
    Inspected,
    Reason,
    RequestEnded,
    Tick,
)
from sterna.migration.source import SourceState
from tests.migration.courses import (
    CLIENT,
    STAGE_0,
    TWO_STAGES,
    UNTIL_ADOPT,
    UNTIL_COMMIT,
    UNTIL_DRAIN,
    given_back,
)
from tests.migration.duet import LOSE, Duet
from tests.migration.machines import REQUEST, inspected, progress

# --------------------------------------------------------------------- the request ends or moves


def test_a_request_that_finished_between_stages_ends_the_migration() -> None:
    """Section 4.2: "after each stage, the source instance also checks whether the request being
    migrated has completed or been preempted --- if it has, the source will notify the
    destination to abort and release the reserved blocks"."""
    assert Duet(inspected(9), Inspected(None)).lines == [
        *STAGE_0,
        "A Inspected: send Abort REQUEST_FINISHED; Ended REQUEST_FINISHED, 1 stages",
        *given_back(Reason.REQUEST_FINISHED, 1),
    ]


def test_a_request_that_was_preempted_and_runs_again_ends_the_migration() -> None:
    """Its presence alone does not tell that its blocks are others than those that were copied."""
    assert Duet(inspected(9), Inspected(progress(9, num_preemptions=1))).lines == [
        *STAGE_0,
        "A Inspected: send Abort REQUEST_PREEMPTED; Ended REQUEST_PREEMPTED, 1 stages",
        *given_back(Reason.REQUEST_PREEMPTED, 1),
    ]


def test_a_request_that_was_preempted_before_its_migration_can_move() -> None:
    once = progress(9, num_preemptions=1)
    lines = Duet(Inspected(once, REQUEST), Inspected(once)).lines
    assert lines[-3] == "B Adopted: send Committed; Ended committed, 2 stages"


def test_a_request_that_was_preempted_before_the_drain_ends_the_migration() -> None:
    refused = DrainRefused(Reason.REQUEST_PREEMPTED)
    assert Duet(*TWO_STAGES, drains=[refused]).lines == [
        *UNTIL_DRAIN,
        "A DrainRefused: send Abort REQUEST_PREEMPTED; Ended REQUEST_PREEMPTED, 2 stages",
        *given_back(Reason.REQUEST_PREEMPTED, 2),
    ]


def test_a_hint_that_the_request_ended_stops_the_copy_at_once() -> None:
    ended = RequestEnded(Reason.REQUEST_FINISHED)
    lines = Duet(inspected(9), strikes={"A Reserved 0": [("A", ended)]}).lines
    assert lines[len(STAGE_0) - 2] == (
        "A RequestEnded: StopCopying; send Abort REQUEST_FINISHED; Ended REQUEST_FINISHED, 1 stages"
    )
    assert lines[-2].startswith("B ReservationFreed: send Aborted REQUEST_FINISHED")


def test_a_request_that_is_not_there_ends_the_migration_before_anything_is_said() -> None:
    assert Duet(Inspected(None)).lines == [
        "A start: Inspect",
        "A Inspected: Ended REQUEST_UNKNOWN, 0 stages",
    ]


def test_an_immovable_request_ends_the_migration_before_anything_is_said() -> None:
    assert Duet(Inspected(progress(9, is_immovable=True), REQUEST)).lines == [
        "A start: Inspect",
        "A Inspected: Ended REQUEST_IMMOVABLE, 0 stages",
    ]


# ------------------------------------------------------------------------------- client aborts


def test_client_abort_while_a_stage_is_copied_ends_the_request_and_the_migration() -> None:
    assert Duet(*TWO_STAGES, strikes={"A Reserved 0": CLIENT}).lines == [
        *STAGE_0[:5],
        "A ClientAborted: StopCopying; AbortRequest; send Abort REQUEST_ABORTED;"
        " Ended REQUEST_ABORTED, 1 stages",
        "B StageReceived: send StageCopied 0",
        "B Abort REQUEST_ABORTED: FreeReservation",
        "A StageCopied 0: -",
        "B ReservationFreed: send Aborted REQUEST_ABORTED; Ended REQUEST_ABORTED, 1 stages",
        "A Aborted REQUEST_ABORTED: -",
    ]


def test_client_abort_that_finds_the_destination_reserving_waits_for_the_blocks_there() -> None:
    assert Duet(*TWO_STAGES, strikes={"A Inspected": CLIENT}).lines == [
        *STAGE_0[:2],
        "A ClientAborted: AbortRequest; send Abort REQUEST_ABORTED;"
        " Ended REQUEST_ABORTED, 0 stages",
        STAGE_0[2],
        "B Abort REQUEST_ABORTED: -",
        "B BlocksReserved: FreeReservation",
        "B ReservationFreed: send Aborted REQUEST_ABORTED; Ended REQUEST_ABORTED, 1 stages",
        "A Aborted REQUEST_ABORTED: -",
    ]


def test_client_abort_while_draining_frees_the_request_when_it_is_drained() -> None:
    assert Duet(*TWO_STAGES, strikes={"A Reserved 1": CLIENT}).lines == [
        *UNTIL_DRAIN,
        "A ClientAborted: send Abort REQUEST_ABORTED",
        "A Drained: AbortDrained; Ended REQUEST_ABORTED, 2 stages",
        *given_back(Reason.REQUEST_ABORTED, 2),
    ]


def test_client_abort_while_draining_ends_a_request_that_could_not_be_drained() -> None:
    drains = [DrainRefused(Reason.REQUEST_PREEMPTED)]
    assert Duet(*TWO_STAGES, drains=drains, strikes={"A Reserved 1": CLIENT}).lines == [
        *UNTIL_DRAIN,
        "A ClientAborted: send Abort REQUEST_ABORTED",
        "A DrainRefused: AbortRequest; Ended REQUEST_ABORTED, 2 stages",
        *given_back(Reason.REQUEST_ABORTED, 2),
    ]


def test_client_abort_that_overtakes_the_last_blocks_keeps_the_request_from_being_adopted() -> None:
    duet = Duet(*TWO_STAGES, strikes={"A Drained": [LOSE]})
    duet.tell("A", ClientAborted())
    assert duet.go_on()[len(UNTIL_COMMIT) :] == [
        "A ClientAborted: send ForwardedAbort",
        "B ForwardedAbort: FreeReservation",
        "B ReservationFreed: send Aborted REQUEST_ABORTED; Ended REQUEST_ABORTED, 2 stages",
        "A Aborted REQUEST_ABORTED: StopCopying; AbortDrained; Ended REQUEST_ABORTED, 2 stages",
    ]


def test_client_abort_while_the_destination_adopts_ends_the_request_on_both() -> None:
    assert Duet(*TWO_STAGES, strikes={"A Drained": CLIENT}).lines == [
        *UNTIL_COMMIT,
        "A ClientAborted: send ForwardedAbort",
        *UNTIL_ADOPT[-2:],
        "B ForwardedAbort: -",
        "B Adopted: AbortRequest; send Aborted REQUEST_ABORTED; Ended REQUEST_ABORTED, 2 stages",
        "A Aborted REQUEST_ABORTED: StopCopying; AbortDrained; Ended REQUEST_ABORTED, 2 stages",
    ]


def test_client_abort_after_adoption_is_repeated_until_the_destination_has_heard_it() -> None:
    strikes = {"B Adopted": CLIENT, "A Committed": [LOSE]}
    duet = Duet(*TWO_STAGES, strikes=strikes)
    assert duet.source.state is SourceState.FORWARDING
    duet.tell("A", Tick(), after_s=1.0)
    assert duet.go_on()[len(UNTIL_ADOPT) :] == [
        "B Adopted: send Committed; Ended committed, 2 stages",
        "A ClientAborted: send ForwardedAbort",
        "A Committed: Release; send ForwardedAbort; Ended committed, 2 stages",
        "A Tick: send ForwardedAbort",
        "B ForwardedAbort: AbortRequest; send Aborted REQUEST_ABORTED",
        "A Aborted REQUEST_ABORTED: -",
    ]


def test_client_abort_that_reaches_the_destination_after_adoption_leaves_the_verdict() -> None:
    """Only the source's wish may turn the verdict: a source that never asked would resume."""
    assert Duet(*TWO_STAGES, strikes={"B Adopted": [("B", ClientAborted())]}).lines == [
        *UNTIL_ADOPT,
        "B Adopted: send Committed; Ended committed, 2 stages",
        "B ClientAborted: AbortRequest",
        "A Committed: Release; send Released; Ended committed, 2 stages",
        "B Released: -",
    ]


# ------------------------------------------------------------------------------------ cancelled


def test_cancelled_migration_gives_everything_back() -> None:
    strikes = {"A Reserved 0": [LOSE, ("A", Cancelled())]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[len(STAGE_0) - 2 :] == [
        "A Cancelled: StopCopying; send Abort CANCELLED; Ended CANCELLED, 1 stages",
        *given_back(Reason.CANCELLED, 1),
    ]


def test_migration_cancelled_while_draining_resumes_the_request() -> None:
    """Mistake 8: the abort must undo the drain also when that had not yet taken effect."""
    assert Duet(*TWO_STAGES, strikes={"A Reserved 1": [("A", Cancelled())]}).lines == [
        *UNTIL_DRAIN,
        "A Cancelled: send Abort CANCELLED",
        "A Drained: Resume; Ended CANCELLED, 2 stages",
        *given_back(Reason.CANCELLED, 2),
    ]


def test_cancelled_after_commit_is_too_late() -> None:
    lines = Duet(*TWO_STAGES, strikes={"A Drained": [("A", Cancelled())]}).lines
    assert lines[-3] == "B Adopted: send Committed; Ended committed, 2 stages"
