"""The migrations of one instance: routing, limits, and what is answered for unknown ones."""

import pytest

from sterna.errors import ProtocolError
from sterna.migration.coordinator import MigrationCoordinator
from sterna.migration.messages import (
    Abort,
    Aborted,
    Adopted,
    BlocksReserved,
    ClientAborted,
    Commit,
    CommitQuery,
    Committed,
    CopyFailed,
    Drained,
    Effect,
    ForwardedAbort,
    FreeReservation,
    Inspect,
    Inspected,
    Message,
    Mode,
    PeerDead,
    Reason,
    Released,
    RequestEnded,
    ReservationFreed,
    ReservationId,
    Reserve,
    ReserveBlocks,
    Reserved,
    Send,
    StageCopied,
    StageFailed,
    StageReceived,
)
from sterna.types import MigrationId, RequestId
from tests.migration.machines import CONFIG, RECEIVERS, STATE, A, B, M, N, R, inspected, name

OTHER_MIGRATION = MigrationId("A-2")
OTHER_REQUEST = RequestId("q")


def coordinator(max_incoming: int = 1) -> MigrationCoordinator:
    """That of instance B."""
    return MigrationCoordinator(B, CONFIG, max_incoming)


def first_reserve(
    migration_id: MigrationId = M, request_id: RequestId = R, *, is_last: bool = False
) -> Reserve:
    return Reserve(migration_id, request_id, 0, 0, 8, is_last, None, b"request")


def adopted(migrations: MigrationCoordinator) -> ReservationId:
    """Let request R come and be adopted; returns the reservation's number."""
    migrations.on_message(A, first_reserve(is_last=True), 0.0)
    (answer,) = migrations.on_outcome(M, BlocksReserved(0, RECEIVERS), 0.0)
    number = answer.message.reservation
    migrations.on_message(A, Commit(M, number, R, 0, 8, STATE), 0.0)
    migrations.on_outcome(M, StageReceived(0), 0.0)
    migrations.on_outcome(M, Adopted(), 0.0)
    return number


def test_migration_ids_are_the_instance_and_a_counter() -> None:
    migrations = coordinator()
    ids = [migrations.start(RequestId(f"r{i}"), A, Mode.LIVE, 0.0)[0] for i in range(3)]
    assert ids == ["B-1", "B-2", "B-3"]


def test_outcomes_go_to_the_migration_that_they_name() -> None:
    migrations = coordinator()
    first, effects = migrations.start(R, A, Mode.LIVE, 0.0)
    second, _ = migrations.start(OTHER_REQUEST, A, Mode.LIVE, 0.0)
    assert effects == [Inspect(first, R)]
    (effect,) = migrations.on_outcome(second, inspected(9), 0.0)
    assert effect.message.request_id == OTHER_REQUEST


# ------------------------------------------------------------------------ unknown migrations

UNKNOWN = Reason.UNKNOWN_MIGRATION
ANSWERS: list[tuple[Message, list[Effect]]] = [
    (Reserve(M, R, 1, 8, 3, True, N), [Send(A, Aborted(M, N, UNKNOWN))]),
    (Reserve(M, R, 0, 0, 8, False, N), [Send(A, Aborted(M, N, UNKNOWN))]),
    (Commit(M, N, R, 1, 9, STATE), [Send(A, Aborted(M, N, UNKNOWN))]),
    (CommitQuery(M, N), [Send(A, Aborted(M, N, UNKNOWN))]),
    (ForwardedAbort(M, N, R), [Send(A, Aborted(M, N, UNKNOWN))]),
    (Reserved(M, N, 0, RECEIVERS), [Send(A, Abort(M, UNKNOWN))]),
    (StageCopied(M, N, 0), [Send(A, Abort(M, UNKNOWN))]),
    (Committed(M, N), [Send(A, Released(M))]),
    (Aborted(M, N, UNKNOWN), []),
    (Abort(M, UNKNOWN), []),
    (Released(M), []),
]


@pytest.mark.parametrize(("message", "answer"), ANSWERS, ids=lambda each: type(each).__name__)
def test_unknown_migration_gets_an_answer_that_ends_it(
    message: Message, answer: list[Effect]
) -> None:
    assert coordinator().on_message(A, message, 0.0) == answer


