"""Golden transcripts of migrations in which the wire fails or a machine dies."""

from sterna.config import MigrationConfig, TransportConfig
from sterna.migration.messages import (
    CommitQuery,
    CopyFailed,
    Drained,
    PeerDead,
    Reason,
    Send,
    StageFailed,
    StageReceived,
    Tick,
)
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
from tests.migration.machines import STATE, M, N, inspected, reserve

# -------------------------------------------------------------------------- failures of the wire


def test_failed_copy_of_an_early_stage_costs_the_request_nothing() -> None:
    strikes = {"A Reserved 0": [LOSE, ("A", CopyFailed(0))]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines == [
        *STAGE_0[:5],
        "A CopyFailed: StopCopying; send Abort TRANSFER_FAILED; Ended TRANSFER_FAILED, 1 stages",
        *given_back(Reason.TRANSFER_FAILED, 1),
    ]


def test_failed_receiver_of_the_last_stage_resumes_the_request() -> None:
    duet = Duet(*TWO_STAGES, strikes={"A Drained": [LOSE]})
    duet.tell("B", StageFailed(1))
    assert duet.go_on()[len(UNTIL_COMMIT) :] == [
        "B StageFailed: FreeReservation",
        "B ReservationFreed: send Aborted TRANSFER_FAILED; Ended TRANSFER_FAILED, 2 stages",
        "A Aborted TRANSFER_FAILED: StopCopying; Resume; Ended TRANSFER_FAILED, 2 stages",
    ]


def test_failed_copy_of_the_last_stage_is_left_to_the_destination_to_decide() -> None:
    duet = Duet(*TWO_STAGES, strikes={"A Drained": [LOSE]})
    duet.tell("A", CopyFailed(1))
    assert duet.go_on()[len(UNTIL_COMMIT) :] == [
        "A CopyFailed: send Abort TRANSFER_FAILED",
        "B Abort TRANSFER_FAILED: FreeReservation",
        "B ReservationFreed: send Aborted TRANSFER_FAILED; Ended TRANSFER_FAILED, 2 stages",
        "A Aborted TRANSFER_FAILED: Resume; Ended TRANSFER_FAILED, 2 stages",
    ]


def test_copy_that_failed_for_the_source_alone_does_not_undo_the_adoption() -> None:
    strikes = {"B Adopted": [("A", CopyFailed(1))]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[len(UNTIL_ADOPT) :] == [
        "B Adopted: send Committed; Ended committed, 2 stages",
        "A CopyFailed: send Abort TRANSFER_FAILED",
        "A Committed: Release; send Released; Ended committed, 2 stages",
        "B Abort TRANSFER_FAILED: send Committed",
        "B Released: -",
        "A Committed: -",
    ]


def test_lost_commit_is_found_out_by_the_question_and_resumes_the_request() -> None:
    duet = Duet(*TWO_STAGES, strikes={"A Drained": [LOSE]})
    duet.tell("B", StageReceived(1))
    duet.tell("A", Tick(), after_s=1.0)
    assert duet.go_on()[len(UNTIL_COMMIT) :] == [
        "B StageReceived: -",
        "A Tick: send CommitQuery",
        "B CommitQuery: FreeReservation",
        "B ReservationFreed: send Aborted COMMIT_LOST; Ended COMMIT_LOST, 2 stages",
        "A Aborted COMMIT_LOST: StopCopying; Resume; Ended COMMIT_LOST, 2 stages",
    ]


def test_lost_verdict_is_asked_for_and_given_again() -> None:
    duet = Duet(*TWO_STAGES, strikes={"B Adopted": [LOSE]})
    duet.tell("A", Tick(), after_s=1.0)
    assert duet.go_on()[len(UNTIL_ADOPT) + 1 :] == [
        "A Tick: send CommitQuery",
        "B CommitQuery: send Committed",
        "A Committed: Release; send Released; Ended committed, 2 stages",
        "B Released: -",
    ]


def test_source_asks_for_the_verdict_for_ever_and_never_decides_itself() -> None:
    """A source that resumed because nothing was heard could run the request twice."""
    duet = Duet(*TWO_STAGES, strikes={"A Drained": [LOSE]})
    now_s = 1000.0
    for _ in range(100):
        now_s += 60.0
        assert duet.source.on_event(Tick(), now_s) == [Send("B", CommitQuery(M, N))]
        assert duet.source.is_holding_request


def test_lost_stage_copied_is_told_again_when_the_source_asks() -> None:
    duet = Duet(*TWO_STAGES, strikes={"B StageReceived": [LOSE]})
    duet.tell("A", Tick(), after_s=1.0)
    assert duet.go_on()[len(STAGE_0) - 1 :][:4] == [
        "A Tick: send Reserve 0 (blocks 0+8)",
        "B Reserve 0 (blocks 0+8): send StageCopied 0",
        "A StageCopied 0: Inspect",
        "A Inspected: send Reserve 1 (blocks 8+3, last)",
    ]


def test_late_copy_of_the_last_stages_reserve_is_not_answered_by_stage_copied() -> None:
    """The source waits for the verdict by then: it takes StageCopied of a last stage for a bug."""
    late = reserve(0, is_last=True, reservation=None)
    duet = Duet(inspected(2), strikes={"B StageReceived": [("B", late)]})
    assert duet.lines[6:] == [
        "B StageReceived: -",
        "B Reserve 0 (blocks 0+3, last): -",
        "B Commit (2 blocks): Adopt (2 blocks)",
        "B Adopted: send Committed; Ended committed, 1 stages",
        "A Committed: Release; send Released; Ended committed, 1 stages",
        "B Released: -",
    ]


def test_long_copy_does_not_run_into_the_lease_as_long_as_both_are_there() -> None:
    duet = Duet(*TWO_STAGES, strikes={"A Reserved 0": [LOSE]})
    for _ in range(30):
        duet.tell("A", Tick(), after_s=1.0)
        duet.go_on()
        duet.tell("B", Tick())
    duet.tell("B", StageReceived(0))
    assert duet.go_on()[-1] == "B Released: -"


def test_drain_that_waits_for_a_long_step_does_not_run_into_the_lease() -> None:
    """Time for the first bytes does not help where the reservation ends before it."""
    duet = Duet(*TWO_STAGES, config=MigrationConfig(), strikes={"A Reserved 1": [LOSE]})
    duet.tell("B", Tick(), after_s=TransportConfig().begin_timeout_s - 0.1)
    duet.tell("A", Drained(10, STATE))
    assert duet.go_on()[-1] == "B Released: -"


def test_silent_destination_is_given_up_before_the_drain() -> None:
    duet = Duet(*TWO_STAGES, strikes={"A Inspected": [LOSE]})
    duet.tell("A", Tick(), after_s=10.0)
    assert duet.lines[-1] == ("A Tick: send Abort PEER_SILENT; Ended PEER_SILENT, 0 stages")


def test_silent_source_is_given_up_when_the_lease_is_over() -> None:
    duet = Duet(*TWO_STAGES, strikes={"B StageReceived": [LOSE]})
    duet.tell("B", Tick(), after_s=10.0)
    assert duet.go_on()[-3:-1] == [
        "B Tick: FreeReservation",
        "B ReservationFreed: send Aborted LEASE_EXPIRED; Ended LEASE_EXPIRED, 1 stages",
    ]


# --------------------------------------------------------------------------------------- deaths


def test_death_of_the_destination_before_the_drain_costs_the_request_nothing() -> None:
    strikes = {"A Reserved 0": [LOSE, ("A", PeerDead())]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[-1] == (
        "A PeerDead: StopCopying; Ended PEER_DEAD, 1 stages"
    )


def test_death_of_the_destination_while_draining_resumes_the_request() -> None:
    assert Duet(*TWO_STAGES, strikes={"A Reserved 1": [("A", PeerDead())]}).lines == [
        *UNTIL_DRAIN,
        "A PeerDead: -",
        "A Drained: Resume; Ended PEER_DEAD, 2 stages",
    ]


def test_confirmed_death_of_the_destination_after_commit_resumes_the_request() -> None:
    strikes = {"A Drained": [LOSE, ("A", PeerDead())]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[-1] == (
        "A PeerDead: StopCopying; Resume; Ended PEER_DEAD, 2 stages"
    )


def test_confirmed_death_of_the_destination_after_a_client_abort_frees_the_request() -> None:
    strikes = {"A Drained": [*CLIENT, LOSE, ("A", PeerDead())]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[-1] == (
        "A PeerDead: StopCopying; AbortDrained; Ended PEER_DEAD, 2 stages"
    )


def test_death_of_the_source_before_adoption_gives_everything_back() -> None:
    strikes = {"B StageReceived": [LOSE, ("B", PeerDead())]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[-2:] == [
        "B PeerDead: FreeReservation",
        "B ReservationFreed: Ended PEER_DEAD, 1 stages",
    ]


def test_death_of_the_source_while_the_destination_adopts_leaves_the_request_to_it() -> None:
    strikes = {"B Commit (10 blocks)": [("B", PeerDead())]}
    assert Duet(*TWO_STAGES, strikes=strikes).lines[len(UNTIL_ADOPT) :] == [
        "B PeerDead: -",
        "B Adopted: Ended committed, 2 stages",
    ]
