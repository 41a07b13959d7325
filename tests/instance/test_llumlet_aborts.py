"""Where a llumlet sends the aborts of clients."""

import pytest

from sterna.instance import llumlet as llumlet_module
from sterna.instance.llumlet import ForwardAbort, Llumlet
from sterna.migration.messages import (
    Abort,
    AbortRequest,
    Ended,
    ForwardedAbort,
    FreeReservation,
    Mode,
    Reason,
    ReservationFreed,
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
    paired,
    running,
    until_commit,
    until_reserve,
    without_reports,
)


def test_abort_of_a_request_that_is_here_goes_to_the_engine() -> None:
    assert Llumlet(A, config()).on_client_abort(RequestId("r"), 0.0) == [
        AbortRequest(RequestId("r"))
    ]


def test_abort_of_a_request_that_is_leaving_ends_request_and_migration() -> None:
    llumlet = paired(running("r"))
    until_reserve(llumlet, "A-1")
    effects = without_reports(llumlet.on_client_abort(RequestId("r"), 0.0))
    assert effects == [
        AbortRequest(RequestId("r")),
        Send(B, Abort(MigrationId("A-1"), Reason.REQUEST_ABORTED)),
        Ended(MigrationId("A-1"), RequestId("r"), B, True, Reason.REQUEST_ABORTED, 0),
    ]


def test_abort_of_a_committed_request_goes_to_its_destination() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    assert without_reports(llumlet.on_client_abort(RequestId("r"), 0.0)) == [
        Send(B, ForwardedAbort(MigrationId("A-1"), N, RequestId("r")))
    ]


def test_abort_of_a_request_that_left_follows_it() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [ForwardAbort(B, RequestId("r"))]


def test_abort_of_a_request_that_is_coming_is_told_its_source() -> None:
    llumlet = Llumlet(A, config())
    coming(llumlet, "r")
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [
        ForwardAbort(C, RequestId("r")),
        FreeReservation(MigrationId("C-1")),
    ]


def test_abort_of_a_request_that_came_back_goes_to_the_engine() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    come(llumlet, "r")
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [AbortRequest(RequestId("r"))]


def test_abort_of_a_request_that_was_dispatched_here_again_goes_to_the_engine() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    llumlet.on_request_arrived(RequestId("r"))
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [AbortRequest(RequestId("r"))]


def test_abort_of_a_request_whose_new_instance_died_is_not_sent_there() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    llumlet.on_peer_dead(B, 0.0)
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [AbortRequest(RequestId("r"))]


def test_abort_of_a_request_that_left_follows_it_whoever_else_dies() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    llumlet.on_peer_dead(C, 0.0)
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [ForwardAbort(B, RequestId("r"))]


def test_abort_of_a_request_that_did_not_come_back_after_all_follows_it() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    coming(llumlet, "r")
    llumlet.on_message(C, Abort(MigrationId("C-1"), Reason.CANCELLED), 0.0)
    effects = llumlet.on_outcome(MigrationId("C-1"), ReservationFreed(), 0.0)
    assert any(isinstance(each, Ended) for each in effects)
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [ForwardAbort(B, RequestId("r"))]


def test_only_the_latest_departures_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llumlet_module, "MOVED_OUT_CAPACITY", 2)
    llumlet = Llumlet(A, config())
    for number in (1, 2, 3):
        llumlet.on_order(RequestId(f"r{number}"), B, Mode.LIVE, 0.0)
        committed(llumlet, f"A-{number}")
    assert llumlet.on_client_abort(RequestId("r1"), 0.0) == [AbortRequest(RequestId("r1"))]
    assert llumlet.on_client_abort(RequestId("r2"), 0.0) == [ForwardAbort(B, RequestId("r2"))]