def test_every_message_is_answered_or_ignored_by_name() -> None:
    assert {type(message) for message, _ in ANSWERS} == set(Message.__args__)


def test_verdict_committed_is_remembered_until_the_source_has_heard_it() -> None:
    """Else the next question would be answered Aborted, and the source resume the request."""
    migrations = coordinator()
    number = adopted(migrations)
    query = CommitQuery(M, number)
    for _ in range(3):
        assert migrations.on_message(A, query, 0.0) == [Send(A, Committed(M, number))]
    migrations.on_message(A, Released(M), 0.0)
    assert not migrations.has_machines


def test_verdict_committed_is_remembered_until_the_source_is_dead() -> None:
    migrations = coordinator()
    adopted(migrations)
    assert migrations.on_peer_dead(A, 0.0) == []
    assert not migrations.has_machines


def test_death_concerns_only_migrations_with_the_dead_instance() -> None:
    migrations = coordinator()
    adopted(migrations)
    migrations.on_peer_dead(B, 0.0)
    assert migrations.has_machines


def test_late_copy_of_the_first_reserve_cannot_take_the_commit_of_another_reservation() -> None:
    """The first reservation ran out and was forgotten; then a copy of its Reserve arrived. The
    source's Commit is for the first one, and must not be adopted under the second, since the
    source has been, or will be, told that the first one is gone."""
    migrations = coordinator()
    migrations.on_message(A, first_reserve(is_last=True), 0.0)
    (answer,) = migrations.on_outcome(M, BlocksReserved(0, RECEIVERS), 0.0)
    first = answer.message.reservation
    assert migrations.on_tick(CONFIG.lease_s) == [FreeReservation(M)]
    migrations.on_outcome(M, ReservationFreed(), CONFIG.lease_s)

    migrations.on_message(A, first_reserve(is_last=True), CONFIG.lease_s)
    (answer,) = migrations.on_outcome(M, BlocksReserved(0, RECEIVERS), CONFIG.lease_s)
    assert answer.message.reservation != first

    commit = Commit(M, first, R, 0, 8, STATE)
    refusal = [Send(A, Aborted(M, first, Reason.UNKNOWN_MIGRATION))]
    assert migrations.on_message(A, commit, CONFIG.lease_s) == refusal
    assert migrations.on_outcome(M, StageReceived(0), CONFIG.lease_s) == []


# --------------------------------------------------------------------------------- what is late


@pytest.mark.parametrize(
    "event",
    [
        Inspected(None),
        CopyFailed(0),
        StageReceived(0),
        StageFailed(0),
        RequestEnded(Reason.REQUEST_FINISHED),
    ],
    ids=lambda event: type(event).__name__,
)
def test_late_outcomes_of_a_forgotten_migration_are_ignored(event: Inspected) -> None:
    assert coordinator().on_outcome(M, event, 0.0) == []


@pytest.mark.parametrize(
    "event",
    [Drained(1, STATE), BlocksReserved(0, ()), ReservationFreed(), Adopted(), PeerDead()],
    ids=lambda event: type(event).__name__,
)
def test_outcomes_that_are_always_waited_for_are_never_late(event: Drained) -> None:
    """To ignore a Drained would lose the request; to ignore a BlocksReserved, the blocks."""
    with pytest.raises(ProtocolError):
        coordinator().on_outcome(M, event, 0.0)


def test_message_of_a_migration_with_somebody_else_is_a_protocol_error() -> None:
    migrations = coordinator()
    number = adopted(migrations)
    with pytest.raises(ProtocolError):
        migrations.on_message(B, CommitQuery(M, number), 0.0)


# --------------------------------------------------------------------------------------- limits


def test_more_incoming_migrations_than_allowed_are_refused() -> None:
    migrations = coordinator(max_incoming=2)
    for number in (1, 2):
        request_id = RequestId(f"r{number}")
        reserve = first_reserve(MigrationId(f"A-{number}"), request_id)
        (effect,) = migrations.on_message(A, reserve, 0.0)
        assert isinstance(effect, ReserveBlocks)
    third = MigrationId("A-3")
    assert migrations.on_message(A, first_reserve(third, RequestId("r3")), 0.0) == [
        Send(A, Aborted(third, None, Reason.BUSY))
    ]
    assert migrations.num_incoming == 2


