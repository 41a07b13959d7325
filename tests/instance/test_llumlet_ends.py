"""What a llumlet makes of deaths, of ended requests and of termination; what is open until when."""

from sterna.instance.llumlet import Llumlet
from sterna.migration.messages import (
    Abort,
    Aborted,
    Commit,
    Ended,
    Mode,
    Reason,
    Released,
    Reserve,
    Resume,
    Send,
)
from sterna.types import MigrationId, RequestId
from tests.instance.llumlets import (
    A,
    B,
    C,
    N,
    come,
    coming,
    committed,
    config,
    inspects,
    paired,
    queuing,
    running,
    until_commit,
    until_reserve,
    view,
)


def test_a_dead_destination_gets_no_more_requests() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    effects = llumlet.on_peer_dead(B, 0.0)
    assert Ended(MigrationId("A-1"), RequestId("a"), B, True, Reason.PEER_DEAD, 0) in effects
    assert inspects(effects) == []
    assert inspects(llumlet.on_tick(5.0)) == []


def test_a_dead_destination_returns_what_it_had_not_confirmed() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    effects = llumlet.on_peer_dead(B, 0.0)
    assert Resume(MigrationId("A-1"), RequestId("r")) in effects


def test_what_comes_back_from_a_destination_that_died_moves_no_more() -> None:
    """It may have said other tokens there, of which its client has some. Its front end finds the
    contradiction in what is said here; what a third instance says behind that may overtake it."""
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    llumlet.on_peer_dead(B, 0.0)
    llumlet.on_view(view(running("r")), 5.0)
    assert inspects(llumlet.on_destination(C, 5.0)) == []
    assert inspects(llumlet.on_look(view(running("r")), 5.0)) == []
    assert llumlet.on_order(RequestId("r"), C, Mode.LIVE, 5.0) is Reason.REQUEST_IMMOVABLE
    assert inspects(llumlet.on_view(view(running("r"), running("s")), 5.0)) == ["s"]


def test_what_comes_back_moves_no_more_by_an_older_view_either() -> None:
    llumlet = Llumlet(A, config(retry_backoff_s=0.0))
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.on_destination(B, 0.0)
    until_commit(llumlet, "A-1")
    llumlet.on_destination(C, 0.0)
    assert inspects(llumlet.on_peer_dead(B, 0.0)) == []


def test_what_was_not_committed_to_a_destination_that_died_may_move() -> None:
    llumlet = paired(running("r"))
    until_reserve(llumlet, "A-1")
    llumlet.on_peer_dead(B, 0.0)
    llumlet.on_view(view(running("r")), 5.0)
    assert inspects(llumlet.on_destination(C, 5.0)) == ["r"]


def test_what_a_destination_gave_back_before_it_died_may_move() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    aborted = Aborted(MigrationId("A-1"), N, Reason.TRANSFER_FAILED)
    llumlet.on_message(B, aborted, 0.0)
    llumlet.on_peer_dead(B, 0.0)
    llumlet.on_view(view(running("r")), 5.0)
    assert inspects(llumlet.on_destination(C, 5.0)) == ["r"]


def test_what_came_back_and_has_ended_is_forgotten() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    llumlet.on_peer_dead(B, 0.0)
    llumlet.on_request_gone(RequestId("r"))
    llumlet.on_view(view(running("r")), 5.0)
    assert inspects(llumlet.on_destination(C, 5.0)) == ["r"]


def test_death_of_a_stranger_changes_nothing() -> None:
    llumlet = paired(running("r"))
    assert llumlet.on_peer_dead(C, 0.0) == []
    assert inspects(committed(llumlet, "A-1")) == []


def test_death_of_a_stranger_leaves_the_destination_as_it_is() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    llumlet.on_peer_dead(C, 0.0)
    assert llumlet.destination == B
    assert inspects(committed(llumlet, "A-1")) == ["b"]


def test_death_of_a_peer_before_the_first_view_is_borne() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_destination(B, 0.0)
    llumlet.on_order(RequestId("r"), B, Mode.LIVE, 0.0)
    until_commit(llumlet, "A-1")
    assert Resume(MigrationId("A-1"), RequestId("r")) in llumlet.on_peer_dead(B, 0.0)
    assert llumlet.destination is None


def test_what_a_dead_peer_returns_to_the_queue_moves_no_more() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    llumlet.on_peer_dead(B, 0.0)
    llumlet.set_terminating(True, 1.0)
    llumlet.on_view(view(queuing("r")), 5.0)
    assert inspects(llumlet.on_destination(C, 5.0)) == []
    assert inspects(llumlet.on_view(view(queuing("r"), queuing("s")), 5.0)) == ["s"]


def test_a_request_that_ended_ends_its_migration() -> None:
    llumlet = paired(running("r"))
    until_reserve(llumlet, "A-1")
    effects = llumlet.on_request_ended(RequestId("r"), Reason.REQUEST_FINISHED, 0.0)
    assert Send(B, Abort(MigrationId("A-1"), Reason.REQUEST_FINISHED)) in effects


def test_a_request_that_ended_without_a_migration_is_nobodys_concern() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.on_request_ended(RequestId("r"), Reason.REQUEST_FINISHED, 0.0) == []


def test_a_terminating_instance_refuses_what_comes() -> None:
    llumlet = Llumlet(A, config())
    llumlet.set_terminating(True, 0.0)
    reserve = Reserve(MigrationId("C-1"), RequestId("r"), 0, 0, 1, False, None, b"request")
    assert llumlet.on_message(C, reserve, 0.0) == [
        Send(C, Aborted(MigrationId("C-1"), None, Reason.TERMINATING))
    ]


def test_an_instance_has_open_migrations_until_both_sides_know_how_they_ended() -> None:
    llumlet = Llumlet(A, config())
    assert not llumlet.has_open_migrations
    come(llumlet, "r")
    assert llumlet.has_open_migrations
    llumlet.on_message(C, Released(MigrationId("C-1")), 0.0)
    assert not llumlet.has_open_migrations


def test_a_request_is_arriving_from_its_reservation_until_the_engine_has_it() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.arriving_requests() == frozenset()
    number = coming(llumlet, "r")
    assert llumlet.arriving_requests() == {"r"}
    commit = Commit(MigrationId("C-1"), number, RequestId("r"), 0, 0, b"state")
    llumlet.on_message(C, commit, 0.0)
    assert llumlet.arriving_requests() == {"r"}