def test_adopted_requests_do_not_count_as_incoming() -> None:
    migrations = coordinator(max_incoming=1)
    adopted(migrations)
    reserve = first_reserve(OTHER_MIGRATION, OTHER_REQUEST)
    (effect,) = migrations.on_message(A, reserve, 0.0)
    assert isinstance(effect, ReserveBlocks)


def test_refused_migrations_leave_no_machine() -> None:
    migrations = coordinator(max_incoming=1)
    migrations.on_message(A, first_reserve(), 0.0, is_terminating=True)
    assert not migrations.has_machines


def test_terminating_instance_refuses_what_comes() -> None:
    refusal = [Send(A, Aborted(M, None, Reason.TERMINATING))]
    assert coordinator().on_message(A, first_reserve(), 0.0, is_terminating=True) == refusal


def test_terminating_instance_lets_migrations_in_flight_end() -> None:
    migrations = coordinator()
    migrations.on_message(A, first_reserve(), 0.0)
    (answer,) = migrations.on_outcome(M, BlocksReserved(0, RECEIVERS), 0.0)
    number = answer.message.reservation
    migrations.on_outcome(M, StageReceived(0), 0.0)
    reserve = Reserve(M, R, 1, 8, 3, True, number)
    (effect,) = migrations.on_message(A, reserve, 0.0, is_terminating=True)
    assert isinstance(effect, ReserveBlocks)


def test_request_that_comes_back_before_its_departure_has_a_verdict_is_refused() -> None:
    """Its blocks are still here, suspended; the verdict that frees them is on its way."""
    migrations = coordinator()
    migrations.start(R, A, Mode.LIVE, 0.0)
    assert migrations.on_message(A, first_reserve(), 0.0) == [
        Send(A, Aborted(M, None, Reason.DUPLICATE_REQUEST))
    ]


def test_request_that_is_coming_already_is_refused() -> None:
    migrations = coordinator(max_incoming=2)
    migrations.on_message(A, first_reserve(), 0.0)
    assert migrations.on_message(A, first_reserve(OTHER_MIGRATION), 0.0) == [
        Send(A, Aborted(OTHER_MIGRATION, None, Reason.DUPLICATE_REQUEST))
    ]


def test_request_that_came_may_not_leave_before_its_source_has_heard_of_it() -> None:
    """If it moved on and this instance died, the source would resume it while it runs elsewhere."""
    migrations = coordinator()
    adopted(migrations)
    assert R in migrations.requests()
    migrations.on_message(A, Released(M), 0.0)
    assert R not in migrations.requests()


def test_requests_with_a_reservation_are_arriving_until_they_are_adopted() -> None:
    migrations = coordinator()
    assert migrations.arriving_requests() == frozenset()
    migrations.on_message(A, first_reserve(is_last=True), 0.0)
    (answer,) = migrations.on_outcome(M, BlocksReserved(0, RECEIVERS), 0.0)
    number = answer.message.reservation
    migrations.on_outcome(M, StageReceived(0), 0.0)
    assert migrations.arriving_requests() == {R}
    migrations.on_message(A, Commit(M, number, R, 0, 8, STATE), 0.0)
    assert migrations.arriving_requests() == {R}
    migrations.on_outcome(M, Adopted(), 0.0)
    assert migrations.arriving_requests() == frozenset()


def test_a_reservation_that_is_being_given_back_lets_nothing_arrive() -> None:
    migrations = coordinator()
    migrations.on_message(A, first_reserve(is_last=True), 0.0)
    migrations.on_outcome(M, BlocksReserved(0, RECEIVERS), 0.0)
    assert migrations.arriving_requests() == {R}
    migrations.on_peer_dead(A, 0.0)
    assert migrations.arriving_requests() == frozenset()


def test_the_earliest_deadline_of_all_migrations_is_the_coordinators() -> None:
    migrations = coordinator(max_incoming=2)
    assert migrations.next_deadline_s is None
    migrations.on_message(A, first_reserve(), 0.0)
    assert migrations.next_deadline_s == CONFIG.lease_s
    started, _ = migrations.start(OTHER_REQUEST, A, Mode.LIVE, 0.0)
    migrations.on_outcome(started, inspected(9), 3.0)
    assert migrations.next_deadline_s == 3.0 + CONFIG.query_interval_s
    assert [name(effect) for effect in migrations.on_tick(4.0)] == ["send Reserve"]


def committing(migrations: MigrationCoordinator, request_id: RequestId = R) -> MigrationId:
    """Let a request go to A, until A has its Commit; returns the migration."""
    leaving, _ = migrations.start(request_id, A, Mode.STOP_AND_COPY, 0.0)
    migrations.on_outcome(leaving, inspected(9), 0.0)
    migrations.on_message(A, Reserved(leaving, N, 0, RECEIVERS), 0.0)
    migrations.on_outcome(leaving, Drained(9, STATE), 0.0)
    return leaving


def test_a_migration_from_here_counts_until_it_has_ended() -> None:
    migrations = coordinator()
    first = committing(migrations)
    second, _ = migrations.start(OTHER_REQUEST, A, Mode.LIVE, 0.0)
    assert (migrations.num_outgoing, migrations.num_incoming) == (2, 0)
    migrations.on_outcome(second, Inspected(None), 0.0)
    assert migrations.num_outgoing == 1
    migrations.on_message(A, Committed(first, N), 0.0)
    assert (migrations.num_outgoing, migrations.num_incoming) == (0, 0)
    assert not migrations.has_machines


def test_a_migration_that_only_forwards_its_clients_abort_has_ended_once() -> None:
    """The request is not here any more; the destination has yet to hear of its client."""
    migrations = coordinator()
    leaving = committing(migrations)
    migrations.on_outcome(leaving, ClientAborted(), 0.0)
    migrations.on_message(A, Committed(leaving, N), 0.0)
    assert (migrations.num_outgoing, migrations.has_machines) == (0, True)
    assert migrations.source_of(R) is None
    assert migrations.requests() == frozenset()
    migrations.on_message(A, Aborted(leaving, N, Reason.REQUEST_ABORTED), 0.0)
    assert (migrations.num_outgoing, migrations.has_machines) == (0, False)


def test_a_migration_to_here_counts_until_its_request_is_adopted() -> None:
    migrations = coordinator(max_incoming=2)
    migrations.on_message(A, first_reserve(OTHER_MIGRATION, OTHER_REQUEST), 0.0)
    adopted(migrations)
    assert (migrations.num_outgoing, migrations.num_incoming) == (0, 1)
    assert migrations.destination_of(R) is None
    coming = migrations.destination_of(OTHER_REQUEST)
    assert coming is not None
    assert coming.migration_id == OTHER_MIGRATION


def test_requests_that_leave_are_known_by_their_migrations() -> None:
    migrations = coordinator()
    first = committing(migrations)
    second, _ = migrations.start(OTHER_REQUEST, A, Mode.LIVE, 0.0)
    found = [migrations.source_of(each) for each in (R, OTHER_REQUEST, RequestId("unknown"))]
    assert [each and each.migration_id for each in found] == [first, second, None]
    assert migrations.requests() == {R, OTHER_REQUEST}
    assert migrations.committing_requests() == {R}


def test_a_later_deadline_of_another_migration_is_not_the_next_one() -> None:
    migrations = coordinator(max_incoming=2)
    committing(migrations)
    migrations.on_message(A, first_reserve(OTHER_MIGRATION, OTHER_REQUEST), 0.0)
    migrations.start(RequestId("not inspected"), A, Mode.LIVE, 0.0)
    assert migrations.next_deadline_s == CONFIG.query_interval_s


def test_an_earlier_deadline_of_a_later_migration_is_the_next_one() -> None:
    migrations = coordinator()
    first, _ = migrations.start(R, A, Mode.LIVE, 0.0)
    second, _ = migrations.start(OTHER_REQUEST, A, Mode.LIVE, 0.0)
    migrations.on_outcome(first, inspected(9), 3.0)
    migrations.on_outcome(second, inspected(9), 2.0)
    assert migrations.next_deadline_s == 2.0 + CONFIG.query_interval_s
